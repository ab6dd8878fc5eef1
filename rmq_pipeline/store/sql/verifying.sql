-- Reading all of state.duckdb, to see that it can be read.

-- name: tables_to_verify
-- In: nothing. Out: a row a table: its schema and its name.
SELECT schema_name, table_name FROM duckdb_tables() WHERE NOT temporary ORDER BY ALL;

-- name: read_whole_table
-- In: "{table}". Out: rows, and a number for which every value of every column was read.
SELECT count(*) AS n, bit_xor(hash(t)) AS digest FROM "{table}" AS t;

-- name: registered_files
-- In: nothing. Out: a row a file that counts: its path in the home, or below the archive's root.
SELECT path FROM store.segments
UNION ALL SELECT path FROM store.event_segments
UNION ALL SELECT path FROM store.snapshots WHERE path IS NOT NULL;

-- name: sealed_position
-- In: nothing. Out: one row: all earlier frames of the log are in files that count.
SELECT coalesce(max(to_position), 0) AS sealed_to FROM store.event_segments;
