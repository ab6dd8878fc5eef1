-- What the command line asks through the door: SELECTs over the views. A parameter that is null
-- does not narrow the answer.

-- name: cli_lag
-- In: $consumer_group or null. Out: a row for each group and topic.
SELECT lag.consumer_group, lag.topic, sum(lag.lag)::BIGINT AS lag,
       sum(progress.in_flight)::BIGINT AS in_flight, sum(progress.retrying)::BIGINT AS retrying,
       sum(progress.parked)::BIGINT AS parked,
       min(lag.oldest_unread_at_ms) FILTER (WHERE lag.lag > 0) AS oldest_unread_at_ms
FROM lag JOIN progress USING (consumer_group, topic, queue_id)
WHERE $consumer_group IS NULL OR lag.consumer_group = $consumer_group
GROUP BY lag.consumer_group, lag.topic
ORDER BY lag.consumer_group, lag.topic;

-- name: cli_lag_by_queue
-- In: $consumer_group or null. Out: a row for each group, topic and queue.
SELECT lag.consumer_group, lag.topic, lag.queue_id, lag.lag, progress.in_flight,
       progress.retrying, progress.parked, progress.committed_offset, progress.max_offset,
       lag.oldest_unread_at_ms
FROM lag JOIN progress USING (consumer_group, topic, queue_id)
WHERE $consumer_group IS NULL OR lag.consumer_group = $consumer_group
ORDER BY lag.consumer_group, lag.topic, lag.queue_id;

-- name: cli_find
-- In: $topic, $key, $message_id, $from_ms, $to_ms (each null but the topic), $count. Out: messages
-- in the order they were stored.
SELECT topic, queue_id, queue_offset, message_id, tag, keys, message_group, born_at_ms,
       stored_at_ms, deliver_at_ms
FROM messages
WHERE topic = $topic
  AND ($key IS NULL OR list_contains(keys, $key))
  AND ($message_id IS NULL OR message_id = $message_id)
  AND ($from_ms IS NULL OR stored_at_ms >= $from_ms)
  AND ($to_ms IS NULL OR stored_at_ms < $to_ms)
ORDER BY stored_at_ms, queue_id, queue_offset
LIMIT $count;

-- name: cli_trace
-- In: $message_id. Out: what happened to the message, in order.
SELECT at_ms, what, topic, queue_id, queue_offset, consumer_group, attempt, visible_at_ms,
       client_id, detail
FROM message_trace
WHERE message_id = $message_id
ORDER BY at_ms, (what = 'stored') DESC, attempt, visible_at_ms;

-- name: cli_dead_letters
-- In: $consumer_group. Out: its dead letters; a condition of the caller may be appended.
SELECT message_id, topic, origin_queue_id, origin_queue_offset, attempts, reason, error_type,
       signature, run_id, tag, keys, message_group, born_at_ms, stored_at_ms, dead_lettered_at_ms,
       dead_letter_topic, queue_id, queue_offset, redriven_at_ms, redrive_id
FROM dead_letters
WHERE consumer_group = $consumer_group;

-- name: cli_parked
-- In: $consumer_group or null. Out: what is parked and what is given up, the oldest first.
SELECT consumer_group, topic, message_group, queue_id, queue_offset, message_id, 'parked' AS state,
       parked_at_ms AS since_ms, waiting, delivery_attempts, reason, error_type, signature, run_id
FROM parked
WHERE $consumer_group IS NULL OR consumer_group = $consumer_group
UNION ALL
SELECT consumer_group, topic, message_group, queue_id, queue_offset, message_id, 'given up',
       condemned_at_ms, 0, NULL, reason, error_type, signature, run_id
FROM condemned
WHERE $consumer_group IS NULL OR consumer_group = $consumer_group
ORDER BY since_ms, consumer_group, topic, queue_id, queue_offset;
