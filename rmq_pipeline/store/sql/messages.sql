-- What dispatch does with the messages of a transaction.
-- staged_messages: schema.MESSAGE without body and properties, + position, "row", tag_hash.

-- name: insert_messages
-- In: staged_messages. Out: a row of the consume queue for each.
INSERT INTO store.consume_queue
SELECT topic_id, queue_id, queue_offset, position, "row", message_group_hash, tag_hash,
       message_id, tag, keys, message_group, born_at_ms, stored_at_ms, deliver_at_ms,
       target_topic_id
FROM staged_messages;

-- name: raise_heads
-- In: staged_messages. Out: max_offset of the queues they went to; the rows of new queues.
MERGE INTO store.heads AS h
USING (
    SELECT topic_id, queue_id, min(queue_offset) AS low, max(queue_offset) + 1 AS high
    FROM staged_messages GROUP BY ALL
) AS n
ON h.topic_id = n.topic_id AND h.queue_id = n.queue_id
WHEN MATCHED THEN UPDATE SET max_offset = greatest(h.max_offset, n.high)
WHEN NOT MATCHED THEN INSERT VALUES (n.topic_id, n.queue_id, n.low, n.high);

-- name: insert_scheduled
-- In: staged_messages, $schedule_topic_id. Out: a row for each message that waits for its time.
INSERT INTO store.scheduled
SELECT queue_id, queue_offset, deliver_at_ms, target_topic_id, position, "row"
FROM staged_messages WHERE topic_id = $schedule_topic_id;

-- name: dead_letter_topics
-- In: $prefix of a dead letter topic's name. Out: topic_id of each.
SELECT topic_id FROM store.topics WHERE starts_with(name, $prefix);

-- name: insert_dead_letters
-- In: staged_dead_letters, the messages of dead letter topics: topic_id, queue_id, queue_offset,
-- properties, stored_at_ms. Out: a row for each.
INSERT INTO store.dead_letters
SELECT topic_id, queue_id, queue_offset,
       properties['DLQ_ORIGIN_TOPIC'], properties['DLQ_ORIGIN_MESSAGE_ID'],
       TRY_CAST(properties['DLQ_ORIGIN_QUEUE_ID'] AS INTEGER),
       TRY_CAST(properties['DLQ_ORIGIN_QUEUE_OFFSET'] AS BIGINT),
       properties['DLQ_REASON'], TRY_CAST(properties['DLQ_ATTEMPTS'] AS INTEGER),
       properties['DLQ_ERROR_TYPE'], properties['DLQ_SIGNATURE'], properties['DLQ_RUN_ID'],
       stored_at_ms, properties
FROM staged_dead_letters;
