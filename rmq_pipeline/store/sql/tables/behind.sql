-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_behind
-- In: nothing. Out: the table.
-- A row: a message group with waiting messages before the cursor, from queue_offset on.
-- Written by: BEHIND: the last one of a key.
-- Goes: with CAUGHT_UP, RESET, TOPIC_DELETED, GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.behind (
    group_id INTEGER, topic_id INTEGER, queue_id INTEGER, message_group_hash BIGINT,
    queue_offset BIGINT
);

-- name: fold_behind
-- In: staged_events. Out: net_behind, the last event of each key.
CREATE OR REPLACE TEMP TABLE net_behind AS
SELECT kind, group_id, topic_id, queue_id, message_group_hash, queue_offset
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind IN ($BEHIND, $CAUGHT_UP)
    GROUP BY group_id, topic_id, queue_id, message_group_hash
);

-- name: delete_behind
-- In: net_behind. Out: the rows that it replaces or removes are deleted.
DELETE FROM store.behind AS t USING net_behind AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id
  AND t.message_group_hash = n.message_group_hash;

-- name: insert_behind
-- In: net_behind. Out: the rows that stay.
INSERT INTO store.behind BY NAME
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset
FROM net_behind
WHERE kind <> $CAUGHT_UP;

-- name: reset_behind
-- In: staged_events, all RESET. Out: no rows of those queues.
DELETE FROM store.behind AS t USING staged_events AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.queue_id = n.queue_id;

-- name: state_behind
-- In: nothing. Out: what recovery reads.
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset
FROM store.behind ORDER BY group_id, topic_id, queue_id, queue_offset;

-- name: at_behind
-- In: nothing. Out: the macro store.behind_at: the rows as of a moment.
CREATE OR REPLACE MACRO store.behind_at(ms) AS TABLE
WITH said AS (
    SELECT seq, kind, group_id, topic_id, queue_id, message_group_hash, queue_offset
    FROM store.events_at(ms) WHERE kind IN ($BEHIND, $CAUGHT_UP)
    UNION ALL
    SELECT -1 AS seq, $BEHIND AS kind, group_id, topic_id, queue_id, message_group_hash,
           queue_offset
    FROM store.snapshot_at(ms) WHERE what = 'behind'
),
latest AS (
    SELECT group_id, topic_id, queue_id, message_group_hash, max(seq) AS seq
    FROM said GROUP BY group_id, topic_id, queue_id, message_group_hash
    HAVING arg_max(kind, seq) <> $CAUGHT_UP
)
SELECT s.* EXCLUDE (kind)
FROM said AS s
SEMI JOIN latest AS l
    ON l.seq = s.seq AND l.group_id = s.group_id AND l.topic_id = s.topic_id
   AND l.queue_id = s.queue_id AND l.message_group_hash = s.message_group_hash
ANTI JOIN store.resets_at(ms) AS r
    ON r.group_id = s.group_id AND r.topic_id = s.topic_id AND r.queue_id = s.queue_id
   AND r.seq > s.seq;
