-- Sinks: what dispatch does with their events, and what the broker asks of them.

-- name: insert_sink_files
-- In: staged_events. Out: a row for each SINK_FILE.
INSERT INTO store.sink_files
SELECT group_id, detail ->> '$.path', (detail ->> '$.rows')::BIGINT, (detail ->> '$.bytes')::BIGINT,
       detail ->> '$.partition',
       from_json(detail -> '$.offsets', '[{"queue_id":"INTEGER","base":"BIGINT","end":"BIGINT"}]'),
       epoch, at_ms, position, "row", delivery, NULL, NULL
FROM staged_events WHERE kind = $SINK_FILE ORDER BY seq;

-- name: insert_replacing_files
-- In: staged_events. Out: a row for each file that a SINK_REPLACED adds.
INSERT INTO store.sink_files
SELECT group_id, file.path, file."rows", file.bytes, file."partition", file.offsets, 0, at_ms,
       position, ordinal - 1, version, NULL, NULL
FROM (
    SELECT group_id, at_ms, position, delivery AS version, seq,
           unnest(files) AS file, generate_subscripts(files, 1) AS ordinal
    FROM (
        SELECT group_id, at_ms, position, delivery, seq,
               from_json(detail -> '$.added', '[{"path":"VARCHAR","rows":"BIGINT",
                   "bytes":"BIGINT","partition":"VARCHAR",
                   "offsets":[{"queue_id":"INTEGER","base":"BIGINT","end":"BIGINT"}]}]') AS files
        FROM staged_events WHERE kind = $SINK_REPLACED
    )
)
ORDER BY seq, ordinal;

-- name: remove_sink_files
-- In: staged_events. Out: files that a SINK_REPLACED removes do not count any more.
UPDATE store.sink_files AS s SET removed_version = n.version, removed_at_ms = n.at_ms
FROM (
    SELECT group_id, delivery AS version, at_ms, unnest(detail ->> '$.removed[*]') AS path
    FROM staged_events WHERE kind = $SINK_REPLACED
) AS n
WHERE s.group_id = n.group_id AND s.path = n.path AND s.removed_version IS NULL;

-- name: insert_sink_replacements
-- In: staged_events. Out: a row for each SINK_REPLACED.
INSERT INTO store.sink_replacements
SELECT group_id, client_id AS replacement_id, delivery AS version, at_ms, detail ->> '$.reason',
       detail ->> '$.added[*].path', detail ->> '$.removed[*]'
FROM staged_events WHERE kind = $SINK_REPLACED ORDER BY seq;

-- name: forget_sink_files
-- In: $before_ms. Out: no files that were removed before then.
DELETE FROM store.sink_files WHERE removed_at_ms < $before_ms;

-- name: forget_all_sink_files
-- In: nothing. Out: no files of sinks: a fork has none.
DELETE FROM store.sink_files;

-- name: forget_all_sink_replacements
-- In: nothing. Out: no replacements in sinks.
DELETE FROM store.sink_replacements;

-- name: state_sinks
-- In: nothing. Out: a row a group with a sink: its version, and that of its last replacement.
SELECT group_id, max(version) AS version, max(replaced) AS replaced
FROM (
    SELECT group_id, version, 0 AS replaced FROM store.sink_files
    UNION ALL
    SELECT group_id, version, version FROM store.sink_replacements
)
GROUP BY group_id ORDER BY group_id;

-- name: sink_version
-- In: $group_id. Out: the version of its sink, and that of its last replacement; 0 for none.
SELECT coalesce(max(version), 0)::BIGINT AS version, coalesce(max(replaced), 0)::BIGINT AS replaced
FROM (
    SELECT version, 0 AS replaced FROM store.sink_files WHERE group_id = $group_id
    UNION ALL
    SELECT version, version FROM store.sink_replacements WHERE group_id = $group_id
);

-- name: sink_files
-- In: $group_id. Out: schema.SINK_FILE + epoch, at_ms, version, in the order they came to count.
SELECT path, "rows", bytes, "partition", offsets, epoch, at_ms, version
FROM store.sink_files WHERE group_id = $group_id AND removed_version IS NULL
ORDER BY version, "row";

-- name: removed_sink_files
-- In: $group_id. Out: those of its files that were replaced, as sink_files, and when.
SELECT path, "rows", bytes, "partition", offsets, epoch, at_ms, version, removed_version,
       removed_at_ms
FROM store.sink_files WHERE group_id = $group_id AND removed_version IS NOT NULL
ORDER BY removed_version, version, "row";

-- name: sink_replacement
-- In: $group_id, $replacement_id. Out: what a replacement of that id was answered, if there is one.
SELECT version, added, removed FROM store.sink_replacements
WHERE group_id = $group_id AND replacement_id = $replacement_id;
