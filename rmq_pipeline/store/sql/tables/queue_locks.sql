-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_queue_locks
-- In: nothing. Out: the table.
-- A lock that has expired stays until another client takes it.
-- A row: the client of a group that alone receives from a queue, until expires_at_ms.
-- Written by: QUEUE_LOCKED: the last one of a key.
-- Goes: with QUEUE_UNLOCKED, TOPIC_DELETED, GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.queue_locks (
    group_id INTEGER, topic_id INTEGER, queue_id INTEGER, client_id VARCHAR,
    expires_at_ms BIGINT, locked_at_ms BIGINT, renewed_at_ms BIGINT
);

-- name: fold_queue_locks
-- In: staged_events. Out: net_queue_locks, the last event of each key.
CREATE OR REPLACE TEMP TABLE net_queue_locks AS
SELECT kind, group_id, topic_id, queue_id, client_id, visible_at_ms AS expires_at_ms,
       store.locked_at_ms(kind, epoch) AS locked_at_ms, at_ms AS renewed_at_ms
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind IN ($QUEUE_LOCKED, $QUEUE_UNLOCKED)
    GROUP BY group_id, topic_id, queue_id
);

-- name: delete_queue_locks
-- In: net_queue_locks. Out: the rows that it replaces or removes are deleted.
DELETE FROM store.queue_locks AS t USING net_queue_locks AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id;

-- name: insert_queue_locks
-- In: net_queue_locks. Out: the rows that stay.
INSERT INTO store.queue_locks BY NAME
SELECT group_id, topic_id, queue_id, client_id, expires_at_ms, locked_at_ms, renewed_at_ms
FROM net_queue_locks
WHERE kind <> $QUEUE_UNLOCKED;

-- name: state_queue_locks
-- In: nothing. Out: what recovery reads.
SELECT group_id, topic_id, queue_id, client_id, expires_at_ms, locked_at_ms, renewed_at_ms
FROM store.queue_locks ORDER BY group_id, topic_id, queue_id;
