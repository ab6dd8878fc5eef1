-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_segments
-- In: nothing. Out: the table.
-- A row: a registered Parquet segment of a message queue.
-- Written by: SEGMENT, SEGMENTS_REPLACED.
-- Goes: with SEGMENTS_REPLACED, EXPIRED, TOPIC_DELETED.
CREATE TABLE IF NOT EXISTS store.segments (
    topic_id INTEGER, queue_id INTEGER, base BIGINT, "end" BIGINT, path VARCHAR,
    "rows" BIGINT, bytes BIGINT
);

-- name: state_segments
-- In: nothing. Out: what recovery reads.
SELECT topic_id, queue_id, base, "end", path
FROM store.segments ORDER BY topic_id, queue_id, base;
