-- What opening does after the tables of schema.sql are there.

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
