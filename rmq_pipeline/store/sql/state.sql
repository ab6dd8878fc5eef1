-- What recovery reads: the state tables as they are.

-- name: state_reached
-- In: nothing. Out: one row.
SELECT dispatched, last_at_ms, next_topic_id, next_group_id FROM store.reached;

-- name: state_redriven
-- In: nothing. Out: a row a dead letter that was opened again.
SELECT topic_id, queue_id, queue_offset
FROM store.redrives ORDER BY topic_id, queue_id, queue_offset;

-- name: state_recent
-- In: $topic_id, $since_ms, $schedule_topic_id. Out: what was stored for the topic since then, the
-- oldest first: a scheduled message when it was scheduled, and not when it was delivered.
SELECT message_id, keys, stored_at_ms, queue_id, queue_offset,
       topic_id = $schedule_topic_id AS scheduled
FROM store.consume_queue
WHERE stored_at_ms >= $since_ms
  AND (topic_id = $topic_id AND deliver_at_ms IS NULL
       OR topic_id = $schedule_topic_id AND target_topic_id = $topic_id)
ORDER BY stored_at_ms;
