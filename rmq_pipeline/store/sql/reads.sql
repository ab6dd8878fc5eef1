-- What the broker asks while it runs.

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

-- name: find_offsets
-- In: $topic_id, $queue_id, $start, $stop, $limit; $key, $message_id, $from_ms, $to_ms, each of
-- which may be null. Out: the first offsets of such messages in [start, stop).
SELECT queue_offset FROM store.consume_queue
WHERE topic_id = $topic_id AND queue_id = $queue_id
  AND queue_offset >= $start AND queue_offset < $stop
  AND ($message_id IS NULL OR message_id = $message_id)
  AND ($key IS NULL OR list_contains(keys, $key))
  AND ($from_ms IS NULL OR stored_at_ms >= $from_ms)
  AND ($to_ms IS NULL OR stored_at_ms < $to_ms)
ORDER BY queue_offset LIMIT $limit;

-- name: stored_at
-- In: $topic_id, $queue_id, $queue_offset. Out: when that message was stored.
SELECT stored_at_ms FROM store.consume_queue
WHERE topic_id = $topic_id AND queue_id = $queue_id AND queue_offset = $queue_offset;

-- name: lag_of_groups
-- In: $consumer_group or null. Out: a row for each group, topic and queue that the group reads.
SELECT lag.consumer_group, lag.topic, lag.queue_id, lag.lag, progress.in_flight,
       progress.retrying, progress.parked, progress.committed_offset, progress.max_offset,
       lag.oldest_unread_at_ms, greatest(progress.cursor, progress.min_offset) AS unread_from
FROM lag JOIN progress USING (consumer_group, topic, queue_id)
WHERE $consumer_group IS NULL OR lag.consumer_group = $consumer_group
ORDER BY lag.consumer_group, lag.topic, lag.queue_id;

-- name: count_tags
-- In: stretches: queue_id, start, stop, a row a queue; $topic_id, $hashes. Out: of each queue that
-- has some, how many of its messages in [start, stop) have one of those tags.
SELECT q.queue_id, count(*) AS n
FROM store.consume_queue AS q JOIN stretches AS s USING (queue_id)
WHERE q.topic_id = $topic_id AND q.queue_offset >= s.start AND q.queue_offset < s.stop
  AND list_contains($hashes, q.tag_hash)
GROUP BY q.queue_id;

-- name: ended_halves
-- In: asked_halves: queue_offset. Out: what became of those that were ended.
SELECT e.queue_offset, e.message_id_hash, e.producer_group, e.resolution
FROM store.ended_halves AS e SEMI JOIN asked_halves AS a ON e.queue_offset = a.queue_offset;

-- name: delete_events
-- In: $to_position. Out: no events before it.
DELETE FROM store.events WHERE position < $to_position;

-- name: begin_query
-- In: nothing. Out: a transaction that can change nothing.
BEGIN TRANSACTION READ ONLY;

-- name: view_names
-- In: nothing. Out: the views that a query may read.
SELECT view_name FROM duckdb_views()
WHERE schema_name = 'main' AND NOT internal AND NOT temporary ORDER BY view_name;
