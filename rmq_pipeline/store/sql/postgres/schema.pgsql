-- The tables of a commit log in PostgreSQL, all in the schema rmq_log. This script runs in the
-- transaction that finds them missing.
CREATE SCHEMA IF NOT EXISTS rmq_log;

-- One row: which log this is, and who may append to it. format is that of these tables,
-- home_format the highest one of the homes that led.
-- Written by a broker that begins to lead; the row lock orders it and appends of its predecessor.
-- Never goes.
CREATE TABLE rmq_log.store (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    format integer NOT NULL,
    home_format integer NOT NULL,
    id text NOT NULL,
    seed bigint NOT NULL,
    epoch bigint NOT NULL,
    writer text NOT NULL
);

-- One row: until when another broker should not try to lead. It makes nothing safe.
-- Written by the leader several times in each lease.
-- Never goes.
CREATE TABLE rmq_log.lease (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    writer text NOT NULL,
    holder text NOT NULL,
    renewed_at timestamptz NOT NULL,
    lease_ms bigint NOT NULL
);

-- A row is a frame of the log, as the log's files have it; crc is that of the whole frame.
-- Written by the leader. The primary key admits one frame at a position.
-- Goes by trim.
CREATE TABLE rmq_log.frames (
    position bigint PRIMARY KEY,
    length bigint NOT NULL,
    epoch bigint NOT NULL,
    writer text NOT NULL,
    crc bigint NOT NULL,
    frame bytea NOT NULL
);

-- A row says how to read the frames from a position on: the version and the fingerprint of the
-- columns in the header of a log file.
-- Written by a leader before its first frame, if they differ from those of the frames before.
-- Never goes.
CREATE TABLE rmq_log.layouts (
    start bigint PRIMARY KEY,
    version integer NOT NULL,
    fingerprint bytea NOT NULL
);

-- A row is a file of the home that the next leader needs, such as the access rules.
-- Written by the leader when the file changes.
-- Never goes.
CREATE TABLE rmq_log.files (
    name text PRIMARY KEY,
    content bytea NOT NULL
);

-- Frames of messages do not compress well, and trying takes longer than writing.
ALTER TABLE rmq_log.frames ALTER COLUMN frame SET STORAGE EXTERNAL;
