-- What dispatch does with the events of a transaction.
-- staged_events: schema.EVENT, + position, "row", and seq, their order in the transaction.
-- $LEASE and the like are replaced by the numbers of store/events.py.

-- name: insert_events
-- In: staged_events. Out: each, kept.
INSERT INTO store.events BY NAME SELECT * EXCLUDE (seq) FROM staged_events;

-- name: raise_cursors
-- In: staged_events. Out: cursors at least where CURSOR and OFFSET_UPDATED say, and past what was
-- leased.
MERGE INTO store.cursors AS c
USING (
    SELECT group_id, topic_id, queue_id,
           max(queue_offset + (kind = $LEASE)::BIGINT) AS queue_offset
    FROM staged_events WHERE kind IN ($LEASE, $CURSOR, $OFFSET_UPDATED)
    GROUP BY group_id, topic_id, queue_id
) AS n
ON c.group_id = n.group_id AND c.topic_id = n.topic_id AND c.queue_id = n.queue_id
WHEN MATCHED THEN UPDATE SET queue_offset = greatest(c.queue_offset, n.queue_offset)
WHEN NOT MATCHED THEN INSERT VALUES (n.group_id, n.topic_id, n.queue_id, n.queue_offset);

-- name: reset_cursors
-- In: staged_events, all RESET. Out: the cursors of those queues exactly where the last one says.
MERGE INTO store.cursors AS c
USING (
    SELECT group_id, topic_id, queue_id, arg_max(queue_offset, seq) AS queue_offset
    FROM staged_events GROUP BY group_id, topic_id, queue_id
) AS n
ON c.group_id = n.group_id AND c.topic_id = n.topic_id AND c.queue_id = n.queue_id
WHEN MATCHED THEN UPDATE SET queue_offset = n.queue_offset
WHEN NOT MATCHED THEN INSERT VALUES (n.group_id, n.topic_id, n.queue_id, n.queue_offset);

-- name: forget_topics
-- In: staged_events; {table}, one with a topic_id. Out: no rows of deleted topics in it.
DELETE FROM "{table}"
WHERE topic_id IN (SELECT topic_id FROM staged_events WHERE kind = $TOPIC_DELETED);

-- name: forget_groups
-- In: staged_events; {table}, one with a group_id. Out: no rows of deleted groups in it.
DELETE FROM "{table}"
WHERE group_id IN (SELECT group_id FROM staged_events WHERE kind = $GROUP_DELETED);

-- name: disown_recalled
-- In: staged_events; $schedule_topic_id. Out: messages recalled are for no topic any more.
UPDATE store.consume_queue AS q SET target_topic_id = -abs(target_topic_id)
FROM staged_events AS n
WHERE n.kind = $SCHEDULE_RECALLED AND n.topic_id = $schedule_topic_id
  AND q.topic_id = $schedule_topic_id AND q.queue_id = n.queue_id
  AND q.queue_offset = n.queue_offset;

-- name: delete_scheduled
-- In: staged_events; $schedule_topic_id. Out: messages delivered, dropped or recalled wait no more.
DELETE FROM store.scheduled AS s USING staged_events AS n
WHERE n.kind IN ($SCHEDULE_DELIVERED, $SCHEDULE_DROPPED, $SCHEDULE_RECALLED)
  AND n.topic_id = $schedule_topic_id
  AND s.queue_id = n.queue_id AND s.queue_offset = n.queue_offset;

-- name: fold_halves
-- In: staged_events. Out: net_halves, the last event of each half message.
CREATE OR REPLACE TEMP TABLE net_halves AS
SELECT kind, queue_offset, message_group_hash AS message_id_hash, client_id AS producer_group,
       attempt AS checks, visible_at_ms AS next_check_ms, delivery AS immunity_ms, at_ms
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind BETWEEN $HALF AND $HALF_GIVEN_UP
    GROUP BY queue_offset
);

-- name: set_halves
-- In: net_halves. Out: the checks so far and the next one of those that stay.
UPDATE store.halves AS h SET checks = n.checks, next_check_ms = n.next_check_ms
FROM net_halves AS n WHERE n.kind = $HALF AND h.queue_offset = n.queue_offset;

-- name: insert_halves
-- In: net_halves, staged_messages; $half_topic_id. Out: a row for each new one that stays.
INSERT INTO store.halves
SELECT n.queue_offset, m.position, m."row", m.target_topic_id, n.message_id_hash,
       n.producer_group, n.checks, n.next_check_ms, n.immunity_ms
FROM net_halves AS n
JOIN staged_messages AS m ON m.topic_id = $half_topic_id AND m.queue_offset = n.queue_offset
WHERE n.kind = $HALF;

-- name: delete_halves
-- In: net_halves. Out: those that were ended are gone.
DELETE FROM store.halves AS h USING net_halves AS n
WHERE n.kind <> $HALF AND h.queue_offset = n.queue_offset;

-- name: insert_ended_halves
-- In: net_halves. Out: a row for each end.
INSERT INTO store.ended_halves
SELECT queue_offset, message_id_hash, producer_group, kind, at_ms
FROM net_halves WHERE kind <> $HALF;

-- name: forget_ended_halves
-- In: $before_ms. Out: no half message that was ended before then.
DELETE FROM store.ended_halves WHERE at_ms < $before_ms;

-- name: set_windows
-- In: staged_events. Out: windows as last opened, renewed or closed; a close that names no owner
-- leaves him.
MERGE INTO store.windows AS w
USING (
    SELECT detail AS name, arg_max(nullif(client_id, ''), seq) AS owner,
           arg_max(epoch, seq) AS epoch,
           arg_max(CASE kind WHEN $WINDOW THEN visible_at_ms ELSE 0 END, seq) AS expires_at_ms
    FROM staged_events WHERE kind IN ($WINDOW, $WINDOW_CLOSED) GROUP BY detail
) AS n
ON w.name = n.name
WHEN MATCHED THEN UPDATE SET
    owner = coalesce(n.owner, w.owner), epoch = n.epoch, expires_at_ms = n.expires_at_ms
WHEN NOT MATCHED THEN INSERT
    VALUES (n.name, coalesce(n.owner, ''), n.epoch, n.expires_at_ms, '', '');

-- name: set_settled
-- In: staged_events. Out: the last settle of each window and what it was answered.
UPDATE store.windows AS w SET settle_id = n.settle_id, settle_answer = n.answer
FROM (
    SELECT detail ->> '$.window' AS name, arg_max(detail ->> '$.settle_id', seq) AS settle_id,
           arg_max((detail -> '$.answer')::VARCHAR, seq) AS answer
    FROM staged_events WHERE kind = $SETTLED GROUP BY ALL
) AS n
WHERE w.name = n.name;

-- name: count_resets
-- In: staged_events. Out: as many more for each queue.
MERGE INTO store.resets AS r
USING (
    SELECT group_id, topic_id, queue_id, count(*) AS resets
    FROM staged_events WHERE kind = $RESET AND delivery >= 0
    GROUP BY group_id, topic_id, queue_id
) AS n
ON r.group_id = n.group_id AND r.topic_id = n.topic_id AND r.queue_id = n.queue_id
WHEN MATCHED THEN UPDATE SET resets = r.resets + n.resets
WHEN NOT MATCHED THEN INSERT VALUES (n.group_id, n.topic_id, n.queue_id, n.resets);

-- name: insert_event_segments
-- In: staged_events. Out: a row for each EVENT_SEGMENT.
INSERT INTO store.event_segments
SELECT detail ->> '$.path', (detail ->> '$.from_position')::BIGINT,
       (detail ->> '$.to_position')::BIGINT, (detail ->> '$.rows')::BIGINT
FROM staged_events WHERE kind = $EVENT_SEGMENT ORDER BY seq;

-- name: set_reached
-- In: $dispatched, and the largest of the transaction: $at_ms, $topic_id and $group_id of what was
-- created. Out: the row of store.reached.
UPDATE store.reached SET
    dispatched = $dispatched, last_at_ms = greatest(last_at_ms, $at_ms),
    next_topic_id = greatest(next_topic_id, $topic_id + 1),
    next_group_id = greatest(next_group_id, $group_id + 1);
