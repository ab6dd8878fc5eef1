"""``rmq sql``."""

import io
import json
import re
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from rmq_pipeline.broker import Broker
from rmq_pipeline.cli.sql import with_bodies
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from tests.broker.sealed_home import messages, open_broker, seal_all
from tests.cli.conftest import Name, Rmq
from tests.cli.test_dead_letters import make_dead_letters

DOCUMENT = Path(__file__).parents[2] / "docs" / "sql.md"
#: What has arguments is no view: state as of a moment, and files_of.
VIEWS = [
    name
    for name in re.findall(r"^### `(\w+)`$", DOCUMENT.read_text(), re.MULTILINE)
    if not name.endswith("_at") and name != "files_of"
]
QUERY = "SELECT 1 AS n, 'it''s' AS t, [1, 2] AS l, NULL AS z, sum(x) AS s FROM range(4) AS r(x)"


def test_json(rmq: Rmq) -> None:
    want = [{"n": 1, "t": "it's", "l": [1, 2], "z": None, "s": 6}]

    assert rmq("sql", QUERY, "--format", "json").json == want
    assert rmq("sql", QUERY, "--json").json == want
    assert rmq("sql", "-", "--json", stdin=QUERY.encode()).json == want


def test_columns_of_one_name_are_all_there(rmq: Rmq) -> None:
    assert rmq("sql", "SELECT 1 AS a, 2 AS a", "--json").json == [{"a": 1, "a_1": 2}]
    assert rmq("sql", "SELECT 1 AS a, 2 AS a").text.split() == ["a", "a_1", "1", "2"]


def test_markup_is_shown_as_it_is(rmq: Rmq) -> None:
    told = rmq("sql", "SELECT '[/x]', 'a\\' AS b")

    assert told.code == 0, told.err
    assert told.text.split() == ["'[/x]'", "b", "[/x]", "a\\"]


def test_table(rmq: Rmq) -> None:
    told = rmq("sql", QUERY)

    header, row = told.text.splitlines()
    assert header.split() == ["n", "t", "l", "z", "s"]
    assert row.split() == ["1", "it's", "1,", "2", "-", "6"]
    assert rmq("sql", "SELECT 1 AS n WHERE false").text == "No rows.\n"


def test_csv(rmq: Rmq) -> None:
    table = csv.read_csv(io.BytesIO(rmq("sql", QUERY, "--format", "csv").out))

    assert table.column_names == ["n", "t", "l", "z", "s"]
    assert table["l"].to_pylist() == ["[1, 2]"]


def test_parquet(rmq: Rmq, tmp_path: Path) -> None:
    file = tmp_path / "answer.parquet"

    out = rmq("sql", QUERY, "--format", "parquet").out
    written = rmq("sql", QUERY, "--format", "parquet", "--output", str(file))

    assert pq.read_table(io.BytesIO(out))["l"].to_pylist() == [[1, 2]]
    assert written.out == b""
    assert pq.read_table(file)["t"].to_pylist() == ["it's"]


@pytest.mark.parametrize("view", VIEWS)
def test_every_documented_view_answers(rmq: Rmq, view: str) -> None:
    assert isinstance(rmq("sql", f"SELECT * FROM {view} LIMIT 3", "--json").json, list)


def test_help_names_every_documented_view(no_broker: Rmq) -> None:
    told = re.split(r"[^\w(]+", no_broker("sql", "--help").text)

    assert len(VIEWS) > 20
    assert [view for view in VIEWS if view not in told] == []


@pytest.mark.parametrize(
    "query", ["DROP TABLE x", "SELECT", "SELECT 1; SELECT 2", "SELECT * FROM read_text('/etc/a')"]
)
def test_only_one_select_is_answered(rmq: Rmq, query: str) -> None:
    told = rmq("sql", query)

    assert told.code == 1
    assert told.err.startswith("QueryError: ")


def test_a_query_has_a_time_limit(rmq: Rmq) -> None:
    endless = "SELECT count(*) FROM range(10000000000) a, range(1000) b WHERE a.range = b.range + 1"

    told = rmq("sql", endless, "--timeout", "0.2")

    assert told.code == 1
    assert "0.2 s" in told.err


def test_output_needs_a_format_for_files(rmq: Rmq, tmp_path: Path) -> None:
    assert rmq("sql", QUERY, "--output", str(tmp_path / "a")).code == 1
    told = rmq("sql", QUERY, "--format", "csv", "--output", "/nowhere/at.all")
    assert told.code == 1
    assert "/nowhere/at.all" in told.err


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_file_is_replaced_only_when_the_answer_is_complete(
    rmq: Rmq, tmp_path: Path, form: str
) -> None:
    file = tmp_path / "keep"
    file.write_text("precious")

    told = rmq("sql", "SELECT INTERVAL 1 DAY", "--format", form, "-o", str(file))

    assert told.code == 1
    assert f"cannot be written as {form}" in told.err
    assert told.err.count("\n") == 1
    assert file.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_replaced_keeps_its_place_and_its_mode(rmq: Rmq, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "answer.csv", tmp_path / "link"
    file.write_text("a much longer answer of before")
    file.chmod(0o640)
    link.symlink_to(file)

    assert rmq("sql", "SELECT 1 AS n", "--format", "csv", "-o", str(link)).code == 0

    assert file.read_text() == '"n"\n1\n'
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert list(file.parent.iterdir()) == [file]


def test_an_answer_may_go_to_a_device(rmq: Rmq) -> None:
    assert rmq("sql", "SELECT 1 AS n", "--format", "csv", "-o", "/dev/null").code == 0

    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
def test_a_time_limit_is_a_time(rmq: Rmq, seconds: str) -> None:
    told = rmq("sql", "SELECT 1", "--timeout", seconds)

    assert told.code == 1
    assert "--timeout is a number of seconds" in told.err
    assert told.err.count("\n") == 1


def test_a_query_that_is_no_text_is_refused(rmq: Rmq) -> None:
    told = rmq("sql", "-", stdin=b"SELECT '\xff'")

    assert told.code == 1
    assert told.err.startswith("RequestError: An argument or the input is not UTF-8")
    assert told.err.count("\n") == 1


def test_a_value_that_python_has_not_is_refused(rmq: Rmq) -> None:
    told = rmq("sql", "SELECT DATE 'infinity' AS d")

    assert told.code == 1
    assert "Column d cannot be shown" in told.err


def test_bodies_stand_beside_the_places_of_messages(rmq: Rmq, topic: str) -> None:
    lines = b'{"body": "one"}\n{"body_base64": "/wA="}\n{"body": "three\\nlines"}\n'
    assert rmq("send", topic, "--file", "-", stdin=lines).code == 0
    query = f"SELECT topic, queue_id, queue_offset FROM messages WHERE topic = '{topic}' "

    found = rmq("sql", query + "ORDER BY queue_offset DESC", "--body", "--json").json

    assert [row["body"] for row in found] == ["three\nlines", None, "one"]
    assert found[1]["body_base64"] == "/wA="
    told = rmq("sql", query + "ORDER BY queue_offset", "--body").text.splitlines()
    assert [line.split()[-1] for line in told] == ["body", "one", r"b'\xff\x00'", "three⏎lines"]


def test_a_place_without_a_message_has_no_body(rmq: Rmq, topic: str) -> None:
    assert rmq("send", topic, "--body", "x").code == 0
    rows = f"('{topic}', 0, 0), ('{topic}', 0, 1), ('{topic}', 7, 0), ('no_topic', 0, 0),"
    rows += f" (NULL, 0, 0), ('{topic}', 0, 0)"

    query = f"SELECT * FROM (VALUES {rows}) AS p(topic, queue_id, queue_offset)"

    found = rmq("sql", query, "--body", "--json").json
    assert [row["body"] for row in found] == ["x", None, None, None, None, "x"]


def test_bodies_go_to_parquet_as_bytes(rmq: Rmq, topic: str, tmp_path: Path) -> None:
    assert rmq("send", topic, "--body", "x").code == 0
    query = f"FROM messages WHERE topic = '{topic}'"
    file = tmp_path / "answer.parquet"

    rmq("sql", query, "--body", "--format", "parquet", "--output", str(file))

    assert pq.read_table(file)["body"].to_pylist() == [b"x"]


@pytest.mark.parametrize(
    ("query", "flags", "said"),
    [
        ("SELECT 1 AS queue_id", [], "--body needs the columns topic, queue_id, queue_offset"),
        ("SELECT 'a' AS topic, 0 AS queue_id, 0 AS queue_offset, 1 AS body", [], "no column body"),
        (
            "SELECT 1 AS topic, 0 AS queue_id, 0 AS queue_offset",
            [],
            "is not the place of a message",
        ),
        (
            "SELECT 'a' AS topic, 0 AS queue_id, i AS queue_offset FROM range(10001) AS r(i)",
            [],
            "reads at most 10000 messages; the result has 10001 rows",
        ),
        (
            "SELECT 'a' AS dead_letter_topic, 0 AS queue_id",
            [],
            "--body needs the columns dead_letter_topic",
        ),
        # The format is checked before the query is parsed.
        ("SELECT", ["--format", "csv"], "cannot be used with format csv"),
    ],
)
def test_bodies_of_no_places_are_refused(rmq: Rmq, query: str, flags: list[str], said: str) -> None:
    told = rmq("sql", query, "--body", *flags)

    assert told.code != 0
    assert said in told.err


def test_a_dead_letter_has_its_own_body(rmq: Rmq, topic: str, group: str) -> None:
    assert rmq("send", topic, "--body", "acknowledged").code == 0
    assert rmq("receive", topic, group, "--ack").code == 0
    make_dead_letters(rmq, topic, group, "dead")

    query = f"FROM dead_letters WHERE consumer_group = '{group}'"
    [found] = rmq("sql", query, "--body", "--json").json

    assert (found["origin_queue_offset"], found["queue_offset"]) == (1, 0)
    assert found["body"] == "dead"


def test_a_scheduled_message_has_no_body(rmq: Rmq, name: Name) -> None:
    topic = name("later")
    assert rmq("topic", "create", topic, "--type", "mixed", "--queues", "1").code == 0
    assert rmq("send", topic, "--body", "now").code == 0
    sent = rmq("send", topic, "--body", "later", "--delay-level", "18")
    assert sent.code == 0, sent.err

    # In SCHEDULE_TOPIC_XXXX it may have the place that another message has in the topic.
    place = "0 AS queue_id, 0 AS queue_offset"
    query = f"SELECT * REPLACE ({place}) FROM scheduled WHERE topic = '{topic}'"
    found = rmq("sql", query, "--body", "--json").json

    assert [row["body"] for row in found] == [None]


def test_a_topic_made_again_lends_no_bodies_to_the_rows_of_the_deleted_one(
    rmq: Rmq, topic: str
) -> None:
    def made() -> tuple[int, str]:
        assert rmq("send", topic, "--body", "x").code == 0
        [row] = rmq("sql", f"FROM topics WHERE topic = '{topic}'", "--json").json
        [message] = rmq("sql", f"FROM messages WHERE topic = '{topic}'", "--json").json
        return row["topic_id"], message["message_id"]

    old, old_message = made()
    assert rmq("topic", "delete", topic, "--force").code == 0
    assert rmq("topic", "create", topic, "--queues", "1").code == 0
    new, new_message = made()

    for column, before, now in (
        ("topic_id", str(old), str(new)),
        ("message_id", f"'{old_message}'", f"'{new_message}'"),
    ):
        rows = f"('{topic}', 0, 0, {before}), ('{topic}', 0, 0, {now}), ('{topic}', 0, 0, NULL)"
        query = f"SELECT * FROM (VALUES {rows}) AS p(topic, queue_id, queue_offset, {column})"
        found = rmq("sql", query, "--body", "--json").json
        assert [row["body"] for row in found] == [None, "x", None]


def test_the_limit_of_bytes_counts_a_body_once_a_row(rmq: Rmq, topic: str) -> None:
    line = json.dumps({"body": "x" * (1 << 20)}).encode()
    assert rmq("send", topic, "--file", "-", stdin=line).code == 0
    query = f"SELECT '{topic}' AS topic, 0 AS queue_id, 0 AS queue_offset FROM range("

    many = rmq("sql", f"{query}65)", "--body")
    fit = rmq("sql", f"{query}64)", "--body", "--format", "parquet").out

    assert many.code == 1
    assert "more than 64 MiB" in many.err
    assert pq.read_table(io.BytesIO(fit))["body"].null_count == 0


class Expiring:
    """A client between whose two calls the messages of a topic expire."""

    def __init__(self, broker: Broker, clock: ManualClock) -> None:
        self.broker, self.clock, self.read = broker, clock, broker.read

    def describe_topic(self, topic: str) -> Any:
        described = self.broker.describe_topic(topic)
        self.clock.advance(3_600_000)
        self.broker.expire()
        return described


def test_a_message_that_expires_before_it_is_read_has_no_body(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_broker(tmp_path / "home", clock) as broker:
        broker.create_topic("orders", queues=1, retention_ms=1_000)
        broker.send("orders", messages(2))
        seal_all(broker)
        clock.advance(3_600_000)
        broker.send("orders", messages(1, start=2))
        places = broker.sql("SELECT topic, queue_id, queue_offset FROM messages ORDER BY ALL")

        found = with_bodies(cast("Client", Expiring(broker, clock)), places)

    assert places.num_rows == 3
    assert found["body"].to_pylist() == [None, None, b"2:"]


def test_a_query_reads_bodies_itself(rmq: Rmq, topic: str) -> None:
    lines = b'{"body": "{\\"id\\": 7}"}\n{"body_base64": "/wA="}\n'
    assert rmq("send", topic, "--file", "-", stdin=lines).code == 0
    query = f"FROM messages WHERE topic = '{topic}' ORDER BY queue_offset"

    text = rmq("sql", f"SELECT body::VARCHAR AS body {query}", "--json").json
    whole = rmq("sql", f"SELECT body, properties {query} LIMIT 1").text.splitlines()
    ids = rmq("sql", f"SELECT body::JSON ->> '$.id' AS id {query} LIMIT 1", "--json").json

    assert [row["body"] for row in text] == ['{"id": 7}', r"\xFF\x00"]
    assert ids == [{"id": "7"}]
    assert whole[0].split() == ["body", "properties"]
    assert '{"id": 7}' in whole[1]
