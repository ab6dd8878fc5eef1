-- The views that people read, with the names of topics and groups. Times are ms since 1970.

-- Topics that exist.
CREATE OR REPLACE VIEW main.topics AS
SELECT name AS topic, topic_id, detail ->> '$.type' AS "type",
       (detail ->> '$.queues')::INTEGER AS queues, detail ->> '$.partition_time' AS partition_time,
       (detail ->> '$.created_at_ms')::BIGINT AS created_at_ms
FROM store.topics;

-- Consumer groups that exist.
CREATE OR REPLACE VIEW main.consumer_groups AS
SELECT name AS consumer_group, group_id, detail ->> '$.order' AS "order",
       (detail ->> '$.max_attempts')::INTEGER AS max_attempts,
       (detail -> '$.backoff_ms')::BIGINT[] AS backoff_ms,
       detail ->> '$.on_failure' AS on_failure,
       (detail ->> '$.created_at_ms')::BIGINT AS created_at_ms
FROM store.groups;

-- Messages without bodies and properties.
CREATE OR REPLACE VIEW main.messages AS
SELECT t.name AS topic, q.queue_id, q.queue_offset, q.message_id, q.tag, q.keys, q.message_group,
       q.born_at_ms, q.stored_at_ms, q.deliver_at_ms
FROM store.consume_queue AS q JOIN store.topics AS t USING (topic_id);

-- Messages that were delivered and are neither settled nor known to have ended.
CREATE OR REPLACE VIEW main.in_flight AS
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group, l.attempt AS delivery_attempt, l.visible_at_ms, l.client_id, l.epoch
FROM store.leases AS l
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery > 0;

-- Messages that wait to be delivered again, or to be dead-lettered; delivery_attempts so far.
CREATE OR REPLACE VIEW main.retrying AS
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group, l.attempt AS delivery_attempts, l.visible_at_ms
FROM store.leases AS l
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery <= 0;

-- Messages that wait for their time; queue_id and queue_offset are those of SCHEDULE_TOPIC_XXXX.
CREATE OR REPLACE VIEW main.scheduled AS
SELECT t.name AS topic, s.deliver_at_ms,
       CASE WHEN s.queue_id < 18 THEN s.queue_id + 1 END AS delay_level,
       q.message_id, q.tag, q.keys, q.message_group, q.born_at_ms, q.stored_at_ms,
       s.queue_id, s.queue_offset
FROM store.scheduled AS s
LEFT JOIN store.topics AS t ON t.topic_id = s.target_topic_id
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = 1 AND q.queue_id = s.queue_id AND q.queue_offset = s.queue_offset;

-- Half messages; none until there are transactions.
CREATE OR REPLACE VIEW main.half AS
SELECT ''::VARCHAR AS topic, 0::INTEGER AS queue_id, 0::BIGINT AS queue_offset,
       ''::VARCHAR AS message_id, 0::BIGINT AS stored_at_ms, 0::INTEGER AS checks
WHERE false;

-- Messages held with their message group after a final failure; none until groups can park.
CREATE OR REPLACE VIEW main.parked AS
SELECT ''::VARCHAR AS consumer_group, ''::VARCHAR AS topic, 0::INTEGER AS queue_id,
       0::BIGINT AS queue_offset, ''::VARCHAR AS message_id, ''::VARCHAR AS message_group,
       0::BIGINT AS parked_at_ms, ''::VARCHAR AS reason
WHERE false;

-- Dead letters: where each lies, and where it came from.
CREATE OR REPLACE VIEW main.dead_letters AS
SELECT substr(t.name, 6) AS consumer_group, d.origin_topic AS topic,
       d.origin_message_id AS message_id, d.origin_queue_id, d.origin_queue_offset, d.reason,
       d.attempts, q.tag, q.keys, q.message_group,
       q.born_at_ms, q.stored_at_ms, t.name AS dead_letter_topic, d.queue_id, d.queue_offset
FROM store.dead_letters AS d
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset);

-- Progress by group id; committed_offset is the smallest offset that is not settled.
CREATE OR REPLACE VIEW store.progress_by_id AS
SELECT c.group_id, c.topic_id, c.queue_id, coalesce(h.min_offset, 0) AS min_offset,
       coalesce(h.max_offset, 0) AS max_offset, c.queue_offset AS cursor,
       least(c.queue_offset, l.first, b.first) AS committed_offset,
       coalesce(l.in_flight, 0) AS in_flight, coalesce(l.retrying, 0) AS retrying
FROM store.cursors AS c
LEFT JOIN store.heads AS h USING (topic_id, queue_id)
LEFT JOIN (
    SELECT group_id, topic_id, queue_id, min(queue_offset) AS first,
           count(*) FILTER (WHERE delivery > 0) AS in_flight,
           count(*) FILTER (WHERE delivery <= 0) AS retrying
    FROM store.leases GROUP BY group_id, topic_id, queue_id
) AS l USING (group_id, topic_id, queue_id)
LEFT JOIN (
    SELECT group_id, topic_id, queue_id, min(queue_offset) AS first
    FROM store.behind GROUP BY group_id, topic_id, queue_id
) AS b USING (group_id, topic_id, queue_id);

-- A row for every queue that a group has touched.
CREATE OR REPLACE VIEW main.progress AS
SELECT g.name AS consumer_group, t.name AS topic, p.queue_id, p.min_offset, p.max_offset, p.cursor,
       p.committed_offset, p.in_flight, p.retrying
FROM store.progress_by_id AS p
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id);

-- Messages never delivered that wait behind a cursor because their message group is blocked.
CREATE OR REPLACE VIEW store.waiting_by_id AS
SELECT b.group_id, b.topic_id, b.queue_id, count(*) AS waiting
FROM store.behind AS b
JOIN store.cursors AS c USING (group_id, topic_id, queue_id)
JOIN store.consume_queue AS q
    ON q.topic_id = b.topic_id AND q.queue_id = b.queue_id
   AND q.message_group_hash = b.message_group_hash
   AND q.queue_offset >= b.queue_offset AND q.queue_offset < c.queue_offset
ANTI JOIN store.leases AS l
    ON l.group_id = b.group_id AND l.topic_id = b.topic_id AND l.queue_id = b.queue_id
   AND l.queue_offset = q.queue_offset
GROUP BY b.group_id, b.topic_id, b.queue_id;

-- Messages not settled, and when the oldest of them was stored (null when there is none).
CREATE OR REPLACE VIEW main.lag AS
SELECT g.name AS consumer_group, t.name AS topic, p.queue_id,
       p.max_offset - p.cursor + p.in_flight + p.retrying + coalesce(w.waiting, 0) AS lag,
       q.stored_at_ms AS oldest_unread_at_ms
FROM store.progress_by_id AS p
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.waiting_by_id AS w USING (group_id, topic_id, queue_id)
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = p.topic_id AND q.queue_id = p.queue_id
   AND q.queue_offset = greatest(p.committed_offset, p.min_offset);

-- Events that are not in event Parquet yet.
CREATE OR REPLACE VIEW main.events AS
SELECT e.position, e."row", coalesce(k.name, e.kind::VARCHAR) AS kind, e.at_ms,
       g.name AS consumer_group, t.name AS topic, e.queue_id, e.queue_offset, e.attempt,
       e.visible_at_ms, e.delivery, e.epoch, e.client_id, e.detail
FROM store.events AS e
LEFT JOIN store.kinds AS k USING (kind)
LEFT JOIN store.groups AS g USING (group_id)
LEFT JOIN store.topics AS t USING (topic_id);

-- What happened to each message: that it was stored, and the events that name it.
CREATE OR REPLACE VIEW main.message_trace AS
SELECT q.message_id, q.stored_at_ms AS at_ms, 'stored' AS what, t.name AS topic, q.queue_id,
       q.queue_offset, NULL::VARCHAR AS consumer_group, NULL::INTEGER AS attempt,
       NULL::BIGINT AS visible_at_ms, NULL::VARCHAR AS client_id, NULL::VARCHAR AS detail
FROM store.consume_queue AS q LEFT JOIN store.topics AS t USING (topic_id)
UNION ALL
SELECT q.message_id, e.at_ms, k.name, t.name, e.queue_id, e.queue_offset, g.name, e.attempt,
       e.visible_at_ms, e.client_id, e.detail
FROM store.events AS e
JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
JOIN store.kinds AS k USING (kind)
LEFT JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.groups AS g USING (group_id)
WHERE e.kind BETWEEN $LEASE AND $PARK
   OR e.kind IN ($SCHEDULE_DELIVERED, $SCHEDULE_DROPPED);

-- Windows that were ever opened; expires_at_ms is 0 when closed.
CREATE OR REPLACE VIEW main.windows AS
SELECT name, owner, epoch, expires_at_ms, settle_id, settle_answer FROM store.windows;

-- Files that count in the sinks.
CREATE OR REPLACE VIEW main.sink_files AS
SELECT g.name AS consumer_group, s.path, s."rows", s.bytes, s."partition", s.epoch, s.at_ms
FROM store.sink_files AS s JOIN store.groups AS g USING (group_id);

-- Registered Parquet segments of message queues.
CREATE OR REPLACE VIEW main.segments AS
SELECT t.name AS topic, s.queue_id, s.base, s."end", s.path, s."rows", s.bytes
FROM store.segments AS s JOIN store.topics AS t USING (topic_id);
