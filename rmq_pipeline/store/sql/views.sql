-- The views that people read, with the names of topics and groups. Times are ms since 1970.

-- Topics that exist.
CREATE OR REPLACE VIEW main.topics AS
SELECT name AS topic, topic_id, detail ->> '$.type' AS "type",
       (detail ->> '$.queues')::INTEGER AS queues, detail ->> '$.partition_time' AS partition_time,
       coalesce(detail ->> '$.deduplicate', 'none') AS deduplicate,
       (detail ->> '$.deduplicate_window_ms')::BIGINT AS deduplicate_window_ms,
       (detail ->> '$.retention_ms')::BIGINT AS retention_ms,
       (detail ->> '$.retention_bytes')::BIGINT AS retention_bytes,
       (detail ->> '$.created_at_ms')::BIGINT AS created_at_ms
FROM store.topics;

-- Consumer groups that exist.
CREATE OR REPLACE VIEW main.consumer_groups AS
SELECT name AS consumer_group, group_id, detail ->> '$.order' AS "order",
       (detail ->> '$.max_attempts')::INTEGER AS max_attempts,
       (detail -> '$.backoff_ms')::BIGINT[] AS backoff_ms,
       coalesce(detail ->> '$.backoff', 'customized') AS backoff,
       detail ->> '$.on_failure' AS on_failure,
       (detail ->> '$.max_rate_per_s')::DOUBLE AS max_rate_per_s,
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
       q.message_group, l.attempt AS delivery_attempt, l.visible_at_ms, l.client_id,
       greatest(l.epoch, 0) AS epoch
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
WHERE l.delivery IN (0, -1);

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

-- Half messages that nobody has ended; topic is the one they are for.
CREATE OR REPLACE VIEW main.half AS
SELECT t.name AS topic, q.message_id,
       lpad(to_hex(h.queue_offset), 16, '0') || lpad(to_hex(h.message_id_hash), 16, '0')
           AS transaction_id,
       h.producer_group, h.checks, h.next_check_ms, q.born_at_ms, q.stored_at_ms
FROM store.halves AS h
LEFT JOIN store.topics AS t ON t.topic_id = h.target_topic_id
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = 2 AND q.queue_id = 0 AND q.queue_offset = h.queue_offset;

-- How many unsettled messages of its message group follow each parked message.
CREATE OR REPLACE VIEW store.waiting_behind_parked AS
SELECT l.group_id, l.topic_id, l.queue_id, l.queue_offset, count(*) AS waiting
FROM store.leases AS l
JOIN store.cursors AS c USING (group_id, topic_id, queue_id)
LEFT JOIN store.behind AS b USING (group_id, topic_id, queue_id, message_group_hash)
JOIN store.consume_queue AS q
    ON q.topic_id = l.topic_id AND q.queue_id = l.queue_id
   AND q.message_group_hash = l.message_group_hash AND q.queue_offset > l.queue_offset
LEFT JOIN store.leases AS h
    ON h.group_id = l.group_id AND h.topic_id = l.topic_id AND h.queue_id = l.queue_id
   AND h.queue_offset = q.queue_offset
WHERE l.delivery = -2 AND l.message_group_hash <> 0
  AND (q.queue_offset >= least(c.queue_offset, b.queue_offset) OR h.queue_offset IS NOT NULL)
GROUP BY l.group_id, l.topic_id, l.queue_id, l.queue_offset;

-- The same with order by queue: what of the queue follows and is not settled.
CREATE OR REPLACE VIEW store.queue_behind_parked AS
SELECT l.group_id, l.topic_id, l.queue_id, l.queue_offset,
       greatest(h.max_offset - c.queue_offset, 0) + count(o.queue_offset) AS waiting
FROM store.leases AS l
JOIN store.groups AS g ON g.group_id = l.group_id AND g.detail ->> '$.order' = 'queue'
JOIN store.topics AS t ON t.topic_id = l.topic_id AND t.detail ->> '$.type' <> 'lite'
JOIN store.cursors AS c
    ON c.group_id = l.group_id AND c.topic_id = l.topic_id AND c.queue_id = l.queue_id
JOIN store.heads AS h ON h.topic_id = l.topic_id AND h.queue_id = l.queue_id
LEFT JOIN store.leases AS o
    ON o.group_id = l.group_id AND o.topic_id = l.topic_id AND o.queue_id = l.queue_id
   AND o.queue_offset > l.queue_offset AND o.delivery <> -4
WHERE l.delivery = -2
GROUP BY l.group_id, l.topic_id, l.queue_id, l.queue_offset, h.max_offset, c.queue_offset;

-- Messages that failed for good and are held, with what follows them in order, until
-- somebody unparks them; waiting is how many follow.
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
WHERE l.delivery = -2;

-- Message groups that are given up: what is sent to them goes to the dead letters.
CREATE OR REPLACE VIEW main.condemned AS
SELECT g.name AS consumer_group, t.name AS topic, c.queue_id, c.queue_offset, q.message_id,
       q.message_group, c.condemned_at_ms, c.failure ->> '$.reason' AS reason,
       c.failure ->> '$.error_type' AS error_type, c.failure ->> '$.signature' AS signature,
       c.failure ->> '$.run_id' AS run_id
FROM store.condemned AS c
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset);

-- Dead letters: where each lies, and where it came from.
CREATE OR REPLACE VIEW main.dead_letters AS
SELECT substr(t.name, 6) AS consumer_group, d.origin_topic AS topic,
       d.origin_message_id AS message_id, d.origin_queue_id, d.origin_queue_offset, d.reason,
       d.error_type, d.signature, d.run_id, d.attempts, d.dead_lettered_at_ms,
       q.tag, q.keys, q.message_group, q.born_at_ms, q.stored_at_ms,
       t.name AS dead_letter_topic, d.queue_id, d.queue_offset,
       d.properties, r.redriven_at_ms, r.redrive_id
FROM store.dead_letters AS d
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
LEFT JOIN store.redrives AS r USING (topic_id, queue_id, queue_offset);

-- Dead letters that were opened again: where each lay, where its message lies, and what became of
-- it there, first and last.
CREATE OR REPLACE VIEW main.redrives AS
SELECT substr(t.name, 6) AS consumer_group, r.redrive_id,
       r.queue_id AS dead_letter_queue_id, r.queue_offset AS dead_letter_offset,
       r.origin_topic AS topic, r.origin_queue_id AS queue_id,
       r.origin_queue_offset AS queue_offset, r.message_id, r.redriven_at_ms, r.outcome,
       r.outcome_at_ms, r.first_outcome
FROM store.redrives AS r JOIN store.topics AS t USING (topic_id);

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
           count(*) FILTER (WHERE delivery IN (0, -1)) AS retrying,
           count(*) FILTER (WHERE delivery IN (-2, -3)) AS parked
    FROM store.leases GROUP BY group_id, topic_id, queue_id
) AS l USING (group_id, topic_id, queue_id)
LEFT JOIN (
    SELECT group_id, topic_id, queue_id, min(queue_offset) AS first
    FROM store.behind GROUP BY group_id, topic_id, queue_id
) AS b USING (group_id, topic_id, queue_id);

-- A row for every queue that a group has touched; parked counts what is held behind such messages
-- too, once it was delivered.
CREATE OR REPLACE VIEW main.progress AS
SELECT g.name AS consumer_group, t.name AS topic, p.queue_id, p.min_offset, p.max_offset, p.cursor,
       p.committed_offset, p.in_flight, p.retrying, p.parked
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

-- Those messages, a row each, and those that were delivered and are held behind a parked one.
CREATE OR REPLACE VIEW main.waiting AS
SELECT g.name AS consumer_group, t.name AS topic, q.queue_id, q.queue_offset, q.message_id,
       q.message_group
FROM store.behind AS b
JOIN store.cursors AS c USING (group_id, topic_id, queue_id)
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
JOIN store.consume_queue AS q
    ON q.topic_id = b.topic_id AND q.queue_id = b.queue_id
   AND q.message_group_hash = b.message_group_hash
   AND q.queue_offset >= b.queue_offset AND q.queue_offset < c.queue_offset
ANTI JOIN store.leases AS l
    ON l.group_id = b.group_id AND l.topic_id = b.topic_id AND l.queue_id = b.queue_id
   AND l.queue_offset = q.queue_offset
UNION ALL
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.queue_offset, q.message_id,
       q.message_group
FROM store.leases AS l
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.consume_queue AS q USING (topic_id, queue_id, queue_offset)
WHERE l.delivery = -3;

-- Messages not settled, and when the oldest of them was stored (null when there is none).
CREATE OR REPLACE VIEW main.lag AS
SELECT g.name AS consumer_group, t.name AS topic, p.queue_id,
       p.max_offset - p.cursor + p.in_flight + p.retrying + p.parked
           + coalesce(w.waiting, 0) AS lag,
       q.stored_at_ms AS oldest_unread_at_ms
FROM store.progress_by_id AS p
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id)
LEFT JOIN store.waiting_by_id AS w USING (group_id, topic_id, queue_id)
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = p.topic_id AND q.queue_id = p.queue_id
   AND q.queue_offset = greatest(p.committed_offset, p.min_offset);

-- Windows that were ever opened; expires_at_ms is 0 when closed.
CREATE OR REPLACE VIEW main.windows AS
SELECT name, owner, epoch, expires_at_ms, settle_id, settle_answer FROM store.windows;

-- Which lite topics each client is given.
CREATE OR REPLACE VIEW main.lite_subscriptions AS
SELECT g.name AS consumer_group, t.name AS topic, s.client_id,
       unnest(from_json(s.lite_topics, '["VARCHAR"]')) AS lite_topic
FROM store.lite_subscriptions AS s
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id);

-- Queues that a client has locked; once expires_at_ms has come the lock holds no more.
CREATE OR REPLACE VIEW main.queue_locks AS
SELECT g.name AS consumer_group, t.name AS topic, l.queue_id, l.client_id, l.locked_at_ms,
       l.renewed_at_ms, l.expires_at_ms
FROM store.queue_locks AS l
JOIN store.groups AS g USING (group_id)
JOIN store.topics AS t USING (topic_id);

-- Files that count in the sinks, and where the messages of their rows lie.
CREATE OR REPLACE VIEW main.sink_files AS
SELECT g.name AS consumer_group, s.path, s."rows", s.bytes, s."partition", s.epoch, s.at_ms,
       s.version, s.offsets
FROM store.sink_files AS s JOIN store.groups AS g USING (group_id)
WHERE s.removed_version IS NULL;

-- Files that came to count instead of others; added and removed are lists of paths.
CREATE OR REPLACE VIEW main.sink_replacements AS
SELECT g.name AS consumer_group, r.replacement_id, r.at_ms, r.version, r.reason, r.added, r.removed
FROM store.sink_replacements AS r JOIN store.groups AS g USING (group_id);

-- Registered Parquet segments of message queues.
CREATE OR REPLACE VIEW main.segments AS
SELECT t.name AS topic, s.queue_id, s.base, s."end", s.path, s."rows", s.bytes
FROM store.segments AS s JOIN store.topics AS t USING (topic_id);
