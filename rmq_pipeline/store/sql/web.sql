-- Queries of the web page: SELECTs over the views. "{lag}" and the like stand for the view now, or
-- for its macro at a moment. A parameter that is null does not narrow the answer.

-- name: web_first_moment
-- In: nothing. Out: the first millisecond of the retained history.
SELECT min(at_ms) AS first_ms FROM events;

-- name: web_groups
-- In: $at_ms. Out: a row for each consumer group and topic that it reads or has dead letters of.
WITH l AS (
    SELECT consumer_group, topic, sum(lag)::BIGINT AS lag,
           min(oldest_unread_at_ms) AS oldest_unread_at_ms
    FROM "{lag}" GROUP BY consumer_group, topic
), p AS (
    SELECT consumer_group, topic, sum(in_flight)::BIGINT AS in_flight,
           sum(retrying)::BIGINT AS retrying, sum(parked)::BIGINT AS parked
    FROM "{progress}" GROUP BY consumer_group, topic
), d AS (
    SELECT consumer_group, topic, count(*) AS dead_letters
    FROM dead_letters
    WHERE dead_lettered_at_ms <= $at_ms AND coalesce(redriven_at_ms > $at_ms, true)
    GROUP BY consumer_group, topic
), pairs AS (
    SELECT consumer_group, topic FROM l
    UNION SELECT consumer_group, topic FROM p
    UNION SELECT consumer_group, topic FROM d
)
SELECT g.consumer_group, g."order", g.on_failure, k.topic, l.lag, l.oldest_unread_at_ms,
       coalesce(p.in_flight, 0) AS in_flight, coalesce(p.retrying, 0) AS retrying,
       coalesce(p.parked, 0) AS parked, coalesce(d.dead_letters, 0) AS dead_letters
FROM consumer_groups AS g
LEFT JOIN pairs AS k USING (consumer_group)
LEFT JOIN l ON l.consumer_group = k.consumer_group AND l.topic = k.topic
LEFT JOIN p ON p.consumer_group = k.consumer_group AND p.topic = k.topic
LEFT JOIN d ON d.consumer_group = k.consumer_group AND d.topic IS NOT DISTINCT FROM k.topic
WHERE g.created_at_ms <= $at_ms
ORDER BY g.consumer_group, k.topic;

-- name: web_topics
-- In: $at_ms. Out: a row for each topic of users; messages are those that are retained today.
SELECT t.topic, t.type, t.queues, coalesce(m.messages, 0) AS messages,
       coalesce(m.last_minute, 0) AS last_minute, m.last_stored_at_ms,
       coalesce(s.scheduled, 0) AS scheduled, coalesce(h.half, 0) AS half
FROM topics AS t
LEFT JOIN (
    SELECT topic, count(*) AS messages, max(stored_at_ms) AS last_stored_at_ms,
           count(*) FILTER (WHERE stored_at_ms > $at_ms - 60000) AS last_minute
    FROM messages WHERE stored_at_ms <= $at_ms GROUP BY topic
) AS m USING (topic)
LEFT JOIN (
    SELECT topic, count(*) AS scheduled FROM "{scheduled}" GROUP BY topic
) AS s USING (topic)
LEFT JOIN (SELECT topic, count(*) AS half FROM "{half}" GROUP BY topic) AS h USING (topic)
WHERE t.created_at_ms <= $at_ms AND NOT starts_with(t.topic, '%DLQ%')
  AND t.topic NOT IN (
      'SCHEDULE_TOPIC_XXXX', 'RMQ_SYS_TRANS_HALF_TOPIC', 'TRANS_CHECK_MAX_TIME_TOPIC'
  )
ORDER BY t.topic;

-- name: web_windows
-- In: $at_ms. Out: the last owner of each kind of background work that was opened by then.
SELECT name, arg_max(owner, opened_at_ms) AS owner, max(epoch) AS epoch,
       max(opened_at_ms) AS opened_at_ms
FROM window_history WHERE opened_at_ms <= $at_ms
GROUP BY name ORDER BY name;

-- name: web_stored
-- In: $topic, $from_ms, $to_ms, $step_ms. Out: messages stored in each step of the time.
SELECT (stored_at_ms - $from_ms) // $step_ms AS step, count(*) AS stored
FROM messages
WHERE stored_at_ms > $from_ms AND stored_at_ms <= $to_ms
  AND ($topic IS NULL OR topic = $topic) AND NOT starts_with(topic, '%DLQ%')
GROUP BY step ORDER BY step;

-- name: web_settled
-- In: $consumer_group, $from_ms, $to_ms, $step_ms. Out: messages acked and failed in each step.
SELECT (at_ms - $from_ms) // $step_ms AS step,
       count(*) FILTER (WHERE kind IN ('ack', 'ack_ahead')) AS acked,
       count(*) FILTER (WHERE kind IN ('retry', 'park', 'dead_letter')) AS failed
FROM events
WHERE at_ms > $from_ms AND at_ms <= $to_ms
  AND kind IN ('ack', 'ack_ahead', 'retry', 'park', 'dead_letter')
  AND ($consumer_group IS NULL OR consumer_group = $consumer_group)
GROUP BY step ORDER BY step;

-- name: web_lag_over_time
-- In: $consumer_group, $from_ms, $to_ms, $step_ms. Out: lag of each group at each of the moments.
SELECT m.at_ms, l.consumer_group, sum(l.lag)::BIGINT AS lag
FROM range($from_ms, $to_ms + 1, $step_ms) AS m(at_ms), LATERAL (FROM lag_at(m.at_ms)) AS l
WHERE $consumer_group IS NULL OR l.consumer_group = $consumer_group
GROUP BY m.at_ms, l.consumer_group ORDER BY l.consumer_group, m.at_ms;

-- name: web_queues
-- In: $consumer_group. Out: its progress in each queue.
SELECT p.topic, p.queue_id, p.committed_offset, p.cursor, p.max_offset, l.lag,
       l.oldest_unread_at_ms, p.in_flight, p.retrying, p.parked
FROM "{progress}" AS p LEFT JOIN "{lag}" AS l USING (consumer_group, topic, queue_id)
WHERE p.consumer_group = $consumer_group
ORDER BY p.topic, p.queue_id;

-- name: web_holders
-- In: $consumer_group. Out: the clients, or windows, that hold its messages.
SELECT topic, client_id, epoch, count(*) AS messages, min(visible_at_ms) AS first_end_ms,
       max(visible_at_ms) AS last_end_ms
FROM "{in_flight}"
WHERE consumer_group = $consumer_group
GROUP BY topic, client_id, epoch ORDER BY messages DESC, client_id LIMIT 100;

-- name: web_retrying
-- In: $consumer_group. Out: its failed messages that will be delivered again, by signature.
SELECT topic, signature, any_value(error_type) AS error_type, any_value(reason) AS reason,
       count(*) AS messages, max(delivery_attempts) AS delivery_attempts,
       min(visible_at_ms) AS next_ms, any_value(message_id) AS example_id,
       any_value(traceback) AS traceback
FROM "{retrying}"
WHERE consumer_group = $consumer_group
GROUP BY topic, signature ORDER BY messages DESC, signature LIMIT 100;

-- name: web_parked
-- In: $consumer_group. Out: what is parked, and message groups that are quarantined.
SELECT topic, message_group, queue_id, queue_offset, message_id, 'parked' AS state,
       parked_at_ms AS since_ms, waiting, delivery_attempts, reason, error_type, run_id
FROM "{parked}" WHERE consumer_group = $consumer_group
UNION ALL
SELECT topic, message_group, queue_id, queue_offset, message_id, 'quarantined',
       quarantined_at_ms, 0, NULL, reason, error_type, run_id
FROM "{quarantined_groups}" WHERE consumer_group = $consumer_group
ORDER BY waiting DESC, since_ms LIMIT 200;

-- name: web_dead_letters
-- In: $consumer_group, $at_ms. Out: its dead letters by signature, redriven or not.
SELECT topic, signature, any_value(error_type) AS error_type, any_value(reason) AS reason,
       count(*) FILTER (WHERE coalesce(redriven_at_ms > $at_ms, true)) AS not_redriven,
       count(*) FILTER (WHERE redriven_at_ms <= $at_ms) AS redriven,
       max(dead_lettered_at_ms) AS last_at_ms,
       arg_max(message_id, dead_lettered_at_ms) AS example_id
FROM dead_letters
WHERE consumer_group = $consumer_group AND dead_lettered_at_ms <= $at_ms
GROUP BY topic, signature ORDER BY not_redriven DESC, last_at_ms DESC LIMIT 100;

-- name: web_redrives
-- In: $consumer_group, $at_ms. Out: its redrives, the newest first, with the outcomes.
SELECT redrive_id, min(redriven_at_ms) AS redriven_at_ms, count(*) AS messages,
       count(*) FILTER (WHERE outcome = 'acked' AND is_known) AS acked,
       count(*) FILTER (
           WHERE outcome IN ('retrying', 'parked', 'dead_lettered') AND is_known
       ) AS failed,
       count(*) FILTER (WHERE outcome = 'waiting' OR NOT is_known) AS waiting
FROM (SELECT *, coalesce(outcome_at_ms <= $at_ms, true) AS is_known FROM redrives)
WHERE consumer_group = $consumer_group AND redriven_at_ms <= $at_ms
GROUP BY redrive_id ORDER BY redriven_at_ms DESC LIMIT 20;

-- name: web_sink_files
-- In: $consumer_group, $at_ms. Out: size of its sink, and its last commit.
SELECT count(*) AS files, coalesce(sum(rows), 0)::BIGINT AS rows,
       coalesce(sum(bytes), 0)::BIGINT AS bytes, max(at_ms) AS last_at_ms
FROM sink_files WHERE consumer_group = $consumer_group AND at_ms <= $at_ms;

-- name: web_life
-- In: $message_id, $at_ms. Out: the life of a message in order, with the failures.
SELECT at_ms, what, topic, queue_id, queue_offset, consumer_group, attempt, visible_at_ms,
       client_id, run_id, reason, detail
FROM message_trace
WHERE message_id = $message_id AND at_ms <= $at_ms
ORDER BY position, "row" LIMIT 500;

-- name: web_sink_rows
-- In: $message_id, $at_ms. Out: the sink files that may hold rows of a message.
SELECT consumer_group, settled_at_ms, run_id, path, partition, version, counts
FROM files_of($message_id)
WHERE settled_at_ms <= $at_ms
ORDER BY settled_at_ms, consumer_group LIMIT 100;

-- name: web_redrive_plan
-- In: $consumer_group, $signature. Out: the dead letters that a redrive would take, by topic.
SELECT topic, count(*) AS messages, count(DISTINCT message_group) AS message_groups,
       min(dead_lettered_at_ms) AS first_at_ms, max(dead_lettered_at_ms) AS last_at_ms
FROM dead_letters
WHERE consumer_group = $consumer_group AND redriven_at_ms IS NULL
  AND ($signature IS NULL OR signature = $signature)
GROUP BY topic ORDER BY topic;

-- name: web_reset_plan
-- In: $consumer_group, $topic. Out: its offsets in each queue, and what a reset ends.
SELECT queue_id, min_offset, max_offset, cursor, committed_offset, in_flight, retrying, parked
FROM progress WHERE consumer_group = $consumer_group AND topic = $topic
ORDER BY queue_id;

-- name: web_unpark_plan
-- In: $consumer_group, $message_group. Out: what an unpark releases, by topic.
SELECT topic, count(*) FILTER (WHERE state = 'parked') AS parked,
       coalesce(sum(waiting), 0)::BIGINT AS waiting,
       count(*) FILTER (WHERE state = 'quarantined') AS quarantined
FROM (
    SELECT consumer_group, topic, message_group, 'parked' AS state, waiting FROM parked
    UNION ALL
    SELECT consumer_group, topic, message_group, 'quarantined', 0 FROM quarantined_groups
)
WHERE consumer_group = $consumer_group
  AND ($message_group IS NULL OR message_group = $message_group)
GROUP BY topic ORDER BY topic;

-- name: web_newest
-- In: $topic, $queue_id, $at_ms, $limit. Out: the newest messages until then, the newest first.
SELECT queue_id, queue_offset, message_id, tag, keys, message_group, stored_at_ms
FROM messages
WHERE topic = $topic AND stored_at_ms <= $at_ms AND ($queue_id IS NULL OR queue_id = $queue_id)
ORDER BY stored_at_ms DESC, queue_offset DESC, queue_id LIMIT $limit;
