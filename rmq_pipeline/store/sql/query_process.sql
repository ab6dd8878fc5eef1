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

-- name: written_query
-- In: $tree, as parsed_query returns it. Out: the query as text.
SELECT json_deserialize_sql($tree);

-- name: places_of_use
-- In: "{query}", a SELECT of places in brackets, or nulls by an outer join; "{most}". Out: some.
SELECT * FROM "{query}" WHERE topic_id IS NOT NULL LIMIT "{most}";

-- name: messages_at_places
-- In: wanted_places, a table of places. Out: a source of the rows of messages at these.
(SELECT m.* FROM main.messages AS m SEMI JOIN wanted_places USING (topic, queue_id, queue_offset));

-- name: create_bodies
-- In: nothing. Out: the process has a place for what stands for messages with bodies.
CREATE SCHEMA IF NOT EXISTS bodies;

-- name: create_messages_with_bodies
-- In: "{bodies}": columns of read_bodies, as b, that messages lacks. Out: messages with them.
CREATE VIEW bodies.messages AS
SELECT m.*, "{bodies}" FROM main.messages AS m
LEFT JOIN main.read_bodies AS b USING (topic, queue_id, queue_offset);

-- name: create_text_of_body
-- In: nothing. Out: a macro that returns a body as text: UTF-8, or as DuckDB writes other bytes.
CREATE MACRO bodies.text(body) AS
CASE WHEN typeof(body) = 'BLOB' THEN coalesce(TRY(decode(body::BLOB)), body::VARCHAR)
ELSE body::VARCHAR END;
