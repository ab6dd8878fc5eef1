-- What the broker asks while it runs, and how old rows go.

-- name: index
-- In: $topic_id, $queue_id, $start, $stop. Out: its rows in [start, stop).
SELECT queue_offset, position, "row", message_group_hash, tag_hash
FROM store.consume_queue
WHERE topic_id = $topic_id AND queue_id = $queue_id
  AND queue_offset >= $start AND queue_offset < $stop
ORDER BY queue_offset;

-- name: backlog
-- In: asked: message_group_hash, start, ordinal; $topic_id, $queue_id, $first, $stop. Out: ordinal
-- and offset of the rows in [first, stop) of those message groups, each from its start on.
SELECT a.ordinal, q.queue_offset
FROM store.consume_queue AS q JOIN asked AS a ON q.message_group_hash = a.message_group_hash
WHERE q.topic_id = $topic_id AND q.queue_id = $queue_id
  AND q.queue_offset >= $first AND q.queue_offset < $stop AND q.queue_offset >= a.start;

-- name: offset_at
-- In: $topic_id, $queue_id, $at_ms. Out: the first offset stored at or after at_ms, or null; the
-- queue's max_offset, or null.
SELECT (
    SELECT min(queue_offset) FROM store.consume_queue
    WHERE topic_id = $topic_id AND queue_id = $queue_id AND stored_at_ms >= $at_ms
) AS first, (
    SELECT max_offset FROM store.heads WHERE topic_id = $topic_id AND queue_id = $queue_id
) AS max_offset;

-- name: ended_halves
-- In: asked_halves: queue_offset. Out: what became of those that were ended.
SELECT e.queue_offset, e.message_id_hash, e.producer_group, e.resolution
FROM store.ended_halves AS e SEMI JOIN asked_halves AS a ON e.queue_offset = a.queue_offset;

-- name: sink_files
-- In: $group_id. Out: schema.SINK_FILE + epoch, at_ms, in the order of their settles.
SELECT path, "rows", bytes, "partition", epoch, at_ms
FROM store.sink_files WHERE group_id = $group_id ORDER BY position, "row";

-- name: events_before
-- In: $to_position. Out: the events before it, in their order: that of the table, which is read by
-- one thread.
SELECT position, "row", kind, at_ms, group_id, topic_id, queue_id, queue_offset, attempt,
       visible_at_ms, delivery, epoch, message_group_hash, client_id, detail
FROM store.events WHERE position < $to_position;

-- name: delete_events
-- In: $to_position. Out: no events before it.
DELETE FROM store.events WHERE position < $to_position;

-- name: expire_messages
-- In: $topic_id, $queue_id, $before. Out: no rows of the queue before that offset.
DELETE FROM store.consume_queue
WHERE topic_id = $topic_id AND queue_id = $queue_id AND queue_offset < $before;

-- name: expire_dead_letters
-- In: $topic_id, $queue_id, $before. Out: no rows of the queue before that offset.
DELETE FROM store.dead_letters
WHERE topic_id = $topic_id AND queue_id = $queue_id AND queue_offset < $before;

-- name: raise_min_offset
-- In: $topic_id, $queue_id, $before. Out: the queue's min_offset is at least that.
UPDATE store.heads SET min_offset = greatest(min_offset, least($before, max_offset))
WHERE topic_id = $topic_id AND queue_id = $queue_id;

-- name: begin_query
-- In: nothing. Out: a transaction that can change nothing.
BEGIN TRANSACTION READ ONLY;

-- name: view_names
-- In: nothing. Out: the views that a query may read.
SELECT view_name FROM duckdb_views()
WHERE schema_name = 'main' AND NOT internal AND NOT temporary ORDER BY view_name;
