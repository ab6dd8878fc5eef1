-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_scheduled
-- In: nothing. Out: the table.
-- A row: a message of SCHEDULE_TOPIC_XXXX (offset there) that waits for its time.
-- Written by: every message of that topic.
-- Goes: with SCHEDULE_DELIVERED, SCHEDULE_DROPPED, SCHEDULE_RECALLED.
CREATE TABLE IF NOT EXISTS store.scheduled (
    queue_id INTEGER, queue_offset BIGINT, deliver_at_ms BIGINT, target_topic_id INTEGER,
    position BIGINT, "row" INTEGER
);

-- name: state_scheduled
-- In: nothing. Out: what recovery reads.
SELECT queue_id, queue_offset, deliver_at_ms, target_topic_id, position, "row"
FROM store.scheduled ORDER BY queue_id, queue_offset;
