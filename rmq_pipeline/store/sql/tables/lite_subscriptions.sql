-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_lite_subscriptions
-- In: nothing. Out: the table.
-- A row: the lite topics that a client of a group has subscribed to, a JSON list of names.
-- Written by: LITE_SUBSCRIPTION: the last one of a key.
-- Goes: with TOPIC_DELETED, GROUP_DELETED, or without lite_topics <> '[]'.
CREATE TABLE IF NOT EXISTS store.lite_subscriptions (
    group_id INTEGER, topic_id INTEGER, client_id VARCHAR, lite_topics VARCHAR
);

-- name: fold_lite_subscriptions
-- In: staged_events. Out: net_lite_subscriptions, the last event of each key.
CREATE OR REPLACE TEMP TABLE net_lite_subscriptions AS
SELECT kind, group_id, topic_id, client_id, detail AS lite_topics
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind = $LITE_SUBSCRIPTION
    GROUP BY group_id, topic_id, client_id
);

-- name: delete_lite_subscriptions
-- In: net_lite_subscriptions. Out: the rows that it replaces or removes are deleted.
DELETE FROM store.lite_subscriptions AS t USING net_lite_subscriptions AS n
WHERE t.group_id = n.group_id AND t.topic_id = n.topic_id AND t.client_id = n.client_id;

-- name: insert_lite_subscriptions
-- In: net_lite_subscriptions. Out: the rows that stay.
INSERT INTO store.lite_subscriptions BY NAME
SELECT group_id, topic_id, client_id, lite_topics
FROM net_lite_subscriptions
WHERE lite_topics <> '[]';

-- name: state_lite_subscriptions
-- In: nothing. Out: what recovery reads.
SELECT group_id, topic_id, client_id, lite_topics
FROM store.lite_subscriptions ORDER BY group_id, topic_id, client_id;
