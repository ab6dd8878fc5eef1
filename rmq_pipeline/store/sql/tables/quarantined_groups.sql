-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_quarantined_groups
-- In: nothing. Out: the table.
-- A row: a message group that a consumer group quarantined from queue_offset on; failure says why.
-- Written by: QUARANTINE: the last one of a key.
-- Goes: with LIFT, RESET, TOPIC_DELETED, GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.quarantined_groups (
    group_id INTEGER, topic_id INTEGER, queue_id INTEGER, message_group_hash BIGINT,
    queue_offset BIGINT, quarantined_at_ms BIGINT, failure VARCHAR
);

-- name: fold_quarantined_groups
-- In: staged_events. Out: net_quarantined_groups, the last event of each key.
CREATE OR REPLACE TEMP TABLE net_quarantined_groups AS
SELECT kind, group_id, topic_id, queue_id, message_group_hash, queue_offset,
       at_ms AS quarantined_at_ms, detail AS failure
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind IN ($QUARANTINE, $LIFT)
    GROUP BY group_id, topic_id, queue_id, message_group_hash
);

-- name: delete_quarantined_groups
-- In: net_quarantined_groups. Out: the rows that it replaces or removes are deleted.
DELETE FROM store.quarantined_groups AS t USING net_quarantined_groups AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id
  AND t.message_group_hash = n.message_group_hash;

-- name: insert_quarantined_groups
-- In: net_quarantined_groups. Out: the rows that stay.
INSERT INTO store.quarantined_groups BY NAME
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset, quarantined_at_ms,
       failure
FROM net_quarantined_groups
WHERE kind <> $LIFT;

-- name: reset_quarantined_groups
-- In: staged_events, all RESET. Out: no rows of those queues.
DELETE FROM store.quarantined_groups AS t USING staged_events AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id;

-- name: state_quarantined_groups
-- In: nothing. Out: what recovery reads.
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset, failure
FROM store.quarantined_groups ORDER BY group_id, topic_id, queue_id, queue_offset;

-- name: at_quarantined_groups
-- In: nothing. Out: the macro store.quarantined_groups_at: the rows as of a moment.
CREATE OR REPLACE MACRO store.quarantined_groups_at(ms) AS TABLE
WITH said AS (
    SELECT seq, kind, group_id, topic_id, queue_id, message_group_hash, queue_offset,
           at_ms AS quarantined_at_ms, detail AS failure
    FROM store.events_at(ms) WHERE kind IN ($QUARANTINE, $LIFT)
    UNION ALL
    SELECT -1 AS seq, $QUARANTINE AS kind, group_id, topic_id, queue_id, message_group_hash,
           queue_offset, at_ms AS quarantined_at_ms, detail AS failure
    FROM store.snapshot_at(ms) WHERE what = 'quarantined_group'
),
latest AS (
    SELECT group_id, topic_id, queue_id, message_group_hash, max(seq) AS seq
    FROM said GROUP BY group_id, topic_id, queue_id, message_group_hash
    HAVING arg_max(kind, seq) <> $LIFT
)
SELECT s.* EXCLUDE (kind)
FROM said AS s
SEMI JOIN latest AS l
    ON l.seq = s.seq AND l.group_id = s.group_id AND l.topic_id = s.topic_id
   AND l.queue_id = s.queue_id AND l.message_group_hash = s.message_group_hash
ANTI JOIN store.resets_at(ms) AS r
    ON r.group_id = s.group_id AND r.topic_id = s.topic_id AND r.queue_id = s.queue_id
   AND r.seq > s.seq;
