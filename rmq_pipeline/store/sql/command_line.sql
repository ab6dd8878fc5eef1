-- Queries of the command line: SELECTs over the views. A parameter that is null
-- does not narrow the answer.

-- name: cli_trace
-- In: $message_id. Out: what happened to the message, in order, and then the sink files that may
-- hold what became of it; those that were replaced are called so.
SELECT at_ms, what, topic, queue_id, queue_offset, consumer_group, attempt, run_id, client_id,
       reason, visible_at_ms, detail
FROM (
    SELECT * FROM message_trace WHERE message_id = $message_id
    UNION ALL BY NAME
    SELECT settled_at_ms AS at_ms, if(counts, 'sink_file', 'replaced_sink_file') AS what, topic,
           queue_id, queue_offset, consumer_group, run_id, path AS detail,
           9223372036854775807 AS position, version::INTEGER AS "row"
    FROM files_of($message_id)
)
ORDER BY at_ms, position, "row";

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
       quarantined_at_ms, 0, NULL, reason, error_type, signature, run_id
FROM quarantined_groups
WHERE $consumer_group IS NULL OR consumer_group = $consumer_group
ORDER BY since_ms, consumer_group, topic, queue_id, queue_offset;

-- name: cli_peek_cursors
-- In: $consumer_group, $topic. Out: the cursor of each queue that the group has touched.
SELECT queue_id, cursor FROM progress WHERE consumer_group = $consumer_group AND topic = $topic;

-- name: cli_peek_again
-- In: $consumer_group, $topic. Out: places before the cursors whose messages can be delivered now,
-- and the attempt that this would be; the caller appends a limit. A message that waited for an
-- earlier one of its message group is among them if no message of the group is delivered, retrying
-- or parked.
WITH unsettled AS (
    SELECT queue_id, queue_offset, message_group, delivery_attempts AS attempts, visible_at_ms
    FROM retrying WHERE consumer_group = $consumer_group AND topic = $topic
    UNION ALL
    SELECT queue_id, queue_offset, message_group, delivery_attempt, visible_at_ms
    FROM in_flight WHERE consumer_group = $consumer_group AND topic = $topic
    UNION ALL
    SELECT queue_id, queue_offset, message_group, delivery_attempts, NULL
    FROM parked WHERE consumer_group = $consumer_group AND topic = $topic
)
SELECT queue_id, queue_offset, attempts + 1 AS delivery_attempt, visible_at_ms
FROM unsettled
WHERE visible_at_ms <= epoch_ms(now()) AND attempts < (
    SELECT max_attempts FROM consumer_groups WHERE consumer_group = $consumer_group
)
UNION ALL
SELECT queue_id, queue_offset, 1, 0
FROM waiting
WHERE consumer_group = $consumer_group AND topic = $topic AND message_group IS NOT NULL
  AND message_group NOT IN (
    SELECT message_group FROM unsettled WHERE message_group IS NOT NULL
)
ORDER BY visible_at_ms, queue_id, queue_offset;
