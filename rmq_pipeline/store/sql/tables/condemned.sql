-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_condemned
-- In: nothing. Out: the table.
-- A row: a message group that a consumer group quarantined from queue_offset on; failure says why.
-- Written by: CONDEMN: the last one of a key.
-- Goes: with PARDON, RESET, TOPIC_DELETED, GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.condemned (
    group_id INTEGER, topic_id INTEGER, queue_id INTEGER, message_group_hash BIGINT,
    queue_offset BIGINT, condemned_at_ms BIGINT, failure VARCHAR
);

-- name: fold_condemned
-- In: staged_events. Out: net_condemned, the last event of each key.
CREATE OR REPLACE TEMP TABLE net_condemned AS
SELECT kind, group_id, topic_id, queue_id, message_group_hash, queue_offset,
       at_ms AS condemned_at_ms, detail AS failure
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind IN ($CONDEMN, $PARDON)
    GROUP BY group_id, topic_id, queue_id, message_group_hash
);

-- name: delete_condemned
-- In: net_condemned. Out: the rows that it replaces or removes are deleted.
DELETE FROM store.condemned AS t USING net_condemned AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id
  AND t.message_group_hash = n.message_group_hash;

-- name: insert_condemned
-- In: net_condemned. Out: the rows that stay.
INSERT INTO store.condemned BY NAME
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset, condemned_at_ms, failure
FROM net_condemned
WHERE kind <> $PARDON;

-- name: reset_condemned
-- In: staged_events, all RESET. Out: no rows of those queues.
DELETE FROM store.condemned AS t USING staged_events AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id;

-- name: state_condemned
-- In: nothing. Out: what recovery reads.
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset, failure
FROM store.condemned ORDER BY group_id, topic_id, queue_id, queue_offset;
