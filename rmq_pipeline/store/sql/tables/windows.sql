-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_windows
-- In: nothing. Out: the table.
-- A row: the lease under which one run does one kind of work, and its last settle.
-- Written by: WINDOW, WINDOW_CLOSED (expires at 0), SETTLED.
-- Goes: never: an epoch is not given twice.
CREATE TABLE IF NOT EXISTS store.windows (
    name VARCHAR, owner VARCHAR, epoch BIGINT, expires_at_ms BIGINT, settle_id VARCHAR,
    settle_answer VARCHAR
);

-- name: state_windows
-- In: nothing. Out: what recovery reads.
SELECT name, owner, epoch, expires_at_ms, settle_id, settle_answer
FROM store.windows ORDER BY name;
