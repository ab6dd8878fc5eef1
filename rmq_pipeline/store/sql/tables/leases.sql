-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_leases
-- In: nothing. Out: the table.
-- delivery > 0 is the number in its receipt; Delivery in store/events.py names the others. epoch:
-- as in events. failure: JSON of its last one.
-- A row: a message that was delivered, or that will be dead-lettered, and is not settled.
-- Written by: LEASE, RETRY, RELEASE, EXPIRE, INVISIBLE, PARK, ACK_AHEAD: the last one of a key.
-- Goes: with ACK, DEAD_LETTER, RESET, TOPIC_DELETED, GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.leases (
    group_id INTEGER, topic_id INTEGER, queue_id INTEGER, queue_offset BIGINT,
    attempt INTEGER, visible_at_ms BIGINT, delivery BIGINT, epoch BIGINT,
    message_group_hash BIGINT, client_id VARCHAR, failure VARCHAR, parked_at_ms BIGINT
);

-- name: fold_leases
-- In: staged_events. Out: net_leases, the last event of each key.
CREATE OR REPLACE TEMP TABLE net_leases AS
SELECT kind, group_id, topic_id, queue_id, queue_offset, attempt, visible_at_ms, delivery,
       epoch, message_group_hash, client_id,
       CASE kind WHEN $PARK THEN at_ms END AS parked_at_ms
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind BETWEEN $LEASE AND $ACK_AHEAD
    GROUP BY group_id, topic_id, queue_id, queue_offset
);

-- name: fold_leases_failure
-- In: staged_events, net_leases. Out: net_leases_failure: of each row that stays, the last value
-- after which the row was not removed.
CREATE OR REPLACE TEMP TABLE net_leases_failure AS
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
    FROM net_leases WHERE kind NOT IN ($ACK, $DEAD_LETTER)
) USING (group_id, topic_id, queue_id, queue_offset)
GROUP BY group_id, topic_id, queue_id, queue_offset;

-- name: delete_leases
-- In: net_leases. Out: the rows that it replaces or removes are deleted.
DELETE FROM store.leases AS t USING net_leases AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id
  AND t.queue_offset = n.queue_offset;

-- name: insert_leases
-- In: net_leases, net_leases_failure. Out: the rows that stay.
INSERT INTO store.leases BY NAME
SELECT group_id, topic_id, queue_id, queue_offset, attempt, visible_at_ms, delivery, epoch,
       message_group_hash, client_id, failure, parked_at_ms
FROM net_leases LEFT JOIN net_leases_failure USING (group_id, topic_id, queue_id, queue_offset)
WHERE kind NOT IN ($ACK, $DEAD_LETTER);

-- name: reset_leases
-- In: staged_events, all RESET. Out: no rows of those queues.
DELETE FROM store.leases AS t USING staged_events AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id;

-- name: state_leases
-- In: nothing. Out: what recovery reads.
SELECT group_id, topic_id, queue_id, queue_offset, attempt, visible_at_ms, delivery, epoch,
       message_group_hash, client_id, failure
FROM store.leases ORDER BY group_id, topic_id, queue_id, queue_offset;

-- name: at_leases
-- In: nothing. Out: the macro store.leases_at: the rows as of a moment.
CREATE OR REPLACE MACRO store.leases_at(ms) AS TABLE
WITH said AS (
    SELECT seq, kind, group_id, topic_id, queue_id, queue_offset, attempt, visible_at_ms, delivery,
           epoch, message_group_hash, client_id,
           CASE kind WHEN $PARK THEN at_ms END AS parked_at_ms
    FROM store.events_at(ms) WHERE kind BETWEEN $LEASE AND $ACK_AHEAD
    UNION ALL
    SELECT -1 AS seq, $LEASE AS kind, group_id, topic_id, queue_id, queue_offset, attempt,
           visible_at_ms, delivery, epoch, message_group_hash, client_id, at_ms AS parked_at_ms
    FROM store.snapshot_at(ms) WHERE what = 'lease'
),
latest AS (
    SELECT group_id, topic_id, queue_id, queue_offset, max(seq) AS seq
    FROM said GROUP BY group_id, topic_id, queue_id, queue_offset
    HAVING arg_max(kind, seq) NOT IN ($ACK, $DEAD_LETTER)
)
SELECT s.* EXCLUDE (kind)
FROM said AS s
SEMI JOIN latest AS l
    ON l.seq = s.seq AND l.group_id = s.group_id AND l.topic_id = s.topic_id
   AND l.queue_id = s.queue_id AND l.queue_offset = s.queue_offset
ANTI JOIN store.resets_at(ms) AS r
    ON r.group_id = s.group_id AND r.topic_id = s.topic_id AND r.queue_id = s.queue_id
   AND r.seq > s.seq;

-- name: at_leases_failure
-- In: nothing. Out: the macro store.leases_failure_at: the last value of each row, as of a moment.
CREATE OR REPLACE MACRO store.leases_failure_at(ms) AS TABLE
SELECT group_id, topic_id, queue_id, queue_offset, nullif(arg_max(failure, seq), '') AS failure
FROM (
    SELECT group_id, topic_id, queue_id, queue_offset, seq,
           CASE WHEN kind IN ($ACK, $DEAD_LETTER) THEN '' ELSE detail END AS failure
    FROM store.events_at(ms)
    WHERE kind BETWEEN $LEASE AND $ACK_AHEAD
      AND (detail IS NOT NULL OR kind IN ($ACK, $DEAD_LETTER))
    UNION ALL
    SELECT group_id, topic_id, queue_id, queue_offset, -1, detail
    FROM store.snapshot_at(ms)
    WHERE what = 'lease' AND detail IS NOT NULL
) AS s
ANTI JOIN store.resets_at(ms) AS r
    ON r.group_id = s.group_id AND r.topic_id = s.topic_id AND r.queue_id = s.queue_id
   AND r.seq > s.seq
GROUP BY group_id, topic_id, queue_id, queue_offset;

-- name: at_leases_with_failure
-- In: nothing. Out: the macro store.leases_with_failure_at: both.
CREATE OR REPLACE MACRO store.leases_with_failure_at(ms) AS TABLE
SELECT t.*, k.failure
FROM store.leases_at(ms) AS t
LEFT JOIN store.leases_failure_at(ms) AS k
    USING (group_id, topic_id, queue_id, queue_offset);
