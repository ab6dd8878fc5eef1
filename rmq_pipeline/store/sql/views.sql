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

-- main.messages, with the place of each message in the log.
CREATE OR REPLACE VIEW store.placed_messages AS
SELECT t.name AS topic, q.queue_id, q.queue_offset, q.message_id, q.tag, q.keys, q.message_group,
       q.born_at_ms, q.stored_at_ms, q.deliver_at_ms, q.topic_id, q."position", q."row"
FROM store.consume_queue AS q JOIN store.topics AS t USING (topic_id);

-- Messages without bodies and properties.
CREATE OR REPLACE VIEW main.messages AS
SELECT t.name AS topic, q.queue_id, q.queue_offset, q.message_id, q.tag, q.keys, q.message_group,
       q.born_at_ms, q.stored_at_ms, q.deliver_at_ms
FROM store.consume_queue AS q JOIN store.topics AS t USING (topic_id);

-- quarantined_groups by its earlier name, for one release.
CREATE OR REPLACE VIEW main.condemned AS
SELECT * RENAME (quarantined_at_ms AS condemned_at_ms) FROM main.quarantined_groups;

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
