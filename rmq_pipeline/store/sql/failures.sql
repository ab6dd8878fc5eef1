-- Message groups that were given up.

-- name: fold_condemned
-- In: staged_events. Out: net_condemned, the last CONDEMN or PARDON of each message group.
CREATE OR REPLACE TEMP TABLE net_condemned AS
SELECT kind, group_id, topic_id, queue_id, message_group_hash, queue_offset, at_ms, detail
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind IN ($CONDEMN, $PARDON)
    GROUP BY group_id, topic_id, queue_id, message_group_hash
);

-- name: delete_condemned
-- In: net_condemned. Out: the rows it replaces or removes are gone.
DELETE FROM store.condemned AS c USING net_condemned AS n
WHERE c.group_id = n.group_id AND c.topic_id = n.topic_id AND c.queue_id = n.queue_id
  AND c.message_group_hash = n.message_group_hash;

-- name: insert_condemned
-- In: net_condemned. Out: the rows that it leaves.
INSERT INTO store.condemned
SELECT group_id, topic_id, queue_id, message_group_hash, queue_offset, at_ms, detail
FROM net_condemned WHERE kind = $CONDEMN;

-- name: reset_condemned
-- In: staged_events, all RESET. Out: no message groups given up in those queues.
DELETE FROM store.condemned AS c USING staged_events AS n
WHERE c.group_id = n.group_id AND c.topic_id = n.topic_id AND c.queue_id = n.queue_id;
