-- The tables of state.duckdb, but for the state tables: store/state_tables.py declares those.
-- Dispatch derives all tables from the commit log, in the same transaction as the log position they
-- stand for. None has an index: rows are found by the ranges that DuckDB keeps for each block,
-- and a table changes by DELETE and INSERT of whole batches, which costs less than half of what
-- keeping a primary key does.
-- Offsets are half-open; times are ms since 1970; "row" is the row inside the section at position.

CREATE SCHEMA IF NOT EXISTS store;

-- columns_since: the log position from which Parquet files of the history have all columns.
-- A row: a digest of what made the tables and views. There is exactly one.
-- Written by: opening, when it is another.
-- Goes: never.
CREATE TABLE IF NOT EXISTS store.made_by (made_by VARCHAR, columns_since BIGINT);

-- A row: how far dispatch has come. There is exactly one.
-- Written by: every dispatch transaction.
-- Goes: never.
CREATE TABLE IF NOT EXISTS store.reached (
    dispatched BIGINT, last_at_ms BIGINT, next_topic_id INTEGER, next_group_id INTEGER
);

-- A row: a kind of event and its name.
-- Written by: opening, from store/events.py.
-- Goes: at the next opening.
CREATE TABLE IF NOT EXISTS store.kinds (kind SMALLINT, name VARCHAR);

-- target_topic_id is negative once the message was recalled.
-- zstd is told because trying all that there is for the ids takes as long as all else.
-- A row: a message without its body and properties, and where in the commit log it lies.
-- Written by: every message.
-- Goes: when its offset expires, or when the kept history begins later than its topic ended.
CREATE TABLE IF NOT EXISTS store.consume_queue (
    topic_id INTEGER, queue_id INTEGER, queue_offset BIGINT,
    position BIGINT, "row" INTEGER, message_group_hash BIGINT, tag_hash BIGINT,
    message_id VARCHAR USING COMPRESSION zstd, tag VARCHAR, keys VARCHAR[], message_group VARCHAR,
    born_at_ms BIGINT, stored_at_ms BIGINT, deliver_at_ms BIGINT, target_topic_id INTEGER
);

-- A row: a half message that was ended; resolution is the kind of the event.
-- Written by: HALF_COMMITTED, HALF_ROLLED_BACK, HALF_GIVEN_UP.
-- Goes: with the event of another half message, limits.TRANSACTION_REMEMBERED_MS later: until then
-- an end that is asked for again is answered as the first one was.
CREATE TABLE IF NOT EXISTS store.ended_halves (
    queue_offset BIGINT, message_id_hash BIGINT, producer_group VARCHAR, resolution SMALLINT,
    at_ms BIGINT
);

-- A row: where a message of a dead letter topic came from, as its properties say.
-- Written by: every message of a topic named %DLQ%….
-- Goes: with EXPIRED, or with TOPIC_DELETED.
CREATE TABLE IF NOT EXISTS store.dead_letters (
    topic_id INTEGER, queue_id INTEGER, queue_offset BIGINT,
    origin_topic VARCHAR, origin_message_id VARCHAR, origin_queue_id INTEGER,
    origin_queue_offset BIGINT, reason VARCHAR, attempts INTEGER,
    error_type VARCHAR, signature VARCHAR, run_id VARCHAR, dead_lettered_at_ms BIGINT,
    properties MAP(VARCHAR, VARCHAR)
);

-- A row: a dead letter that was opened again, and its message's outcomes (waiting: none yet).
-- Written by: REDRIVEN; then what ends or fails a delivery of the message, or takes it away.
-- Goes: when the dead letter's offset expires.
CREATE TABLE IF NOT EXISTS store.redrives (
    topic_id INTEGER, queue_id INTEGER, queue_offset BIGINT, redrive_id VARCHAR,
    group_id INTEGER, origin_topic VARCHAR, origin_topic_id INTEGER, origin_queue_id INTEGER,
    origin_queue_offset BIGINT, message_id VARCHAR, redriven_at_ms BIGINT,
    outcome VARCHAR, outcome_at_ms BIGINT, first_outcome VARCHAR, position BIGINT, "row" INTEGER
);

-- A row: an effect of a consumer group that was carried out, by its idempotency key.
-- Written by: EFFECT.
-- Goes: when it is older than its group's idempotency_window_ms, or with GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.effects (
    group_id INTEGER, idempotency_key VARCHAR, at_ms BIGINT
);

-- Each version of a sink is one settle or one replacement.
-- A row: a file that counts in the sink of a group, or did until removed_version.
-- Written by: SINK_FILE, SINK_REPLACED.
-- Goes: a removed one after a time, with a SINK_REPLACED; with GROUP_DELETED.
CREATE TABLE IF NOT EXISTS store.sink_files (
    group_id INTEGER, path VARCHAR, "rows" BIGINT, bytes BIGINT, "partition" VARCHAR,
    offsets STRUCT(queue_id INTEGER, base BIGINT, "end" BIGINT)[],
    epoch BIGINT, at_ms BIGINT, position BIGINT, "row" INTEGER,
    version BIGINT, removed_version BIGINT, removed_at_ms BIGINT
);

-- A row: files that came to count instead of others, and under which id; the lists are paths.
-- Written by: SINK_REPLACED.
-- Goes: with GROUP_DELETED: a replacement that is asked for again is answered as the first was.
CREATE TABLE IF NOT EXISTS store.sink_replacements (
    group_id INTEGER, replacement_id VARCHAR, version BIGINT, at_ms BIGINT, reason VARCHAR,
    added VARCHAR[], removed VARCHAR[]
);

-- A row: a snapshot of the state at a log position, or (path null) that there was nothing yet.
-- Written by: opening a new home, SNAPSHOT.
-- Goes: with a SNAPSHOT that keeps history from later on.
CREATE TABLE IF NOT EXISTS store.snapshots (
    position BIGINT, at_ms BIGINT, path VARCHAR, "rows" BIGINT, bytes BIGINT
);

-- A row: how far a queue went in one millisecond, in which messages were stored that have expired.
-- Written by: EXPIRED.
-- Goes: when the kept history begins later.
CREATE TABLE IF NOT EXISTS store.expired_heads (
    topic_id INTEGER, queue_id INTEGER, stored_at_ms BIGINT, max_offset BIGINT
);

-- A row: a topic or a consumer group that was deleted; the other id is null.
-- Written by: TOPIC_DELETED, GROUP_DELETED.
-- Goes: when the kept history begins later, and the topic's messages with it.
CREATE TABLE IF NOT EXISTS store.deleted_names (
    topic_id INTEGER, group_id INTEGER, name VARCHAR, created_at_ms BIGINT, deleted_at_ms BIGINT,
    detail VARCHAR
);

-- A row: an event, as schema.EVENT has it.
-- Written by: every event.
-- Goes: when it is in event Parquet.
CREATE TABLE IF NOT EXISTS store.events (
    position BIGINT, "row" INTEGER, kind SMALLINT, at_ms BIGINT,
    group_id INTEGER, topic_id INTEGER, queue_id INTEGER, queue_offset BIGINT,
    attempt INTEGER, visible_at_ms BIGINT, delivery BIGINT, epoch BIGINT,
    message_group_hash BIGINT, client_id VARCHAR, detail VARCHAR
);

-- A row: a table of keyed state, the view that shows it, and its exact types as an Arrow schema.
-- Written by: the first keyed state of a (group, topic), and each with other columns.
-- Goes: with TOPIC_DELETED, GROUP_DELETED, and the table and the view with it.
CREATE TABLE IF NOT EXISTS store.keyed_tables (
    group_id INTEGER, topic_id INTEGER, table_name VARCHAR, view_name VARCHAR, arrow_schema BLOB
);

-- A table: the keyed state of a (group, topic), keyed.state_<group_id>_<topic_id>, a row for each
-- message group: message_group, message_group_hash, and the consumer's own typed columns.
-- Written by: sections of keyed state; a column that is new in them is added.
-- Goes: a row when its last state says removed, the table as keyed_tables says.
CREATE SCHEMA IF NOT EXISTS keyed;
