-- Generated from store/state_tables.py by `make sql`; do not edit.

-- name: create_groups
-- In: nothing. Out: the table.
-- A row: a consumer group that exists; detail is its JSON.
-- Written by: GROUP: the last one of a key.
-- Goes: with GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.groups (
    group_id INTEGER, name VARCHAR, detail VARCHAR
);

-- name: fold_groups
-- In: staged_events. Out: net_groups, the last event of each key.
CREATE OR REPLACE TEMP TABLE net_groups AS
SELECT kind, group_id, detail ->> '$.name' AS name, detail
FROM staged_events
WHERE seq IN (
    SELECT max(seq) FROM staged_events WHERE kind = $GROUP
    GROUP BY group_id
);

-- name: delete_groups
-- In: net_groups. Out: the rows that it replaces or removes are deleted.
DELETE FROM store.groups AS t USING net_groups AS n
WHERE t.group_id = n.group_id;

-- name: insert_groups
-- In: net_groups. Out: the rows that stay.
INSERT INTO store.groups BY NAME
SELECT group_id, name, detail
FROM net_groups;

-- name: state_groups
-- In: nothing. Out: what recovery reads.
SELECT group_id, detail
FROM store.groups ORDER BY group_id;
