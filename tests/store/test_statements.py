import re
from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.store import fold, history
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.stretch import Rows
from rmq_pipeline.store.state_tables import STATE_TABLES
from rmq_pipeline.store.statements import named, quoted, statements, tables, views
from scripts import generate_sql
from tests.store import rows

PREPARABLE = {
    duckdb.StatementType.SELECT,
    duckdb.StatementType.INSERT,
    duckdb.StatementType.UPDATE,
    duckdb.StatementType.DELETE,
}
#: What each placeholder of a table stands for where it is used.
TABLES = {
    "forget_topics": "store.topics",
    "forget_groups": "store.groups",
    "create_state": "keyed.state_3_4",
    "create_copy": "copied",
    "fill_copy": "store.kinds",
}
#: Values of statements that DuckDB does not prepare.
GIVEN = {"files": ["nowhere.parquet"], "differ": False}
#: Of a query for columns, and of one that runs in a process of its own.
COPIED = {
    "query": "(SELECT 1 AS topic_id)",
    "source": "store.topics",
    "columns": "name",
    "alias": "a",
    "condition": "a.name = 'b'",
    "typed": "NULL::BIGINT AS a",
    "macro": "copied_at",
    "parameter": "t",
    "branches": "(SELECT t AS t)",
    "argument": "now()",
    "former": "true",
    "most": "1",
    "bodies": "b.body",
}


#: Variables that name files; a statement that sets one must not change those of the next.
VARIABLES = ("event_files", "snapshot_files", "columns_differ")
#: Views that stand for themselves or for their macro of a moment.
AT = {
    each: f"{each}_at(1)"
    for each in (
        *("lag", "progress", "scheduled", "half"),
        *("in_flight", "retrying", "parked", "quarantined_groups"),
    )
}


def _alone(kind: int, batch: pa.RecordBatch) -> Rows:
    return Rows(kind, batch, [0], [batch.num_rows])


@pytest.fixture(scope="module")
def connection(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """The tables and views, and every relation that statements read from Python."""
    home = tmp_path_factory.mktemp("home")
    with duckdb.connect() as made:
        made.execute(tables())
        for folder in (history.EVENTS, history.SNAPSHOTS):
            (home / folder).mkdir()
        history.write_nothing(made, home)
        history.FilesInUse(home).update(made)
        made.execute(views())
        kept, origins = fold.staged_messages([_alone(*rows.messages(rows.message(2, 0, 0)))])
        state = fold.staged_state(
            [_alone(*rows.keyed([{"message_group": "a", "total": 1}], total=pa.int64()))]
        )[0][2]
        made.register("staged_messages", kept)
        made.register("staged_dead_letters", origins)
        made.register(
            "staged_events", fold.staged_events([_alone(*rows.events(rows.event(Kind.ACK)))])
        )
        made.register("staged_state", state)
        made.register("staged_kinds", pa.table({"kind": [1], "name": ["lease"]}))
        made.register("incoming", pa.table({"kind": [1], "name": ["lease"]}))
        made.register("asked", pa.table({"message_group_hash": [1], "start": [0], "ordinal": [0]}))
        made.register("stretches", pa.table({"queue_id": [0], "start": [0], "stop": [1]}))
        made.register("asked_halves", pa.table({"queue_offset": [1]}))
        places = {"queue_id": [0], "queue_offset": [0], "ordinal": [0]}
        made.register("asked_places", pa.table(places))
        place = {"topic": ["a"], "queue_id": [0], "queue_offset": [0]}
        made.register("wanted_places", pa.table(place))
        made.execute("CREATE SCHEMA bodies; CREATE TABLE main.read_bodies AS FROM wanted_places")
        made.execute("ALTER TABLE main.read_bodies ADD COLUMN body BLOB")
        made.register("asked_keys", pa.table({"idempotency_key": ["k"], "ordinal": [0]}))
        folds = [name for table in STATE_TABLES if table.is_regular for name in table.folding]
        for name in (*folds, "fold_halves", "fold_redrives", "fold_state"):
            made.execute(named(name))
        made.execute(named("create_state", table="keyed.state_1_2"))
        made.execute(named("view_state", table="keyed.state_1_2", view='"keyed_state_a"'))
        yield made


#: Settings that cannot be taken back, and a list of files that is no list while it is prepared.
NOT_HERE = {"lock_settings", "allow_folders", "forbid_files", "events_of_files"}


@pytest.mark.parametrize("name", sorted(set(statements()) - NOT_HERE))
def test_statement_fits_the_schema(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    table = TABLES.get(name, "keyed.state_1_2")
    column = quoted("more" if name == "add_column" else "total")
    types = {"type": "BIGINT", "before": "VARCHAR"}
    filled = {
        "new_name": quoted("other"),
        "view": quoted("keyed_state_a"),
        **types,
        "size": "'1GB'",
        **COPIED,
        **AT,
    }
    if name == "copied_branch":
        filled["parameter"] = "1"  # outside of its macro
    text = named(name, table=table, column=column, **filled)

    (statement,) = connection.extract_statements(text)

    assert '"{' not in re.sub(r"^--.*$", "", text, flags=re.MULTILINE)
    if statement.type in PREPARABLE:
        connection.execute(f"PREPARE checked AS {text}")
        connection.execute("DEALLOCATE checked")
        return
    # DuckDB prepares no MERGE, CREATE, ALTER, DROP, SET.
    if statement.type != duckdb.StatementType.TRANSACTION:
        connection.begin()
    values = {
        each: connection.execute(f"SELECT getvariable('{each}')").fetchone() for each in VARIABLES
    }
    try:
        given = {name: value for name, value in GIVEN.items() if f"${name}" in text}
        connection.execute(text, given or None)
    finally:
        connection.rollback()
        for variable, value in values.items():
            assert value is not None
            connection.execute(f"SET VARIABLE {variable} = $value", {"value": value[0]})


@pytest.mark.parametrize("name", sorted(statements()))
def test_statement_says_what_goes_in_and_what_comes_out(name: str) -> None:
    comment = "".join(re.findall(r"^--.*$", named(name), flags=re.MULTILINE))

    assert "In: " in comment
    assert "Out: " in comment


def test_every_table_says_what_a_row_is_who_writes_it_and_when_it_goes() -> None:
    for match in re.finditer(r"((?:^--.*\n)+)CREATE TABLE", tables(), re.MULTILINE):
        assert re.search(r"-- A row: .*\n-- Written by: .*\n-- Goes: ", match[1]), match[1]


def test_a_text_that_fills_a_placeholder_neither_is_one_nor_ends_a_comment() -> None:
    text = """'"{condition}"
; DROP TABLE store.events --'"""

    filled = named("copied_rows", columns="*", source=text, alias="a", condition="true")

    code = [line for line in filled.split("\n") if not line.startswith("--")]
    assert "\n".join(code) == f"SELECT * FROM {text} AS a WHERE true;"


def test_generated_sql_follows_its_declarations() -> None:
    generated = generate_sql.generated()

    assert {path: path.read_text("utf-8") for path in generated} == generated, "Run `make sql`."
    assert set(generate_sql.TABLES.iterdir()) == generated.keys() - {generate_sql.DELIVERY_VIEWS}


def test_kinds_are_their_numbers() -> None:
    assert f"NOT IN ({int(Kind.ACK)}, {int(Kind.DEAD_LETTER)})" in named("insert_leases")


def test_every_column_of_events_and_messages_has_a_place(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    columns = {
        table: {row[0] for row in connection.sql(f"DESCRIBE store.{table}").fetchall()}
        for table in ("events", "consume_queue")
    }

    assert columns["events"] == {*schema.EVENT.names, "position", "row"}
    assert columns["consume_queue"] == {*schema.MESSAGE.names, "position", "row", "tag_hash"} - {
        "body",
        "properties",
    }
