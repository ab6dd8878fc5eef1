-- The views of delivery state, and what each showed at a moment t.
-- Generated from delivery_views.sql.template by `make sql`; do not edit.

-- Messages that were delivered and are neither settled nor known to have ended.
CREATE OR REPLACE VIEW main.in_flight AS
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group, l.attempt AS delivery_attempt, l.visible_at_ms, l.client_id,
       store.window_epoch(l.epoch) AS epoch
FROM store.leases AS l
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery > 0;

-- Messages that wait to be delivered again, or to be dead-lettered; delivery_attempts so far.
CREATE OR REPLACE VIEW main.retrying AS
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group, l.attempt AS delivery_attempts, l.visible_at_ms,
       l.failure ->> '$.reason' AS reason, l.failure ->> '$.error_type' AS error_type,
       l.failure ->> '$.signature' AS signature, l.failure ->> '$.run_id' AS run_id,
       l.failure ->> '$.traceback' AS traceback
FROM store.leases AS l
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery IN ($WAITING, $EXHAUSTED);

-- Messages that wait for their time; queue_id and queue_offset are those of SCHEDULE_TOPIC_XXXX.
CREATE OR REPLACE VIEW main.scheduled AS
SELECT t.name AS topic, s.deliver_at_ms,
       CASE WHEN s.queue_id < 18 THEN s.queue_id + 1
            WHEN s.queue_id > 18 THEN s.queue_id END AS delay_level,
       q.message_id, q.tag, q.keys, q.message_group, q.born_at_ms, q.stored_at_ms,
       s.queue_id, s.queue_offset
FROM store.scheduled AS s
LEFT JOIN store.topics AS t ON t.topic_id = s.target_topic_id
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = 1 AND q.queue_id = s.queue_id AND q.queue_offset = s.queue_offset;

-- Half messages that are not ended; topic is the one they are for.
CREATE OR REPLACE VIEW main.half AS
SELECT t.name AS topic, q.message_id,
       lpad(to_hex(h.queue_offset), 16, '0') || lpad(to_hex(h.message_id_hash), 16, '0')
           AS transaction_id,
       h.producer_group, h.checks, h.next_check_ms, q.born_at_ms, q.stored_at_ms
FROM store.halves AS h
LEFT JOIN store.topics AS t ON t.topic_id = h.target_topic_id
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = 2 AND q.queue_id = 0 AND q.queue_offset = h.queue_offset;

-- The number of unsettled messages of its message group that follow each parked message.
CREATE OR REPLACE VIEW store.waiting_behind_parked AS
SELECT l.group_id, l.topic_id, l.queue_id, l.queue_offset, count(*) AS waiting
FROM store.leases AS l
JOIN store.cursors AS c USING (group_id, topic_id, queue_id)
LEFT JOIN store.behind AS b
    USING (group_id, topic_id, queue_id, message_group_hash)
JOIN store.consume_queue AS q
    ON q.topic_id = l.topic_id AND q.queue_id = l.queue_id
   AND q.message_group_hash = l.message_group_hash AND q.queue_offset > l.queue_offset
LEFT JOIN store.leases AS h
    ON h.group_id = l.group_id AND h.topic_id = l.topic_id AND h.queue_id = l.queue_id
   AND h.queue_offset = q.queue_offset
WHERE l.delivery = $PARKED AND l.message_group_hash <> 0
  AND (q.queue_offset >= least(c.queue_offset, b.queue_offset) OR h.queue_offset IS NOT NULL)
GROUP BY l.group_id, l.topic_id, l.queue_id, l.queue_offset;

-- The same with order by queue: the number of unsettled messages of the queue that follow.
CREATE OR REPLACE VIEW store.queue_behind_parked AS
SELECT l.group_id, l.topic_id, l.queue_id, l.queue_offset,
       greatest(h.max_offset - c.queue_offset, 0) + count(o.queue_offset) AS waiting
FROM store.leases AS l
JOIN store.groups AS g ON g.group_id = l.group_id AND g.detail ->> '$.order' = 'queue'
JOIN store.topics AS t ON t.topic_id = l.topic_id AND t.detail ->> '$.type' <> 'lite'
JOIN store.cursors AS c
    ON c.group_id = l.group_id AND c.topic_id = l.topic_id AND c.queue_id = l.queue_id
JOIN store.heads AS h
    ON h.topic_id = l.topic_id AND h.queue_id = l.queue_id
LEFT JOIN store.leases AS o
    ON o.group_id = l.group_id AND o.topic_id = l.topic_id AND o.queue_id = l.queue_id
   AND o.queue_offset > l.queue_offset AND o.delivery <> $ACKED_AHEAD
WHERE l.delivery = $PARKED
GROUP BY l.group_id, l.topic_id, l.queue_id, l.queue_offset, h.max_offset, c.queue_offset;

-- Messages that failed permanently and are held, with the later messages in their order, until they
-- are unparked; waiting is the number of later messages.
CREATE OR REPLACE VIEW main.parked AS
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group, l.attempt AS delivery_attempts, l.parked_at_ms,
       coalesce(b.waiting, w.waiting, 0) AS waiting, l.failure ->> '$.reason' AS reason,
       l.failure ->> '$.error_type' AS error_type, l.failure ->> '$.signature' AS signature,
       l.failure ->> '$.run_id' AS run_id
FROM store.leases AS l
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
LEFT JOIN store.waiting_behind_parked AS w USING (group_id, topic_id, queue_id, queue_offset)
LEFT JOIN store.queue_behind_parked AS b USING (group_id, topic_id, queue_id, queue_offset)
WHERE l.delivery = $PARKED;

-- Message groups in quarantine: their messages, later ones included, are dead-lettered.
CREATE OR REPLACE VIEW main.quarantined_groups AS
SELECT g.name AS consumer_group, t.name AS topic, c.queue_id, c.queue_offset, q.message_id,
       q.message_group, c.quarantined_at_ms, c.failure ->> '$.reason' AS reason,
       c.failure ->> '$.error_type' AS error_type, c.failure ->> '$.signature' AS signature,
       c.failure ->> '$.run_id' AS run_id
FROM store.quarantined_groups AS c
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset);

-- Progress by group id; committed_offset is the smallest offset that is not settled.
CREATE OR REPLACE VIEW store.progress_by_id AS
SELECT c.group_id, c.topic_id, c.queue_id, coalesce(h.min_offset, 0) AS min_offset,
       coalesce(h.max_offset, 0) AS max_offset, c.queue_offset AS cursor,
       least(c.queue_offset, l.first, b.first) AS committed_offset,
       coalesce(l.in_flight, 0) AS in_flight, coalesce(l.retrying, 0) AS retrying,
       coalesce(l.parked, 0) AS parked
FROM store.cursors AS c
LEFT JOIN store.heads AS h USING (topic_id, queue_id)
LEFT JOIN (
    SELECT group_id, topic_id, queue_id, min(queue_offset) AS first,
           count(*) FILTER (WHERE delivery > 0) AS in_flight,
           count(*) FILTER (WHERE delivery IN ($WAITING, $EXHAUSTED)) AS retrying,
           count(*) FILTER (WHERE delivery IN ($PARKED, $HELD)) AS parked
    FROM store.leases GROUP BY group_id, topic_id, queue_id
) AS l USING (group_id, topic_id, queue_id)
LEFT JOIN (
    SELECT group_id, topic_id, queue_id, min(queue_offset) AS first
    FROM store.behind GROUP BY group_id, topic_id, queue_id
) AS b USING (group_id, topic_id, queue_id);

-- A row for every queue that a group has touched; parked also counts delivered messages that are
-- held behind a parked one.
CREATE OR REPLACE VIEW main.progress AS
SELECT g.name AS consumer_group, t.name AS topic, p.queue_id, p.min_offset, p.max_offset, p.cursor,
       p.committed_offset, p.in_flight, p.retrying, p.parked
FROM store.progress_by_id AS p
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id);

-- Messages never delivered that wait behind a cursor because their message group is blocked.
CREATE OR REPLACE VIEW store.blocked_messages AS
SELECT b.group_id, b.topic_id, b.queue_id, q.queue_offset, q.message_id, q.message_group
FROM store.behind AS b
JOIN store.cursors AS c USING (group_id, topic_id, queue_id)
JOIN store.consume_queue AS q
    ON q.topic_id = b.topic_id AND q.queue_id = b.queue_id
   AND q.message_group_hash = b.message_group_hash
   AND q.queue_offset >= b.queue_offset AND q.queue_offset < c.queue_offset
ANTI JOIN store.leases AS l
    ON l.group_id = b.group_id AND l.topic_id = b.topic_id AND l.queue_id = b.queue_id
   AND l.queue_offset = q.queue_offset;

-- These messages, a row each, and delivered messages that are held behind a parked one.
CREATE OR REPLACE VIEW main.waiting AS
SELECT g.name AS consumer_group, t.name AS topic, w.queue_id, w.queue_offset, w.message_id,
       w.message_group
FROM store.blocked_messages AS w
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
UNION ALL
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group
FROM store.leases AS l
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery = $HELD;

-- Messages not settled, and when the oldest of them was stored (null when there is none).
CREATE OR REPLACE VIEW main.lag AS
SELECT g.name AS consumer_group, t.name AS topic, p.queue_id,
       p.max_offset - p.cursor + p.in_flight + p.retrying + p.parked
           + coalesce(w.waiting, 0) AS lag,
       q.stored_at_ms AS oldest_unread_at_ms
FROM store.progress_by_id AS p
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN (
    SELECT group_id, topic_id, queue_id, count(*) AS waiting
    FROM store.blocked_messages GROUP BY group_id, topic_id, queue_id
) AS w USING (group_id, topic_id, queue_id)
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = p.topic_id AND q.queue_id = p.queue_id
   AND q.queue_offset = greatest(p.committed_offset, p.min_offset);

-- As the view in_flight, at the moment t.
CREATE OR REPLACE MACRO main.in_flight_at(t) AS TABLE
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group, l.attempt AS delivery_attempt, l.visible_at_ms, l.client_id,
       store.window_epoch(l.epoch) AS epoch
FROM store.leases_at(store.ms_of(t)) AS l
JOIN store.groups_at(store.ms_of(t)) AS g USING (group_id)
JOIN store.topics_at(store.ms_of(t)) AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery > 0;

-- As the view retrying, at the moment t.
CREATE OR REPLACE MACRO main.retrying_at(t) AS TABLE
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group, l.attempt AS delivery_attempts, l.visible_at_ms,
       l.failure ->> '$.reason' AS reason, l.failure ->> '$.error_type' AS error_type,
       l.failure ->> '$.signature' AS signature, l.failure ->> '$.run_id' AS run_id,
       l.failure ->> '$.traceback' AS traceback
FROM store.leases_with_failure_at(store.ms_of(t)) AS l
JOIN store.groups_at(store.ms_of(t)) AS g USING (group_id)
JOIN store.topics_at(store.ms_of(t)) AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery IN ($WAITING, $EXHAUSTED);

-- As the view scheduled, at the moment t.
CREATE OR REPLACE MACRO main.scheduled_at(t) AS TABLE
SELECT t.name AS topic, s.deliver_at_ms,
       CASE WHEN s.queue_id < 18 THEN s.queue_id + 1
            WHEN s.queue_id > 18 THEN s.queue_id END AS delay_level,
       q.message_id, q.tag, q.keys, q.message_group, q.born_at_ms, q.stored_at_ms,
       s.queue_id, s.queue_offset
FROM store.scheduled_at(store.ms_of(t)) AS s
LEFT JOIN store.topics_at(store.ms_of(t)) AS t ON t.topic_id = s.target_topic_id
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = 1 AND q.queue_id = s.queue_id AND q.queue_offset = s.queue_offset;

-- As the view half, at the moment t.
CREATE OR REPLACE MACRO main.half_at(t) AS TABLE
SELECT t.name AS topic, q.message_id,
       lpad(to_hex(h.queue_offset), 16, '0') || lpad(to_hex(h.message_id_hash), 16, '0')
           AS transaction_id,
       h.producer_group, h.checks, h.next_check_ms, q.born_at_ms, q.stored_at_ms
FROM store.halves_at(store.ms_of(t)) AS h
LEFT JOIN store.topics_at(store.ms_of(t)) AS t ON t.topic_id = h.target_topic_id
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = 2 AND q.queue_id = 0 AND q.queue_offset = h.queue_offset;

-- As the view parked, at the moment t.
CREATE OR REPLACE MACRO main.parked_at(t) AS TABLE
WITH cursors AS MATERIALIZED (FROM store.cursors_at(store.ms_of(t))),
groups AS MATERIALIZED (FROM store.groups_at(store.ms_of(t))),
leases AS MATERIALIZED (FROM store.leases_at(store.ms_of(t))),
topics AS MATERIALIZED (FROM store.topics_at(store.ms_of(t))),
waiting_behind_parked AS (
    SELECT l.group_id, l.topic_id, l.queue_id, l.queue_offset, count(*) AS waiting
    FROM leases AS l
    JOIN cursors AS c USING (group_id, topic_id, queue_id)
    LEFT JOIN store.behind_at(store.ms_of(t)) AS b
        USING (group_id, topic_id, queue_id, message_group_hash)
    JOIN store.stored_messages_at(store.ms_of(t)) AS q
        ON q.topic_id = l.topic_id AND q.queue_id = l.queue_id
       AND q.message_group_hash = l.message_group_hash AND q.queue_offset > l.queue_offset
    LEFT JOIN leases AS h
        ON h.group_id = l.group_id AND h.topic_id = l.topic_id AND h.queue_id = l.queue_id
       AND h.queue_offset = q.queue_offset
    WHERE l.delivery = $PARKED AND l.message_group_hash <> 0
      AND (q.queue_offset >= least(c.queue_offset, b.queue_offset) OR h.queue_offset IS NOT NULL)
    GROUP BY l.group_id, l.topic_id, l.queue_id, l.queue_offset
),
queue_behind_parked AS (
    SELECT l.group_id, l.topic_id, l.queue_id, l.queue_offset,
           greatest(h.max_offset - c.queue_offset, 0) + count(o.queue_offset) AS waiting
    FROM leases AS l
    JOIN groups AS g ON g.group_id = l.group_id AND g.detail ->> '$.order' = 'queue'
    JOIN topics AS t ON t.topic_id = l.topic_id AND t.detail ->> '$.type' <> 'lite'
    JOIN cursors AS c
        ON c.group_id = l.group_id AND c.topic_id = l.topic_id AND c.queue_id = l.queue_id
    JOIN store.heads_at(store.ms_of(t)) AS h
        ON h.topic_id = l.topic_id AND h.queue_id = l.queue_id
    LEFT JOIN leases AS o
        ON o.group_id = l.group_id AND o.topic_id = l.topic_id AND o.queue_id = l.queue_id
       AND o.queue_offset > l.queue_offset AND o.delivery <> $ACKED_AHEAD
    WHERE l.delivery = $PARKED
    GROUP BY l.group_id, l.topic_id, l.queue_id, l.queue_offset, h.max_offset, c.queue_offset
)
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group, l.attempt AS delivery_attempts, l.parked_at_ms,
       coalesce(b.waiting, w.waiting, 0) AS waiting, l.failure ->> '$.reason' AS reason,
       l.failure ->> '$.error_type' AS error_type, l.failure ->> '$.signature' AS signature,
       l.failure ->> '$.run_id' AS run_id
FROM store.leases_with_failure_at(store.ms_of(t)) AS l
JOIN groups AS g USING (group_id)
JOIN topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
LEFT JOIN waiting_behind_parked AS w USING (group_id, topic_id, queue_id, queue_offset)
LEFT JOIN queue_behind_parked AS b USING (group_id, topic_id, queue_id, queue_offset)
WHERE l.delivery = $PARKED;

-- As the view quarantined_groups, at the moment t.
CREATE OR REPLACE MACRO main.quarantined_groups_at(t) AS TABLE
SELECT g.name AS consumer_group, t.name AS topic, c.queue_id, c.queue_offset, q.message_id,
       q.message_group, c.quarantined_at_ms, c.failure ->> '$.reason' AS reason,
       c.failure ->> '$.error_type' AS error_type, c.failure ->> '$.signature' AS signature,
       c.failure ->> '$.run_id' AS run_id
FROM store.quarantined_groups_at(store.ms_of(t)) AS c
JOIN store.groups_at(store.ms_of(t)) AS g USING (group_id)
JOIN store.topics_at(store.ms_of(t)) AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset);

-- As the view progress, at the moment t.
CREATE OR REPLACE MACRO main.progress_at(t) AS TABLE
WITH progress_by_id AS (
    SELECT c.group_id, c.topic_id, c.queue_id, coalesce(h.min_offset, 0) AS min_offset,
           coalesce(h.max_offset, 0) AS max_offset, c.queue_offset AS cursor,
           least(c.queue_offset, l.first, b.first) AS committed_offset,
           coalesce(l.in_flight, 0) AS in_flight, coalesce(l.retrying, 0) AS retrying,
           coalesce(l.parked, 0) AS parked
    FROM store.cursors_at(store.ms_of(t)) AS c
    LEFT JOIN store.heads_at(store.ms_of(t)) AS h USING (topic_id, queue_id)
    LEFT JOIN (
        SELECT group_id, topic_id, queue_id, min(queue_offset) AS first,
               count(*) FILTER (WHERE delivery > 0) AS in_flight,
               count(*) FILTER (WHERE delivery IN ($WAITING, $EXHAUSTED)) AS retrying,
               count(*) FILTER (WHERE delivery IN ($PARKED, $HELD)) AS parked
        FROM store.leases_at(store.ms_of(t)) GROUP BY group_id, topic_id, queue_id
    ) AS l USING (group_id, topic_id, queue_id)
    LEFT JOIN (
        SELECT group_id, topic_id, queue_id, min(queue_offset) AS first
        FROM store.behind_at(store.ms_of(t)) GROUP BY group_id, topic_id, queue_id
    ) AS b USING (group_id, topic_id, queue_id)
)
SELECT g.name AS consumer_group, t.name AS topic, p.queue_id, p.min_offset, p.max_offset, p.cursor,
       p.committed_offset, p.in_flight, p.retrying, p.parked
FROM progress_by_id AS p
JOIN store.groups_at(store.ms_of(t)) AS g USING (group_id)
JOIN store.topics_at(store.ms_of(t)) AS t USING (topic_id);

-- As the view waiting, at the moment t.
CREATE OR REPLACE MACRO main.waiting_at(t) AS TABLE
WITH groups AS MATERIALIZED (FROM store.groups_at(store.ms_of(t))),
leases AS MATERIALIZED (FROM store.leases_at(store.ms_of(t))),
topics AS MATERIALIZED (FROM store.topics_at(store.ms_of(t))),
blocked_messages AS (
    SELECT b.group_id, b.topic_id, b.queue_id, q.queue_offset, q.message_id, q.message_group
    FROM store.behind_at(store.ms_of(t)) AS b
    JOIN store.cursors_at(store.ms_of(t)) AS c USING (group_id, topic_id, queue_id)
    JOIN store.consume_queue AS q
        ON q.topic_id = b.topic_id AND q.queue_id = b.queue_id
       AND q.message_group_hash = b.message_group_hash
       AND q.queue_offset >= b.queue_offset AND q.queue_offset < c.queue_offset
    ANTI JOIN leases AS l
        ON l.group_id = b.group_id AND l.topic_id = b.topic_id AND l.queue_id = b.queue_id
       AND l.queue_offset = q.queue_offset
)
SELECT g.name AS consumer_group, t.name AS topic, w.queue_id, w.queue_offset, w.message_id,
       w.message_group
FROM blocked_messages AS w
JOIN groups AS g USING (group_id)
JOIN topics AS t USING (topic_id)
UNION ALL
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group
FROM leases AS l
JOIN groups AS g USING (group_id)
JOIN topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery = $HELD;

-- As the view lag, at the moment t.
CREATE OR REPLACE MACRO main.lag_at(t) AS TABLE
WITH behind AS MATERIALIZED (FROM store.behind_at(store.ms_of(t))),
cursors AS MATERIALIZED (FROM store.cursors_at(store.ms_of(t))),
leases AS MATERIALIZED (FROM store.leases_at(store.ms_of(t))),
progress_by_id AS (
    SELECT c.group_id, c.topic_id, c.queue_id, coalesce(h.min_offset, 0) AS min_offset,
           coalesce(h.max_offset, 0) AS max_offset, c.queue_offset AS cursor,
           least(c.queue_offset, l.first, b.first) AS committed_offset,
           coalesce(l.in_flight, 0) AS in_flight, coalesce(l.retrying, 0) AS retrying,
           coalesce(l.parked, 0) AS parked
    FROM cursors AS c
    LEFT JOIN store.heads_at(store.ms_of(t)) AS h USING (topic_id, queue_id)
    LEFT JOIN (
        SELECT group_id, topic_id, queue_id, min(queue_offset) AS first,
               count(*) FILTER (WHERE delivery > 0) AS in_flight,
               count(*) FILTER (WHERE delivery IN ($WAITING, $EXHAUSTED)) AS retrying,
               count(*) FILTER (WHERE delivery IN ($PARKED, $HELD)) AS parked
        FROM leases GROUP BY group_id, topic_id, queue_id
    ) AS l USING (group_id, topic_id, queue_id)
    LEFT JOIN (
        SELECT group_id, topic_id, queue_id, min(queue_offset) AS first
        FROM behind GROUP BY group_id, topic_id, queue_id
    ) AS b USING (group_id, topic_id, queue_id)
),
blocked_messages AS (
    SELECT b.group_id, b.topic_id, b.queue_id, q.queue_offset, q.message_id, q.message_group
    FROM behind AS b
    JOIN cursors AS c USING (group_id, topic_id, queue_id)
    JOIN store.consume_queue AS q
        ON q.topic_id = b.topic_id AND q.queue_id = b.queue_id
       AND q.message_group_hash = b.message_group_hash
       AND q.queue_offset >= b.queue_offset AND q.queue_offset < c.queue_offset
    ANTI JOIN leases AS l
        ON l.group_id = b.group_id AND l.topic_id = b.topic_id AND l.queue_id = b.queue_id
       AND l.queue_offset = q.queue_offset
)
SELECT g.name AS consumer_group, t.name AS topic, p.queue_id,
       p.max_offset - p.cursor + p.in_flight + p.retrying + p.parked
           + coalesce(w.waiting, 0) AS lag,
       q.stored_at_ms AS oldest_unread_at_ms
FROM progress_by_id AS p
JOIN store.groups_at(store.ms_of(t)) AS g USING (group_id)
JOIN store.topics_at(store.ms_of(t)) AS t USING (topic_id)
LEFT JOIN (
    SELECT group_id, topic_id, queue_id, count(*) AS waiting
    FROM blocked_messages GROUP BY group_id, topic_id, queue_id
) AS w USING (group_id, topic_id, queue_id)
LEFT JOIN store.stored_messages_at(store.ms_of(t)) AS q
    ON q.topic_id = p.topic_id AND q.queue_id = p.queue_id
   AND q.queue_offset = greatest(p.committed_offset, p.min_offset);
