-- Queries that DuckDB may not end when it is interrupted: what they read is copied to a process.

-- name: parsed_query
-- In: $sql. Out: its tree as JSON; "error" is true where it is no SELECT or does not parse.
SELECT json_serialize_sql($sql);

-- name: all_of
-- In: "{source}", a view or a call of a macro. Out: its rows.
SELECT * FROM "{source}";

-- name: columns_of
-- In: "{query}", a SELECT in brackets. Out: its columns, and no rows.
SELECT * FROM "{query}" LIMIT 0;

-- name: copied_rows
-- In: "{columns}", "{source}", and "{condition}" that its rows fulfil. Out: these rows.
SELECT "{columns}" FROM "{source}" AS "{alias}" WHERE "{condition}";

-- name: create_copy
-- In: "{table}"; "{typed}": a null of its type for each column. Out: an empty table in the process.
CREATE TABLE "{table}" AS SELECT "{typed}" LIMIT 0;

-- name: fill_copy
-- In: incoming: the rows; "{table}". Out: they are in the table.
INSERT INTO "{table}" SELECT * FROM incoming;

-- name: create_copied_macro
-- In: "{macro}" and its "{parameter}"; "{branches}": copied_branch of each call, in parentheses.
-- Out: the process has a macro that gives the copied rows of these calls.
CREATE MACRO "{macro}"("{parameter}") AS TABLE SELECT * FROM "{branches}";

-- name: copied_branch
-- In: "{table}"; "{parameter}"; "{argument}" of the call; "{former}": no earlier call has the same.
-- Out: the rows of the table, when it is this call that is asked for.
SELECT * FROM "{table}"
WHERE ("{parameter}")::VARCHAR IS NOT DISTINCT FROM ("{argument}")::VARCHAR AND "{former}";
