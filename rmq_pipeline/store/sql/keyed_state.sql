-- The tables of keyed state. "{table}", "{view}", "{column}" are replaced by quoted names, "{type}"
-- and "{before}" by what DuckDB calls the type.
-- staged_state: message_group, message_group_hash, removed, the consumer's own columns, and
-- staged_order, their order in the transaction.

-- name: keyed_tables
-- In: nothing. Out: a row a table.
SELECT group_id, topic_id, view_name FROM store.keyed_tables;

-- name: keyed_schema
-- In: $group_id, $topic_id. Out: the Arrow schema of its columns; no row when there is no state.
SELECT arrow_schema FROM store.keyed_tables WHERE group_id = $group_id AND topic_id = $topic_id;

-- name: fold_state
-- In: staged_state. Out: net_state, the last row of each message group.
CREATE OR REPLACE TEMP TABLE net_state AS
SELECT * EXCLUDE (staged_order) FROM staged_state
WHERE staged_order IN (SELECT max(staged_order) FROM staged_state GROUP BY message_group);

-- name: scan_state
-- In: staged_state. Out: a row of no use; every value of every column was read.
SELECT last(COLUMNS(*)) FROM staged_state;

-- name: create_state
-- In: net_state. Out: {table}, empty.
CREATE TABLE "{table}" AS SELECT * EXCLUDE (removed) FROM net_state WHERE false;

-- name: free_view_name
-- In: $group_id, $topic_id. Out: keyed_state_<group>, or keyed_state_<group>_<topic> when that is
-- taken, or with the ids when that is taken too; what is no letter, digit or _ becomes _.
WITH names AS (
    SELECT regexp_replace(lower(g.name), '[^a-z0-9_]', '_', 'g') AS group_name,
           regexp_replace(lower(t.name), '[^a-z0-9_]', '_', 'g') AS topic_name
    FROM (SELECT $group_id AS group_id, $topic_id AS topic_id) AS wanted
    LEFT JOIN store.groups AS g USING (group_id) LEFT JOIN store.topics AS t USING (topic_id)
), candidates AS (
    SELECT unnest(['keyed_state_' || group_name,
                   'keyed_state_' || group_name || '_' || topic_name,
                   'keyed_state_' || $group_id || '_' || $topic_id]) AS name,
           unnest([1, 2, 3]) AS choice
    FROM names
)
SELECT name FROM candidates
WHERE name IS NOT NULL AND name NOT IN (SELECT view_name FROM store.keyed_tables)
ORDER BY choice LIMIT 1;

-- name: register_state
-- In: $group_id, $topic_id, $table_name, $view_name. Out: its row.
INSERT INTO store.keyed_tables VALUES ($group_id, $topic_id, $table_name, $view_name, NULL);

-- name: set_arrow_schema
-- In: $group_id, $topic_id, $arrow_schema. Out: its row has it.
UPDATE store.keyed_tables SET arrow_schema = $arrow_schema
WHERE group_id = $group_id AND topic_id = $topic_id;

-- name: view_state
-- In: {table}. Out: {view} over it. The columns of a view are bound when it is made: again after
-- each change.
CREATE OR REPLACE VIEW main."{view}" AS SELECT * EXCLUDE (message_group_hash) FROM "{table}";

-- name: changed_columns
-- In: $table_name; net_state. Out: its columns that the table lacks or has in another type:
-- column_name, data_type, and the type that the table has (null: none). DuckDB tells names apart by
-- more than the case of ASCII letters; lower() would take É and é for one.
WITH letters AS (
    SELECT 'ABCDEFGHIJKLMNOPQRSTUVWXYZ' AS upper, 'abcdefghijklmnopqrstuvwxyz' AS lower
)
SELECT n.column_name, n.data_type, t.data_type AS before
FROM letters AS l
CROSS JOIN duckdb_columns() AS n
LEFT JOIN duckdb_columns() AS t
    ON t.schema_name = 'keyed' AND t.table_name = $table_name
   AND translate(t.column_name, l.upper, l.lower) = translate(n.column_name, l.upper, l.lower)
WHERE n.table_name = 'net_state' AND n.database_name = 'temp' AND n.column_name <> 'removed'
  AND t.data_type IS DISTINCT FROM n.data_type
ORDER BY n.column_index;

-- name: add_column
-- In: {table}, {column}, {type}. Out: the column, null everywhere.
ALTER TABLE "{table}" ADD COLUMN "{column}" "{type}";

-- name: change_column
-- In: {table}, {column}, {type}. Out: the column in that type; null where a value has no such form.
ALTER TABLE "{table}" ALTER COLUMN "{column}" SET DATA TYPE "{type}"
USING TRY_CAST("{column}" AS "{type}");

-- name: clear_column
-- In: {table}, {column}, {type}. Out: the column in that type, null everywhere.
ALTER TABLE "{table}" ALTER COLUMN "{column}" SET DATA TYPE "{type}" USING NULL;

-- name: cast_nothing
-- In: {before}, {type}. Out: null; an error when DuckDB knows no cast, not even TRY_CAST.
SELECT TRY_CAST(NULL::"{before}" AS "{type}");

-- name: delete_state
-- In: net_state. Out: the rows it replaces or removes are gone from {table}.
DELETE FROM "{table}" AS t USING net_state AS n
WHERE t.message_group_hash = n.message_group_hash AND t.message_group = n.message_group;

-- name: insert_state
-- In: net_state. Out: the rows that it leaves, in {table}.
INSERT INTO "{table}" BY NAME SELECT * EXCLUDE (removed) FROM net_state WHERE NOT removed;

-- name: forgotten_state
-- In: staged_events. Out: the tables of deleted topics and groups.
SELECT group_id, topic_id, view_name FROM store.keyed_tables
WHERE topic_id IN (SELECT topic_id FROM staged_events WHERE kind = $TOPIC_DELETED)
   OR group_id IN (SELECT group_id FROM staged_events WHERE kind = $GROUP_DELETED);

-- name: drop_state_view
-- In: {view}. Out: it is gone.
DROP VIEW IF EXISTS main."{view}";

-- name: drop_state
-- In: {table}. Out: it is gone.
DROP TABLE IF EXISTS "{table}";

-- name: columns_of_state
-- In: {table}. Out: no row; its columns are those of the table.
SELECT * FROM "{table}" LIMIT 0;

-- name: read_state
-- In: {table}. Out: message_group and the consumer's own columns.
SELECT * EXCLUDE (message_group_hash) FROM "{table}";

-- name: read_some_state
-- In: {table}; asked: message_group_hash. Out: the same, of those message groups.
SELECT * EXCLUDE (message_group_hash) FROM "{table}"
WHERE message_group_hash IN (SELECT message_group_hash FROM asked);

-- name: first_of_groups
-- In: $topic_id; asked: message_group_hash. Out: for each of those message groups that the topic
-- has, its queue (null when there are several) and its first offset.
SELECT q.message_group_hash,
       CASE WHEN min(q.queue_id) = max(q.queue_id) THEN min(q.queue_id) END AS queue_id,
       min(q.queue_offset) AS queue_offset
FROM store.consume_queue AS q SEMI JOIN asked AS a ON q.message_group_hash = a.message_group_hash
WHERE q.topic_id = $topic_id
GROUP BY q.message_group_hash;
