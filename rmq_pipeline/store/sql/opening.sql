-- What opening does before and after the tables of schema.sql are there.

-- name: made_by
-- In: nothing. Out: made_by: which version made the tables and views.
SELECT made_by FROM store.made_by;

-- name: clear_made_by
-- In: nothing. Out: nobody made them.
DELETE FROM store.made_by;

-- name: insert_made_by
-- In: $made_by. Out: that version has made them.
INSERT INTO store.made_by VALUES ($made_by);

-- name: add_deleted_detail
-- In: nothing. Out: older homes, too, have the column: what a topic or group was like at last; null
-- for what was deleted before they had it.
ALTER TABLE store.deleted_names ADD COLUMN IF NOT EXISTS detail VARCHAR;

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
