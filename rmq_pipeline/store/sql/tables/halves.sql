-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_halves
-- In: nothing. Out: the table.
-- A row: an open half message (offset in the half topic), and its next check.
-- Written by: HALF; the first one of a half message comes in the frame of the message.
-- Goes: with HALF_COMMITTED, HALF_ROLLED_BACK, HALF_GIVEN_UP.
CREATE TABLE IF NOT EXISTS store.halves (
    queue_offset BIGINT, position BIGINT, "row" INTEGER, target_topic_id INTEGER,
    message_id_hash BIGINT, producer_group VARCHAR, checks INTEGER, next_check_ms BIGINT,
    immunity_ms BIGINT
);

-- name: state_halves
-- In: nothing. Out: what recovery reads.
SELECT queue_offset, position, "row", target_topic_id, message_id_hash, producer_group, checks,
       next_check_ms, immunity_ms
FROM store.halves ORDER BY queue_offset;
