-- Dead letters that were opened again, and what became of each; keys of effects carried out.

-- name: dead_letter_origins
-- In: asked_places: queue_id, queue_offset, ordinal; $topic_id of a dead letter topic. Out: a row
-- for each place that is a dead letter: where it came from, with the topic's id and the hash of the
-- message group only if that very message is still there.
SELECT a.ordinal, d.origin_topic AS topic, d.origin_message_id AS message_id,
       d.origin_queue_id AS queue_id, d.origin_queue_offset AS queue_offset,
       q.topic_id, q.message_group_hash
FROM asked_places AS a
JOIN store.dead_letters AS d
    ON d.topic_id = $topic_id AND d.queue_id = a.queue_id AND d.queue_offset = a.queue_offset
LEFT JOIN store.topics AS t
    ON t.name = d.origin_topic
   AND (t.detail ->> '$.created_at_ms')::BIGINT <= d.dead_lettered_at_ms
LEFT JOIN store.consume_queue AS q
    ON q.topic_id = t.topic_id AND q.queue_id = d.origin_queue_id
   AND q.queue_offset = d.origin_queue_offset AND q.message_id = d.origin_message_id
ORDER BY a.ordinal;

-- name: insert_redrives
-- In: staged_events. Out: a row for each REDRIVEN; one whose message is no more is at its end.
INSERT INTO store.redrives
SELECT topic_id, queue_id, queue_offset, client_id AS redrive_id, group_id, detail ->> '$.topic',
       (detail ->> '$.topic_id')::INTEGER, (detail ->> '$.queue_id')::INTEGER,
       (detail ->> '$.queue_offset')::BIGINT, detail ->> '$.message_id', at_ms,
       detail ->> '$.outcome', CASE detail ->> '$.outcome' WHEN 'gone' THEN at_ms END,
       CASE detail ->> '$.outcome' WHEN 'gone' THEN 'gone' END, position, "row"
FROM staged_events WHERE kind = $REDRIVEN ORDER BY seq;

-- name: count_open_redrives
-- In: nothing. Out: how many redriven messages have no last outcome yet.
SELECT count(*) FROM store.redrives WHERE outcome NOT IN ('acked', 'dead_lettered', 'gone');

-- name: fold_redrives
-- In: staged_events. Out: net_redrives, what the events after its REDRIVEN made of each redriven
-- message that has no last outcome yet.
CREATE OR REPLACE TEMP TABLE net_redrives AS
WITH pending AS (
    SELECT * FROM store.redrives WHERE outcome NOT IN ('acked', 'dead_lettered', 'gone')
),
happened AS (
    SELECT p.topic_id, p.queue_id, p.queue_offset, e.seq, e.at_ms,
           CASE e.kind WHEN $ACK THEN 'acked' WHEN $DEAD_LETTER THEN 'dead_lettered'
                       WHEN $PARK THEN 'parked' ELSE 'retrying' END AS outcome
    FROM pending AS p JOIN staged_events AS e
        ON e.group_id = p.group_id AND e.topic_id = p.origin_topic_id
       AND e.queue_id = p.origin_queue_id AND e.queue_offset = p.origin_queue_offset
    WHERE (e.kind IN ($ACK, $DEAD_LETTER, $PARK, $RETRY, $EXPIRE)
           OR (e.kind = $LEASE AND e.attempt > 1))
      AND (e.position > p.position OR (e.position = p.position AND e."row" > p."row"))
    UNION ALL
    SELECT p.topic_id, p.queue_id, p.queue_offset, e.seq, e.at_ms, 'gone'
    FROM pending AS p JOIN staged_events AS e
        ON e.group_id = p.group_id AND e.topic_id = p.origin_topic_id
       AND e.queue_id = p.origin_queue_id
    WHERE e.kind = $RESET
      AND (e.position > p.position OR (e.position = p.position AND e."row" > p."row"))
    UNION ALL
    SELECT p.topic_id, p.queue_id, p.queue_offset, e.seq, e.at_ms, 'gone'
    FROM pending AS p JOIN staged_events AS e ON e.topic_id = p.origin_topic_id
    WHERE e.kind = $TOPIC_DELETED
    UNION ALL
    SELECT p.topic_id, p.queue_id, p.queue_offset, e.seq, e.at_ms, 'gone'
    FROM pending AS p JOIN staged_events AS e ON e.group_id = p.group_id
    WHERE e.kind = $GROUP_DELETED
)
SELECT topic_id, queue_id, queue_offset, arg_min(outcome, seq) AS first_outcome,
       coalesce(arg_min(outcome, seq) FILTER (outcome IN ('acked', 'dead_lettered', 'gone')),
                arg_max(outcome, seq)) AS outcome,
       coalesce(min(at_ms) FILTER (outcome IN ('acked', 'dead_lettered', 'gone')),
                max(at_ms)) AS at_ms
FROM happened GROUP BY topic_id, queue_id, queue_offset;

-- name: set_redrive_outcomes
-- In: net_redrives. Out: the outcomes it says; the first one of a message stays.
UPDATE store.redrives AS r SET
    outcome = n.outcome, outcome_at_ms = n.at_ms,
    first_outcome = coalesce(r.first_outcome, n.first_outcome)
FROM net_redrives AS n
WHERE r.topic_id = n.topic_id AND r.queue_id = n.queue_id AND r.queue_offset = n.queue_offset;

-- name: insert_effects
-- In: staged_events. Out: a row for each EFFECT.
INSERT INTO store.effects
SELECT group_id, detail, at_ms FROM staged_events WHERE kind = $EFFECT ORDER BY seq;

-- name: forget_effects
-- In: $at_ms; $usual_ms, the window of a group that has none. Out: no effects older than their
-- group remembers them.
DELETE FROM store.effects AS e USING store.groups AS g
WHERE e.group_id = g.group_id
  AND e.at_ms <= $at_ms
      - coalesce((g.detail ->> '$.idempotency_window_ms')::BIGINT, $usual_ms);

-- name: effects_seen
-- In: asked_keys: idempotency_key, ordinal; $group_id, $after_ms. Out: a row for each ordinal whose
-- key had an effect after that moment, and when the last one was.
SELECT a.ordinal, max(e.at_ms) AS seen_at_ms
FROM asked_keys AS a JOIN store.effects AS e
    ON e.idempotency_key = a.idempotency_key
WHERE e.group_id = $group_id AND e.at_ms > $after_ms
GROUP BY a.ordinal;
