-- Segments that are registered, replaced by larger ones, and expired with their messages.

-- name: insert_segments
-- In: staged_events. Out: a row for each SEGMENT.
INSERT INTO store.segments
SELECT topic_id, queue_id, (detail ->> '$.base')::BIGINT, (detail ->> '$.end')::BIGINT,
       detail ->> '$.path', (detail ->> '$.rows')::BIGINT, (detail ->> '$.bytes')::BIGINT
FROM staged_events WHERE kind = $SEGMENT ORDER BY seq;

-- name: remove_replaced_segments
-- In: staged_events. Out: no segments that another one replaces, which has their offsets.
DELETE FROM store.segments AS s USING (
    SELECT topic_id, queue_id, (detail ->> '$.base')::BIGINT AS base,
           (detail ->> '$.end')::BIGINT AS "end"
    FROM staged_events WHERE kind = $SEGMENTS_REPLACED
) AS r
WHERE s.topic_id = r.topic_id AND s.queue_id = r.queue_id
  AND s.base >= r.base AND s."end" <= r."end";

-- name: insert_replacing_segments
-- In: staged_events. Out: a row for each SEGMENTS_REPLACED that no later one has replaced again.
INSERT INTO store.segments
SELECT topic_id, queue_id, (detail ->> '$.base')::BIGINT AS base,
       (detail ->> '$.end')::BIGINT AS "end", detail ->> '$.path',
       (detail ->> '$.rows')::BIGINT, (detail ->> '$.bytes')::BIGINT
FROM staged_events AS e WHERE kind = $SEGMENTS_REPLACED AND NOT EXISTS (
    SELECT 1 FROM staged_events AS later
    WHERE later.kind = $SEGMENTS_REPLACED AND later.seq > e.seq
      AND later.topic_id = e.topic_id AND later.queue_id = e.queue_id
      AND (later.detail ->> '$.base')::BIGINT <= (e.detail ->> '$.base')::BIGINT
      AND (later.detail ->> '$.end')::BIGINT >= (e.detail ->> '$.end')::BIGINT
)
ORDER BY seq;

-- name: expire_segments
-- In: staged_events. Out: no segments of what has expired.
DELETE FROM store.segments AS s USING (
    SELECT topic_id, queue_id, max(queue_offset) AS before
    FROM staged_events WHERE kind = $EXPIRED GROUP BY topic_id, queue_id
) AS e
WHERE s.topic_id = e.topic_id AND s.queue_id = e.queue_id AND s."end" <= e.before;

-- name: expire_messages
-- In: staged_events. Out: no rows of what has expired.
DELETE FROM store.consume_queue AS q USING (
    SELECT topic_id, queue_id, max(queue_offset) AS before
    FROM staged_events WHERE kind = $EXPIRED GROUP BY topic_id, queue_id
) AS e
WHERE q.topic_id = e.topic_id AND q.queue_id = e.queue_id AND q.queue_offset < e.before;

-- name: expire_dead_letters
-- In: staged_events. Out: no rows of what has expired.
DELETE FROM store.dead_letters AS d USING (
    SELECT topic_id, queue_id, max(queue_offset) AS before
    FROM staged_events WHERE kind = $EXPIRED GROUP BY topic_id, queue_id
) AS e
WHERE d.topic_id = e.topic_id AND d.queue_id = e.queue_id AND d.queue_offset < e.before;

-- name: expire_redrives
-- In: staged_events. Out: no rows of dead letters that have expired.
DELETE FROM store.redrives AS r USING (
    SELECT topic_id, queue_id, max(queue_offset) AS before
    FROM staged_events WHERE kind = $EXPIRED GROUP BY topic_id, queue_id
) AS e
WHERE r.topic_id = e.topic_id AND r.queue_id = e.queue_id AND r.queue_offset < e.before;

-- name: raise_min_offset
-- In: staged_events. Out: the min_offset of what has expired.
UPDATE store.heads AS h SET min_offset = greatest(h.min_offset, least(e.before, h.max_offset))
FROM (
    SELECT topic_id, queue_id, max(queue_offset) AS before
    FROM staged_events WHERE kind = $EXPIRED GROUP BY topic_id, queue_id
) AS e
WHERE h.topic_id = e.topic_id AND h.queue_id = e.queue_id;
