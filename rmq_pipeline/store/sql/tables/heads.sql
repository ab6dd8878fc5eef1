-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_heads
-- In: nothing. Out: the table.
-- A row: a message queue that was written to: offsets [min_offset, max_offset) exist.
-- Written by: every message; EXPIRED raises min_offset.
-- Goes: with TOPIC_DELETED.
CREATE TABLE IF NOT EXISTS store.heads (
    topic_id INTEGER, queue_id INTEGER, min_offset BIGINT, max_offset BIGINT
);

-- name: state_heads
-- In: nothing. Out: what recovery reads.
SELECT topic_id, queue_id, min_offset, max_offset
FROM store.heads ORDER BY topic_id, queue_id;
