-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_topics
-- In: nothing. Out: the table.
-- A row: a topic that exists; detail is its JSON.
-- Written by: TOPIC: the last one of a key.
-- Goes: with TOPIC_DELETED.
CREATE TABLE IF NOT EXISTS store.topics (
    topic_id INTEGER, name VARCHAR, detail VARCHAR
);

-- name: fold_topics
-- In: staged_events. Out: net_topics, the last event of each key.
CREATE OR REPLACE TEMP TABLE net_topics AS
SELECT kind, topic_id, detail ->> '$.name' AS name, detail
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind = $TOPIC
    GROUP BY topic_id
);

-- name: delete_topics
-- In: net_topics. Out: the rows that it replaces or removes are deleted.
DELETE FROM store.topics AS t USING net_topics AS n
WHERE t.topic_id = n.topic_id;

-- name: insert_topics
-- In: net_topics. Out: the rows that stay.
INSERT INTO store.topics BY NAME
SELECT topic_id, name, detail
FROM net_topics;

-- name: state_topics
-- In: nothing. Out: what recovery reads.
SELECT topic_id, detail
FROM store.topics ORDER BY topic_id;
