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
