-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: snapshot_rows
-- In: $position, that of store.reached. Out: the state at this position, a row for each row of its
-- tables, as an event that says the same would fill it; what is the table.
SELECT $position::BIGINT AS position, NULL::VARCHAR AS what, NULL::BIGINT AS at_ms,
       NULL::INTEGER AS group_id, NULL::INTEGER AS topic_id, NULL::INTEGER AS queue_id,
       NULL::BIGINT AS queue_offset, NULL::INTEGER AS attempt, NULL::BIGINT AS visible_at_ms,
       NULL::BIGINT AS delivery, NULL::BIGINT AS epoch, NULL::BIGINT AS message_group_hash,
       NULL::VARCHAR AS client_id, NULL::VARCHAR AS detail, NULL::BIGINT AS min_offset,
       NULL::INTEGER AS target_topic_id
WHERE false
UNION ALL BY NAME
SELECT $position AS position, 'head' AS what, topic_id, queue_id, min_offset,
       max_offset AS queue_offset
FROM store.heads
UNION ALL BY NAME
SELECT $position AS position, 'lease' AS what, group_id, topic_id, queue_id, queue_offset,
       attempt, visible_at_ms, delivery, epoch, message_group_hash, client_id,
       failure AS detail, parked_at_ms AS at_ms
FROM store.leases
UNION ALL BY NAME
SELECT $position AS position, 'cursor' AS what, group_id, topic_id, queue_id, queue_offset
FROM store.cursors
UNION ALL BY NAME
SELECT $position AS position, 'behind' AS what, group_id, topic_id, queue_id,
       message_group_hash, queue_offset
FROM store.behind
UNION ALL BY NAME
SELECT $position AS position, 'quarantined_group' AS what, group_id, topic_id, queue_id,
       message_group_hash, queue_offset, quarantined_at_ms AS at_ms, failure AS detail
FROM store.quarantined_groups
UNION ALL BY NAME
SELECT $position AS position, 'scheduled' AS what, 1 AS topic_id, queue_id, queue_offset,
       deliver_at_ms AS visible_at_ms, target_topic_id
FROM store.scheduled
UNION ALL BY NAME
SELECT $position AS position, 'half' AS what, 2 AS topic_id, 0 AS queue_id, queue_offset,
       target_topic_id, message_id_hash AS message_group_hash, producer_group AS client_id,
       checks AS attempt, next_check_ms AS visible_at_ms, immunity_ms AS delivery
FROM store.halves;
