-- What opening does before and after the tables of schema.sql are there.

-- name: made_by
-- In: nothing. Out: made_by: which version made the tables and views.
SELECT made_by FROM store.made_by;

-- name: begin_made_by
-- In: nothing. Out: the one row of store.made_by.
INSERT INTO store.made_by SELECT '', 0 WHERE NOT EXISTS (FROM store.made_by);

-- name: set_made_by
-- In: $made_by. Out: that version has made them.
UPDATE store.made_by SET made_by = $made_by;

-- name: set_columns_since
-- In: nothing. Out: files of the history that exist now may lack columns: events end before the
-- position of store.reached, and a snapshot may be of just that position.
UPDATE store.made_by SET columns_since = (SELECT dispatched + 1 FROM store.reached);

-- name: never_complete
-- In: nothing. Out: all files of the history may lack columns, whatever their positions.
UPDATE store.made_by SET columns_since = 9223372036854775807;

-- name: table_columns
-- In: nothing. Out: table_name, column_name and data_type of the tables of schema.sql, in order.
SELECT c.table_name, c.column_name, c.data_type
FROM duckdb_columns() AS c JOIN duckdb_tables() AS t USING (table_oid)
WHERE c.schema_name = 'store' AND t.schema_name = 'store'
ORDER BY c.table_name, c.column_index;

-- name: begin_reached
-- In: nothing. Out: the one row of store.reached, at position 0 when it is new.
INSERT INTO store.reached SELECT 0, 0, 1, 1 WHERE NOT EXISTS (FROM store.reached);

-- name: clear_kinds
-- In: nothing. Out: no kinds.
DELETE FROM store.kinds;

-- name: insert_kinds
-- In: staged_kinds: kind, name. Out: they are the kinds.
INSERT INTO store.kinds SELECT kind, name FROM staged_kinds;

-- name: limit_operators
-- In: "{size}", such as '48MB'. Out: sorts and hash tables of this connection use no more memory.
SET operator_memory_limit = "{size}";

-- name: lock_settings
-- In: nothing. Out: no setting changes any more, on any connection.
SET lock_configuration = true;

-- name: rename_table
-- In: {table}, {new_name}. Out: the table has that name.
ALTER TABLE "{table}" RENAME TO "{new_name}";

-- name: rename_column
-- In: {table}, {column}, {new_name}. Out: the column has that name.
ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{new_name}";
