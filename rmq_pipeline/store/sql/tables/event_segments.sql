-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_event_segments
-- In: nothing. Out: the table.
-- A row: a registered Parquet file of events.
-- Written by: EVENT_SEGMENT, EVENT_SEGMENTS_REPLACED.
-- Goes: with an EVENT_SEGMENTS_REPLACED that removes it.
CREATE TABLE IF NOT EXISTS store.event_segments (
    path VARCHAR, from_position BIGINT, to_position BIGINT, "rows" BIGINT
);

-- name: state_event_segments
-- In: nothing. Out: what recovery reads.
SELECT path, from_position, to_position, "rows"
FROM store.event_segments ORDER BY from_position;
