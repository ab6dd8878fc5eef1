-- What recovery reads: the state tables as they are.

-- name: state_reached
-- In: nothing. Out: one row.
SELECT dispatched, last_at_ms, next_topic_id, next_group_id FROM store.reached;

-- name: state_topics
-- In: nothing. Out: a row a topic.
SELECT topic_id, detail FROM store.topics ORDER BY topic_id;

-- name: state_groups
-- In: nothing. Out: a row a group.
SELECT group_id, detail FROM store.groups ORDER BY group_id;

-- name: state_heads
-- In: nothing. Out: a row a queue that was written to.
SELECT topic_id, queue_id, min_offset, max_offset FROM store.heads ORDER BY topic_id, queue_id;

-- name: state_leases
-- In: nothing. Out: a row an unsettled delivery.
SELECT group_id, topic_id, queue_id, queue_offset, attempt, visible_at_ms, delivery, epoch,
       message_group_hash, client_id, failure
FROM store.leases ORDER BY group_id, topic_id, queue_id, queue_offset;

-- name: state_cursors
-- In: nothing. Out: a row a queue that a group has touched.
SELECT group_id, topic_id, queue_id, queue_offset
FROM store.cursors ORDER BY group_id, topic_id, queue_id;

-- name: state_behind
-- In: nothing. Out: a row a message group behind its cursor.
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset
FROM store.behind ORDER BY group_id, topic_id, queue_id, queue_offset;

-- name: state_condemned
-- In: nothing. Out: a row a message group that is given up.
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset, failure
FROM store.condemned ORDER BY group_id, topic_id, queue_id, queue_offset;

-- name: state_scheduled
-- In: nothing. Out: a row a message that waits for its time.
SELECT queue_id, queue_offset, deliver_at_ms, target_topic_id, position, "row"
FROM store.scheduled ORDER BY queue_id, queue_offset;

-- name: state_redriven
-- In: nothing. Out: a row a dead letter that was opened again.
SELECT topic_id, queue_id, queue_offset
FROM store.redrives ORDER BY topic_id, queue_id, queue_offset;

-- name: state_halves
-- In: nothing. Out: a row a half message that nobody has ended.
SELECT queue_offset, position, "row", target_topic_id, message_id_hash, producer_group, checks,
       next_check_ms, immunity_ms
FROM store.halves ORDER BY queue_offset;

-- name: state_windows
-- In: nothing. Out: a row a window that was ever opened.
SELECT name, owner, epoch, expires_at_ms, settle_id, settle_answer FROM store.windows ORDER BY name;

-- name: state_lite_subscriptions
-- In: nothing. Out: a row a client with lite topics.
SELECT group_id, topic_id, client_id, lite_topics
FROM store.lite_subscriptions ORDER BY group_id, topic_id, client_id;

-- name: state_queue_locks
-- In: nothing. Out: a row a queue that a client has locked, and when that ends or has ended.
SELECT group_id, topic_id, queue_id, client_id, expires_at_ms, locked_at_ms, renewed_at_ms
FROM store.queue_locks ORDER BY group_id, topic_id, queue_id;

-- name: state_resets
-- In: nothing. Out: a row a queue in which a group was put elsewhere.
SELECT group_id, topic_id, queue_id, resets
FROM store.resets ORDER BY group_id, topic_id, queue_id;

-- name: state_segments
-- In: nothing. Out: a row a registered segment.
SELECT topic_id, queue_id, base, "end", path FROM store.segments ORDER BY topic_id, queue_id, base;

-- name: state_event_segments
-- In: nothing. Out: a row a registered file of events.
SELECT path, from_position, to_position, "rows" FROM store.event_segments ORDER BY from_position;

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
