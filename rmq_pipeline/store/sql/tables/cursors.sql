-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_cursors
-- In: nothing. Out: the table.
-- A row: the group has examined all messages of the queue before queue_offset.
-- Written by: LEASE, CURSOR and OFFSET_UPDATED raise it, RESET sets it.
-- Goes: with TOPIC_DELETED, GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.cursors (
    group_id INTEGER, topic_id INTEGER, queue_id INTEGER, queue_offset BIGINT
);

-- name: state_cursors
-- In: nothing. Out: what recovery reads.
SELECT group_id, topic_id, queue_id, queue_offset
FROM store.cursors ORDER BY group_id, topic_id, queue_id;
