-- Statements of a commit log in PostgreSQL. Parameters are psycopg's. Those of log_append, which is
-- prepared, are numbers.

-- name: log_server
-- Returns what decides whether commits of this session last, and whether the tables exist. A query
-- of the catalog sees tables that another session has just made; to_regclass may not.
SELECT
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('synchronous_standby_names') AS standbys,
    current_setting('fsync') AS fsync,
    pg_is_in_recovery() AS is_standby,
    EXISTS (
        SELECT 1 FROM pg_catalog.pg_tables
        WHERE schemaname = 'rmq_log' AND tablename = 'store'
    ) AS is_made,
    current_database() AS database;

-- name: log_session
-- Sets limits in ms, so that a stopped process holds no lock for long, and keeps the checked
-- durability if the server's settings change. Takes timeout.
SELECT
    set_config('synchronous_commit', current_setting('synchronous_commit'), false) AS commits,
    set_config('idle_in_transaction_session_timeout', %(timeout)s, false) AS idle,
    set_config('lock_timeout', %(timeout)s, false) AS locks,
    set_config('search_path', 'rmq_log', false) AS path;

-- name: log_lock_making
-- Keeps two brokers from making the tables at the same time, until the transaction ends.
SELECT pg_advisory_xact_lock(7264116250718497089);

-- name: log_begin_store
-- Takes format, home_format, id, seed.
INSERT INTO rmq_log.store (format, home_format, id, seed, epoch, writer)
VALUES (%(format)s, %(home_format)s, %(id)s, %(seed)s, 0, '')
ON CONFLICT DO NOTHING;

-- name: log_begin_lease
-- Nobody holds it.
INSERT INTO rmq_log.lease (writer, holder, renewed_at, lease_ms)
VALUES ('', '', '-infinity', 0)
ON CONFLICT DO NOTHING;

-- name: log_store
-- Returns format, home_format, id, seed, epoch and writer of the store.
SELECT format, home_format, id, seed, epoch, writer
FROM rmq_log.store;

-- name: log_lock_store
-- Returns writer and home_format; until the transaction ends no broker appends or begins to lead.
SELECT writer, home_format
FROM rmq_log.store
FOR UPDATE;

-- name: log_held_lease
-- Returns writer, holder, length, time of the last renewal and whether the lease runs.
SELECT
    writer,
    holder,
    lease_ms,
    renewed_at::text AS renewed_at,
    writer <> '' AND clock_timestamp() < renewed_at + lease_ms * interval '1 millisecond' AS runs
FROM rmq_log.lease;

-- name: log_lead
-- Takes writer, home_format; returns the new epoch.
UPDATE rmq_log.store
SET
    epoch = epoch + 1,
    writer = %(writer)s,
    home_format = greatest(home_format, %(home_format)s)
RETURNING epoch;

-- name: log_take_lease
-- Takes writer, holder, lease_ms.
UPDATE rmq_log.lease
SET
    writer = %(writer)s,
    holder = %(holder)s,
    lease_ms = %(lease_ms)s,
    renewed_at = clock_timestamp();

-- name: log_renew_lease
-- Takes writer; returns a row if that writer still leads.
UPDATE rmq_log.lease
SET renewed_at = clock_timestamp()
WHERE
    writer = %(writer)s
    AND EXISTS (SELECT 1 FROM rmq_log.store AS leader WHERE leader.writer = %(writer)s)
RETURNING renewed_at::text;

-- name: log_release_lease
-- Takes writer.
UPDATE rmq_log.lease
SET writer = '', renewed_at = '-infinity'
WHERE writer = %(writer)s;

-- name: log_append
-- Takes 1 position, 2 length, 3 crc, 4 epoch, 5 frame. Inserts nothing if the epoch is over: the
-- row lock waits for a successor that is taking over.
WITH leader AS (
    SELECT epoch, writer
    FROM rmq_log.store
    WHERE epoch = $4::bigint
    FOR SHARE
)

INSERT INTO rmq_log.frames (position, length, epoch, writer, crc, frame)
SELECT $1::bigint, $2::bigint, epoch, writer, $3::bigint, $5::bytea
FROM leader;

-- name: log_at
-- Takes position; returns writer, length and crc of the frame there.
SELECT writer, length, crc
FROM rmq_log.frames
WHERE position = %(position)s;

-- name: log_last
-- Returns position, length and crc of the last frame.
SELECT position, length, crc
FROM rmq_log.frames
ORDER BY position DESC
LIMIT 1;

-- name: log_headers
-- Takes start, limit; returns position, length and crc of the frames from start on.
SELECT position, length, crc
FROM rmq_log.frames
WHERE position >= %(start)s
ORDER BY position
LIMIT %(limit)s;

-- name: log_frames
-- Takes first, last; returns position, crc and bytes of the frames that start there and between.
SELECT position, crc, frame
FROM rmq_log.frames
WHERE position BETWEEN %(first)s AND %(last)s
ORDER BY position;

-- name: log_layouts
-- Returns start, version and fingerprint of the layouts.
SELECT start, version, fingerprint
FROM rmq_log.layouts
ORDER BY start;

-- name: log_put_layout
-- Takes start, version, fingerprint, epoch; stores nothing if the epoch is over. A layout at the
-- same start has no frame yet: it is of a leader that died before its first one.
INSERT INTO rmq_log.layouts (start, version, fingerprint)
SELECT %(start)s, %(version)s, %(fingerprint)s
FROM rmq_log.store
WHERE epoch = %(epoch)s
FOR SHARE
ON CONFLICT (start) DO UPDATE SET
version = excluded.version, fingerprint = excluded.fingerprint;

-- name: log_trim
-- Takes start, before, most_bytes, most_frames, writer; deletes the first frames from start on that
-- end at or before that position, at least one, up to both limits. Returns whether that writer
-- leads, and the position of the last frame that went, NULL if none did. The row lock waits for a
-- successor that is taking over.
WITH leader AS (
    SELECT one
    FROM rmq_log.store
    WHERE writer = %(writer)s
    FOR SHARE
),

oldest AS (
    SELECT position, length
    FROM rmq_log.frames
    WHERE
        position BETWEEN %(start)s AND %(before)s - 1
        AND position + length <= %(before)s
        AND EXISTS (SELECT 1 FROM leader)
    ORDER BY position
    LIMIT %(most_frames)s
),

chosen AS (
    SELECT position, sum(length) OVER (ORDER BY position) - length AS bytes_before
    FROM oldest
),

gone AS (
    DELETE FROM rmq_log.frames
    USING chosen
    WHERE frames.position = chosen.position AND chosen.bytes_before < %(most_bytes)s
    RETURNING frames.position
)

SELECT
    EXISTS (SELECT 1 FROM leader) AS leads,
    (SELECT max(position) FROM gone) AS last;

-- name: log_file
-- Takes name; returns its content.
SELECT content
FROM rmq_log.files
WHERE name = %(name)s;

-- name: log_put_file
-- Takes name, content, writer; stores nothing if another writer leads. Not the epoch: the thread of
-- the appends may be taking a new one.
INSERT INTO rmq_log.files (name, content)
SELECT %(name)s, %(content)s
FROM rmq_log.store
WHERE writer = %(writer)s
FOR SHARE
ON CONFLICT (name) DO UPDATE SET content = excluded.content;
