-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_resets
-- In: nothing. Out: the table.
-- A row: how often somebody has reset a group in a queue.
-- Written by: RESET, unless the reader itself moved back.
-- Goes: with TOPIC_DELETED, GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.resets (
    group_id INTEGER, topic_id INTEGER, queue_id INTEGER, resets BIGINT
);

-- name: state_resets
-- In: nothing. Out: what recovery reads.
SELECT group_id, topic_id, queue_id, resets
FROM store.resets ORDER BY group_id, topic_id, queue_id;
