-- What happened, and the state as of a moment: views and macros over the events, those that DuckDB
-- keeps and those in event Parquet, and over the snapshots of the state.
-- The variables event_files and snapshot_files name the Parquet files that count; columns_differ
-- says that some lack columns (history_files.sql).
-- A macro takes a moment t: ms since 1970, a TIMESTAMP, or a text that is one. What happened in
-- that millisecond has happened. position + "row" orders events: a row takes more than a byte.

-- ------------------------------------------------------------------------ what the column epoch is

-- The column epoch of events, leases and snapshots, as store/events.py describes it: epoch of the
-- window under which a message was leased; 0: none.
CREATE OR REPLACE MACRO store.window_epoch(epoch) AS greatest(epoch, 0);

-- The same column: since when a client has held the lock of a queue; null for other events.
CREATE OR REPLACE MACRO store.locked_at_ms(kind, epoch) AS
    CASE kind WHEN $QUEUE_LOCKED THEN epoch END;

-- ---------------------------------------------------------------------------------- what happened

-- Topics, those that were deleted within the kept history too.
CREATE OR REPLACE VIEW store.topic_names AS
SELECT topic_id, name, (detail ->> '$.created_at_ms')::BIGINT AS created_at_ms,
       NULL::BIGINT AS deleted_at_ms, detail
FROM store.topics
UNION ALL
SELECT topic_id, name, created_at_ms, deleted_at_ms, detail
FROM store.deleted_names WHERE topic_id IS NOT NULL;

-- Consumer groups, those that were deleted within the kept history too.
CREATE OR REPLACE VIEW store.group_names AS
SELECT group_id, name, (detail ->> '$.created_at_ms')::BIGINT AS created_at_ms,
       NULL::BIGINT AS deleted_at_ms, detail
FROM store.groups
UNION ALL
SELECT group_id, name, created_at_ms, deleted_at_ms, detail
FROM store.deleted_names WHERE group_id IS NOT NULL;

-- Every event of the kept history once: the table's part begins where registered files end.
CREATE OR REPLACE VIEW store.all_events AS
SELECT * FROM store.events
WHERE position >= (SELECT coalesce(max(to_position), 0) FROM store.event_segments)
UNION ALL BY NAME
SELECT * FROM read_parquet(
    getvariable('event_files'), union_by_name = getvariable('columns_differ'),
    hive_partitioning = false
);

-- Everything that happened within the kept history, in no order; position and row are one.
CREATE OR REPLACE VIEW main.events AS
SELECT e.position, e."row", coalesce(k.name, e.kind::VARCHAR) AS kind, e.at_ms,
       g.name AS consumer_group, t.name AS topic, e.queue_id, e.queue_offset, e.attempt,
       e.visible_at_ms, e.delivery,
       coalesce(store.locked_at_ms(e.kind, e.epoch), store.window_epoch(e.epoch)) AS epoch,
       e.client_id, e.detail, e.group_id, e.topic_id
FROM store.all_events AS e
LEFT JOIN store.kinds AS k USING (kind)
LEFT JOIN store.group_names AS g USING (group_id)
LEFT JOIN store.topic_names AS t USING (topic_id);

-- Every window of the kept history; its owner is a run, where Dagster does the work.
CREATE OR REPLACE VIEW main.window_history AS
SELECT detail AS name, epoch, max(client_id) AS owner, min(at_ms) AS opened_at_ms
FROM store.all_events
WHERE kind = $WINDOW AND topic_id = 0 AND client_id IS NOT NULL GROUP BY detail, epoch;

-- The stations of each message: stored (in SCHEDULE_TOPIC_XXXX: scheduled), and the events that
-- name it. run_id is the run that it was given to, or that said what became of it.
CREATE OR REPLACE VIEW main.message_trace AS
SELECT q.message_id, q.stored_at_ms AS at_ms,
       CASE q.topic_id WHEN 1 THEN 'scheduled' ELSE 'stored' END AS what,
       t.name AS topic, q.queue_id, q.queue_offset, NULL::VARCHAR AS consumer_group,
       NULL::INTEGER AS attempt, q.deliver_at_ms AS visible_at_ms, NULL::VARCHAR AS client_id,
       NULL::VARCHAR AS run_id, NULL::VARCHAR AS reason, NULL::VARCHAR AS detail,
       q.position, q."row"
FROM store.consume_queue AS q LEFT JOIN store.topic_names AS t USING (topic_id)
UNION ALL
SELECT q.message_id, e.at_ms, k.name, t.name, e.queue_id, e.queue_offset, g.name, e.attempt,
       e.visible_at_ms, e.client_id, coalesce(TRY(e.detail ->> '$.run_id'), w.owner),
       TRY(e.detail ->> '$.reason'), e.detail, e.position, e."row"
FROM store.all_events AS e
JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
JOIN store.kinds AS k USING (kind)
LEFT JOIN store.topic_names AS t USING (topic_id)
LEFT JOIN store.group_names AS g USING (group_id)
LEFT JOIN main.window_history AS w
    ON w.name = 'consumer/' || g.name AND w.epoch = store.window_epoch(e.epoch)
WHERE e.kind BETWEEN $LEASE AND $ACK_AHEAD
   OR e.kind BETWEEN $HALF AND $HALF_GIVEN_UP
   OR e.kind IN ($SCHEDULE_DELIVERED, $SCHEDULE_DROPPED, $SCHEDULE_RECALLED, $REDRIVEN);

-- --------------------------------------------------------------------------- the state at a moment

-- A moment as ms since 1970.
CREATE OR REPLACE MACRO store.parsed_ms(t) AS coalesce(
    TRY_CAST(CAST(t AS VARCHAR) AS BIGINT), epoch_ms(TRY_CAST(CAST(t AS VARCHAR) AS TIMESTAMP))
);
CREATE OR REPLACE MACRO store.ms_of(t) AS CASE
    WHEN store.parsed_ms(t) IS NOT NULL THEN store.parsed_ms(t)
    ELSE error(concat('A moment is ms since 1970 or a TIMESTAMP, not ', t, '.'))::BIGINT
END;

-- The position of the last snapshot before that millisecond has ended.
CREATE OR REPLACE MACRO store.base_at(ms) AS TABLE
SELECT CASE
           WHEN found.position IS NOT NULL THEN found.position
           ELSE error(concat('The kept history begins at ', found.first_ms,
                             ': nothing is known of ', ms, '.'))
       END AS position
FROM (
    SELECT max(position) FILTER (WHERE at_ms <= ms) AS position, min(at_ms) AS first_ms
    FROM store.snapshots
) AS found;

-- The rows of that snapshot.
CREATE OR REPLACE MACRO store.snapshot_at(ms) AS TABLE
SELECT s.* FROM read_parquet(
    getvariable('snapshot_files'), union_by_name = getvariable('columns_differ'),
    hive_partitioning = false
) AS s
JOIN store.base_at(ms) AS b USING (position);

-- What happened between the snapshot and the moment.
CREATE OR REPLACE MACRO store.events_at(ms) AS TABLE
SELECT e.position + e."row" AS seq, e.* FROM store.all_events AS e
JOIN store.base_at(ms) AS b ON e.position >= b.position
WHERE e.at_ms <= ms;

-- The messages that were stored between the snapshot and the moment.
CREATE OR REPLACE MACRO store.messages_at(ms) AS TABLE
SELECT q.* FROM store.consume_queue AS q
JOIN store.base_at(ms) AS b ON q.position >= b.position
WHERE q.stored_at_ms <= ms;

CREATE OR REPLACE MACRO store.topics_at(ms) AS TABLE
SELECT topic_id, name, detail FROM store.topic_names
WHERE created_at_ms <= ms AND (deleted_at_ms IS NULL OR deleted_at_ms > ms);

CREATE OR REPLACE MACRO store.groups_at(ms) AS TABLE
SELECT group_id, name, detail FROM store.group_names
WHERE created_at_ms <= ms AND (deleted_at_ms IS NULL OR deleted_at_ms > ms);

-- The last reset of each queue of each group since the snapshot.
CREATE OR REPLACE MACRO store.resets_at(ms) AS TABLE
SELECT group_id, topic_id, queue_id, max(seq) AS seq, arg_max(queue_offset, seq) AS queue_offset
FROM store.events_at(ms) WHERE kind = $RESET GROUP BY group_id, topic_id, queue_id;

-- How far each group had looked at each queue.
CREATE OR REPLACE MACRO store.cursors_at(ms) AS TABLE
WITH resets AS MATERIALIZED (FROM store.resets_at(ms)),
said AS (
    SELECT seq, group_id, topic_id, queue_id,
           queue_offset + (kind = $LEASE)::BIGINT AS queue_offset
    FROM store.events_at(ms) WHERE kind IN ($LEASE, $CURSOR, $OFFSET_UPDATED)
    UNION ALL
    SELECT -1, group_id, topic_id, queue_id, queue_offset
    FROM store.snapshot_at(ms) WHERE what = 'cursor'
    UNION ALL
    SELECT seq, group_id, topic_id, queue_id, queue_offset FROM resets
)
SELECT s.group_id, s.topic_id, s.queue_id, max(s.queue_offset) AS queue_offset
FROM said AS s
ANTI JOIN resets AS r
    ON r.group_id = s.group_id AND r.topic_id = s.topic_id AND r.queue_id = s.queue_id
   AND r.seq > s.seq
GROUP BY s.group_id, s.topic_id, s.queue_id;

-- Which offsets each queue kept.
CREATE OR REPLACE MACRO store.heads_at(ms) AS TABLE
SELECT topic_id, queue_id, max(min_offset) AS min_offset, max(max_offset) AS max_offset
FROM (
    SELECT topic_id, queue_id, min_offset, queue_offset AS max_offset
    FROM store.snapshot_at(ms) WHERE what = 'head'
    UNION ALL
    SELECT topic_id, queue_id, 0, queue_offset + 1 FROM store.messages_at(ms)
    UNION ALL
    SELECT topic_id, queue_id, 0, max_offset FROM store.expired_heads WHERE stored_at_ms <= ms
    UNION ALL
    SELECT topic_id, queue_id, queue_offset, queue_offset
    FROM store.events_at(ms) WHERE kind = $EXPIRED
)
GROUP BY topic_id, queue_id;

-- Messages stored up to the moment.
CREATE OR REPLACE MACRO store.stored_messages_at(ms) AS TABLE
SELECT * FROM store.consume_queue WHERE stored_at_ms <= ms;

-- Messages of SCHEDULE_TOPIC_XXXX that waited for their time.
CREATE OR REPLACE MACRO store.scheduled_at(ms) AS TABLE
SELECT s.* FROM (
    SELECT queue_id, queue_offset, visible_at_ms AS deliver_at_ms, target_topic_id
    FROM store.snapshot_at(ms) WHERE what = 'scheduled'
    UNION ALL
    SELECT queue_id, queue_offset, deliver_at_ms, abs(target_topic_id)
    FROM store.messages_at(ms) WHERE topic_id = 1
) AS s
ANTI JOIN (
    SELECT queue_id, queue_offset FROM store.events_at(ms)
    WHERE topic_id = 1 AND kind IN ($SCHEDULE_DELIVERED, $SCHEDULE_DROPPED, $SCHEDULE_RECALLED)
) AS e ON e.queue_id = s.queue_id AND e.queue_offset = s.queue_offset;

-- Half messages that were not ended.
CREATE OR REPLACE MACRO store.halves_at(ms) AS TABLE
WITH said AS (
    SELECT seq, kind, queue_offset, message_group_hash AS message_id_hash,
           client_id AS producer_group, attempt AS checks, visible_at_ms AS next_check_ms,
           NULL::INTEGER AS target_topic_id
    FROM store.events_at(ms) WHERE topic_id = 2 AND kind BETWEEN $HALF AND $HALF_GIVEN_UP
    UNION ALL
    SELECT -1, $HALF, queue_offset, message_group_hash, client_id, attempt, visible_at_ms,
           target_topic_id
    FROM store.snapshot_at(ms) WHERE what = 'half'
),
open AS (
    SELECT queue_offset, arg_max(message_id_hash, seq) AS message_id_hash,
           arg_max(producer_group, seq) AS producer_group, arg_max(checks, seq) AS checks,
           arg_max(next_check_ms, seq) AS next_check_ms, max(target_topic_id) AS target_topic_id
    FROM said GROUP BY queue_offset HAVING arg_max(kind, seq) = $HALF
)
SELECT h.* REPLACE (coalesce(h.target_topic_id, q.target_topic_id) AS target_topic_id)
FROM open AS h
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = 2 AND q.queue_id = 0 AND q.queue_offset = h.queue_offset;

-- ------------------------------------------------------------------------------------- sink files

-- The files that may hold what became of a message: those of the settle that acknowledged it whose
-- range of offsets holds it, and those that replaced them. Which rows are the message's, and so
-- which file it is where a settle made several, only offset columns in the sink say.
CREATE OR REPLACE MACRO main.files_of(id) AS TABLE
WITH RECURSIVE acked AS (
    SELECT q.message_id, e.group_id, e.topic_id, e.queue_id, e.queue_offset, e.position,
           store.window_epoch(e.epoch) AS epoch, e.at_ms
    FROM store.all_events AS e
    JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
    WHERE q.message_id = id AND e.kind IN ($ACK, $ACK_AHEAD)
), held AS (
    SELECT a.*, s.path, s."partition", s.version, s.removed_version
    FROM acked AS a JOIN store.sink_files AS s
        ON s.group_id = a.group_id AND s.position = a.position
    WHERE s.offsets IS NULL OR len(list_filter(s.offsets, lambda r:
        r.queue_id = a.queue_id AND r.base <= a.queue_offset AND r."end" > a.queue_offset)) > 0
    UNION
    SELECT h.* REPLACE (s.path AS path, s.version AS version,
                        s.removed_version AS removed_version)
    FROM held AS h JOIN store.sink_files AS s
        ON s.group_id = h.group_id AND s.version = h.removed_version
       AND s."partition" = h."partition"
    WHERE s.offsets IS NULL OR len(list_filter(s.offsets, lambda r:
        r.queue_id = h.queue_id AND r.base <= h.queue_offset AND r."end" > h.queue_offset)) > 0
)
SELECT h.message_id, t.name AS topic, h.queue_id, h.queue_offset, g.name AS consumer_group,
       h.at_ms AS settled_at_ms, w.owner AS run_id, h.path, h."partition", h.version,
       h.removed_version IS NULL AS counts
FROM held AS h
LEFT JOIN store.topic_names AS t USING (topic_id)
LEFT JOIN store.group_names AS g USING (group_id)
LEFT JOIN main.window_history AS w
    ON w.name = 'consumer/' || g.name AND w.epoch = h.epoch
ORDER BY consumer_group, h.version, h.path;
