-- The Parquet files of the history: which ones queries read, how they are written, how they go.

-- name: allow_folders
-- In: "{folders}", a list of texts. Out: files are read and written below them alone.
SET allowed_directories = "{folders}";

-- name: forbid_files
-- In: nothing. Out: no files but those in allowed folders, on any connection.
SET enable_external_access = false;

-- name: history_in_use
-- In: nothing. Out: folder, path and first position of the files of the history that count. A row
-- without a folder has the position from which files have all columns.
SELECT 'events' AS folder, path, from_position AS first_position FROM store.event_segments
UNION ALL
SELECT 'snapshots', path, position FROM store.snapshots WHERE path IS NOT NULL
UNION ALL
SELECT NULL, NULL, columns_since FROM store.made_by WHERE columns_since IS NOT NULL
ORDER BY first_position, path;

-- name: use_event_files
-- In: $files. Out: the variable event_files: event Parquet, and a file without events.
SET VARIABLE event_files = $files;

-- name: use_snapshot_files
-- In: $files. Out: the variable snapshot_files: the snapshots that are kept, and one of nothing.
SET VARIABLE snapshot_files = $files;

-- name: use_older_columns
-- In: $differ. Out: the variable columns_differ: some of these files lack columns that were added
-- since. DuckDB then looks into all of them before it reads any, which takes twice as long.
SET VARIABLE columns_differ = $differ;

-- name: begin_snapshots
-- In: nothing. Out: the history of a new home is known from its beginning, where there was nothing.
INSERT INTO store.snapshots
SELECT 0, 0, NULL, 0, 0 WHERE NOT EXISTS (FROM store.snapshots);

-- name: no_events
-- In: nothing. Out: none, with the columns of event Parquet.
SELECT * FROM store.events LIMIT 0;

-- name: events_before
-- In: $to_position. Out: the events before it, so that those of a message lie together.
SELECT * FROM store.events WHERE position < $to_position
ORDER BY topic_id, queue_id, queue_offset, position, "row";

-- name: events_of_files
-- In: $files, a list of paths. Out: their events, so that those of a message lie together. Older
-- files do not have the columns that were added since.
SELECT * FROM read_parquet($files, union_by_name = true, hive_partitioning = false)
ORDER BY topic_id, queue_id, queue_offset, position, "row";

-- name: events_since
-- In: $position. Out: how many events there are from there on; a file counts as a whole.
SELECT coalesce((
           SELECT sum("rows") FROM store.event_segments WHERE to_position > $position
       ), 0)::BIGINT + count(*)
FROM store.events
WHERE position >= greatest(
    $position, (SELECT coalesce(max(to_position), 0) FROM store.event_segments)
);

-- name: kept_history
-- In: nothing. Out: the snapshots, oldest first.
SELECT position, at_ms, path FROM store.snapshots ORDER BY position;

-- name: event_files
-- In: nothing. Out: registered event Parquet, oldest first.
SELECT path, from_position, to_position, "rows" FROM store.event_segments ORDER BY from_position;

-- name: insert_snapshots
-- In: staged_events. Out: a row for each SNAPSHOT, but those before the last one it says is kept.
INSERT INTO store.snapshots
SELECT (detail ->> '$.position')::BIGINT, (detail ->> '$.taken_at_ms')::BIGINT, detail ->> '$.path',
       (detail ->> '$.rows')::BIGINT, (detail ->> '$.bytes')::BIGINT
FROM staged_events WHERE kind = $SNAPSHOT AND detail ->> '$.path' IS NOT NULL ORDER BY seq;

-- name: forget_snapshots
-- In: staged_events. Out: no snapshots before the position from which a SNAPSHOT keeps history.
DELETE FROM store.snapshots
WHERE position < (
    SELECT max((detail ->> '$.kept_from')::BIGINT) FROM staged_events WHERE kind = $SNAPSHOT
);

-- name: keep_expired_heads
-- In: staged_events. Out: how far queues went, by what is about to expire of the kept history.
INSERT INTO store.expired_heads
SELECT q.topic_id, q.queue_id, q.stored_at_ms, max(q.queue_offset) + 1
FROM store.consume_queue AS q JOIN (
    SELECT topic_id, queue_id, max(queue_offset) AS before
    FROM staged_events WHERE kind = $EXPIRED GROUP BY topic_id, queue_id
) AS e ON e.topic_id = q.topic_id AND e.queue_id = q.queue_id AND e.before > q.queue_offset
WHERE q.stored_at_ms >= (SELECT min(at_ms) FROM store.snapshots)
GROUP BY q.topic_id, q.queue_id, q.stored_at_ms;

-- name: forget_expired_heads
-- In: nothing. Out: none of before the kept history.
DELETE FROM store.expired_heads WHERE stored_at_ms < (SELECT min(at_ms) FROM store.snapshots);

-- name: forget_deleted_messages
-- In: nothing. Out: no messages of topics that were deleted before the kept history.
DELETE FROM store.consume_queue
WHERE topic_id IN (
    SELECT topic_id FROM store.deleted_names
    WHERE deleted_at_ms <= (SELECT min(at_ms) FROM store.snapshots)
);

-- name: forget_deleted_names
-- In: nothing. Out: no names that were deleted before the kept history.
DELETE FROM store.deleted_names
WHERE deleted_at_ms <= (SELECT min(at_ms) FROM store.snapshots);

-- name: note_deleted_topics
-- In: staged_events. Out: the names of the topics that it deletes.
INSERT INTO store.deleted_names
SELECT t.topic_id, NULL, t.name, (t.detail ->> '$.created_at_ms')::BIGINT, n.at_ms, t.detail
FROM store.topics AS t JOIN staged_events AS n USING (topic_id) WHERE n.kind = $TOPIC_DELETED;

-- name: note_deleted_groups
-- In: staged_events. Out: the names of the consumer groups that it deletes.
INSERT INTO store.deleted_names
SELECT NULL, g.group_id, g.name, (g.detail ->> '$.created_at_ms')::BIGINT, n.at_ms, g.detail
FROM store.groups AS g JOIN staged_events AS n USING (group_id) WHERE n.kind = $GROUP_DELETED;

-- name: remove_event_segments
-- In: staged_events. Out: no rows of files that an EVENT_SEGMENTS_REPLACED removes.
DELETE FROM store.event_segments
WHERE path IN (
    SELECT unnest((detail -> '$.removed')::VARCHAR[])
    FROM staged_events WHERE kind = $EVENT_SEGMENTS_REPLACED
);

-- name: insert_replacing_event_segments
-- In: staged_events. Out: a row for each file that an EVENT_SEGMENTS_REPLACED adds.
INSERT INTO store.event_segments
SELECT detail ->> '$.path', (detail ->> '$.from_position')::BIGINT,
       (detail ->> '$.to_position')::BIGINT, (detail ->> '$.rows')::BIGINT
FROM staged_events
WHERE kind = $EVENT_SEGMENTS_REPLACED AND detail ->> '$.path' IS NOT NULL ORDER BY seq;
