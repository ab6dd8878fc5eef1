-- What dispatch does with the events of a transaction.
-- staged_events: schema.EVENT, + position, "row", and seq, their order in the transaction.
-- $LEASE and the like are replaced by the numbers of store/events.py.

-- name: insert_events
-- In: staged_events. Out: each, kept.
INSERT INTO store.events BY NAME SELECT * EXCLUDE (seq) FROM staged_events;

-- name: fold_consumption
-- In: staged_events. Out: net_consumption, the last event of each message of each group.
CREATE OR REPLACE TEMP TABLE net_consumption AS
SELECT kind, group_id, topic_id, queue_id, queue_offset, attempt, visible_at_ms, delivery, epoch,
       message_group_hash, client_id, CASE kind WHEN $PARK THEN at_ms END AS parked_at_ms
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind BETWEEN $LEASE AND $ACK_AHEAD
    GROUP BY group_id, topic_id, queue_id, queue_offset
);

-- name: fold_failures
-- In: staged_events, net_consumption. Out: net_failures, the last failure said of each message that
-- stays: by an event of the transaction after which it was not removed, or by the row it replaces.
CREATE OR REPLACE TEMP TABLE net_failures AS
SELECT group_id, topic_id, queue_id, queue_offset, nullif(arg_max(failure, seq), '') AS failure
FROM (
    SELECT group_id, topic_id, queue_id, queue_offset, seq,
           CASE WHEN kind IN ($ACK, $DEAD_LETTER) THEN '' ELSE detail END AS failure
    FROM staged_events
    WHERE kind BETWEEN $LEASE AND $ACK_AHEAD
      AND (detail IS NOT NULL OR kind IN ($ACK, $DEAD_LETTER))
    UNION ALL
    SELECT group_id, topic_id, queue_id, queue_offset, -1, failure
    FROM store.leases WHERE failure IS NOT NULL
)
SEMI JOIN (
    SELECT group_id, topic_id, queue_id, queue_offset
    FROM net_consumption WHERE kind NOT IN ($ACK, $DEAD_LETTER)
) USING (group_id, topic_id, queue_id, queue_offset)
GROUP BY group_id, topic_id, queue_id, queue_offset;

-- name: delete_leases
-- In: net_consumption. Out: the rows it replaces or removes are gone.
DELETE FROM store.leases AS l USING net_consumption AS n
WHERE l.group_id = n.group_id AND l.topic_id = n.topic_id AND l.queue_id = n.queue_id
  AND l.queue_offset = n.queue_offset;

-- name: insert_leases
-- In: net_consumption, net_failures. Out: the rows that they leave.
INSERT INTO store.leases
SELECT group_id, topic_id, queue_id, queue_offset, attempt, visible_at_ms, delivery, epoch,
       message_group_hash, client_id, failure, parked_at_ms
FROM net_consumption LEFT JOIN net_failures USING (group_id, topic_id, queue_id, queue_offset)
WHERE kind NOT IN ($ACK, $DEAD_LETTER);

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

-- name: fold_behind
-- In: staged_events. Out: net_behind, the last BEHIND or CAUGHT_UP of each message group.
CREATE OR REPLACE TEMP TABLE net_behind AS
SELECT kind, group_id, topic_id, queue_id, message_group_hash, queue_offset
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind IN ($BEHIND, $CAUGHT_UP)
    GROUP BY group_id, topic_id, queue_id, message_group_hash
);

-- name: delete_behind
-- In: net_behind. Out: the rows it replaces or removes are gone.
DELETE FROM store.behind AS b USING net_behind AS n
WHERE b.group_id = n.group_id AND b.topic_id = n.topic_id AND b.queue_id = n.queue_id
  AND b.message_group_hash = n.message_group_hash;

-- name: insert_behind
-- In: net_behind. Out: the rows that it leaves.
INSERT INTO store.behind
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset
FROM net_behind WHERE kind = $BEHIND;

-- name: reset_leases
-- In: staged_events, all RESET. Out: no leases of those queues.
DELETE FROM store.leases AS l USING staged_events AS n
WHERE l.group_id = n.group_id AND l.topic_id = n.topic_id AND l.queue_id = n.queue_id;

-- name: reset_behind
-- In: staged_events, all RESET. Out: no message groups behind the cursor in those queues.
DELETE FROM store.behind AS b USING staged_events AS n
WHERE b.group_id = n.group_id AND b.topic_id = n.topic_id AND b.queue_id = n.queue_id;

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

-- name: set_topics
-- In: staged_events. Out: the topics as their last TOPIC says.
MERGE INTO store.topics AS t
USING (
    SELECT topic_id, arg_max(detail, seq) AS detail
    FROM staged_events WHERE kind = $TOPIC GROUP BY topic_id
) AS n
ON t.topic_id = n.topic_id
WHEN MATCHED THEN UPDATE SET name = n.detail ->> '$.name', detail = n.detail
WHEN NOT MATCHED THEN INSERT VALUES (n.topic_id, n.detail ->> '$.name', n.detail);

-- name: set_groups
-- In: staged_events. Out: the groups as their last GROUP says.
MERGE INTO store.groups AS g
USING (
    SELECT group_id, arg_max(detail, seq) AS detail
    FROM staged_events WHERE kind = $GROUP GROUP BY group_id
) AS n
ON g.group_id = n.group_id
WHEN MATCHED THEN UPDATE SET name = n.detail ->> '$.name', detail = n.detail
WHEN NOT MATCHED THEN INSERT VALUES (n.group_id, n.detail ->> '$.name', n.detail);

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

-- name: fold_subscriptions
-- In: staged_events. Out: net_subscriptions, the last LITE_SUBSCRIPTION of each client.
CREATE OR REPLACE TEMP TABLE net_subscriptions AS
SELECT group_id, topic_id, client_id, arg_max(detail, seq) AS lite_topics
FROM staged_events WHERE kind = $LITE_SUBSCRIPTION GROUP BY group_id, topic_id, client_id;

-- name: delete_subscriptions
-- In: net_subscriptions. Out: the rows they replace or remove are gone.
DELETE FROM store.lite_subscriptions AS s USING net_subscriptions AS n
WHERE s.group_id = n.group_id AND s.topic_id = n.topic_id AND s.client_id = n.client_id;

-- name: insert_subscriptions
-- In: net_subscriptions. Out: the rows that they leave.
INSERT INTO store.lite_subscriptions
SELECT group_id, topic_id, client_id, lite_topics FROM net_subscriptions WHERE lite_topics <> '[]';

-- name: fold_queue_locks
-- In: staged_events. Out: net_queue_locks, the last of each queue.
CREATE OR REPLACE TEMP TABLE net_queue_locks AS
SELECT group_id, topic_id, queue_id, arg_max(kind, seq) AS kind,
       arg_max(client_id, seq) AS client_id, arg_max(visible_at_ms, seq) AS expires_at_ms,
       arg_max(epoch, seq) AS locked_at_ms, arg_max(at_ms, seq) AS renewed_at_ms
FROM staged_events WHERE kind IN ($QUEUE_LOCKED, $QUEUE_UNLOCKED)
GROUP BY group_id, topic_id, queue_id;

-- name: delete_queue_locks
-- In: net_queue_locks. Out: the rows they replace or remove are gone.
DELETE FROM store.queue_locks AS l USING net_queue_locks AS n
WHERE l.group_id = n.group_id AND l.topic_id = n.topic_id AND l.queue_id = n.queue_id;

-- name: insert_queue_locks
-- In: net_queue_locks. Out: the rows that they leave.
INSERT INTO store.queue_locks
SELECT group_id, topic_id, queue_id, client_id, expires_at_ms, locked_at_ms, renewed_at_ms
FROM net_queue_locks WHERE kind = $QUEUE_LOCKED;

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
