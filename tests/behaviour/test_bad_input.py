"""What is wrong is refused with an error that names it, and nothing is changed."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Endpoint, Make

ONE = pa.table({"body": [b"x"]})
NO_OUTCOMES = schema.OUTCOME.empty_table()

#: Verbs with an unknown topic and this group.
UNKNOWN_TOPIC: dict[str, Callable[[Broker, str], object]] = {
    "send": lambda b, _: b.send("nowhere", ONE),
    "receive": lambda b, g: b.receive(g, "nowhere"),
    "read": lambda b, _: b.read("nowhere", 0, offset=0, limit=1),
    "offset_at": lambda b, _: b.offset_at("nowhere", 0, at_ms=0),
    "reset_offset": lambda b, g: b.reset_offset(g, "nowhere", to_latest=True),
    "update_offsets": lambda b, g: b.update_offsets(g, "nowhere", offsets={0: 0}),
    "subscribe": lambda b, g: b.subscribe(g, "nowhere"),
    "pull": lambda b, _: b.pull("nowhere", {0: 0}),
    "commit_offsets": lambda b, g: b.commit_offsets(g, "nowhere", offsets={0: (-1, 0)}),
    "committed_offsets": lambda b, g: b.committed_offsets(g, "nowhere"),
    "start_offsets": lambda b, g: b.start_offsets(g, "nowhere", where="last"),
    "start_offsets at": lambda b, g: b.start_offsets(g, "nowhere", where=1),
    "clone_offsets": lambda b, g: b.clone_offsets(g, g, topic="nowhere"),
    "lock_queues": lambda b, g: b.lock_queues(g, "nowhere", queue_ids=[0], client_id="c"),
    "unlock_queues": lambda b, g: b.unlock_queues(g, "nowhere", queue_ids=[0], client_id="c"),
    "describe_topic": lambda b, _: b.describe_topic("nowhere"),
    "alter_topic": lambda b, _: b.alter_topic("nowhere", queues=9),
    "delete_topic": lambda b, _: b.delete_topic("nowhere"),
    "keyed_state": lambda b, g: b.keyed_state(g, "nowhere"),
    "publish onward": lambda b, g: b.settle(g, NO_OUTCOMES, publish={"nowhere": ONE}),
}

#: Verbs with an unknown group and this topic.
UNKNOWN_GROUP: dict[str, Callable[[Broker, str], object]] = {
    "receive": lambda b, t: b.receive("nobody", t),
    "settle": lambda b, _: b.settle("nobody", NO_OUTCOMES),
    "reset_offset": lambda b, t: b.reset_offset("nobody", t, to_latest=True),
    "update_offsets": lambda b, t: b.update_offsets("nobody", t, offsets={0: 0}),
    "subscribe": lambda b, t: b.subscribe("nobody", t),
    "commit_offsets": lambda b, t: b.commit_offsets("nobody", t, offsets={0: (-1, 0)}),
    "committed_offsets": lambda b, t: b.committed_offsets("nobody", t),
    "start_offsets": lambda b, t: b.start_offsets("nobody", t, where="last"),
    "clone_offsets": lambda b, t: b.clone_offsets("nobody", "nobody", topic=t),
    "lock_queues": lambda b, t: b.lock_queues("nobody", t, queue_ids=[0], client_id="c"),
    "unlock_queues": lambda b, t: b.unlock_queues("nobody", t, queue_ids=[0], client_id="c"),
    "heartbeat": lambda b, t: b.heartbeat("nobody", "c", topics=[t], details={}),
    "leave": lambda b, _: b.leave("nobody", "c"),
    "describe_group": lambda b, _: b.describe_group("nobody"),
    "alter_group": lambda b, _: b.alter_group("nobody", max_attempts=2),
    "delete_group": lambda b, _: b.delete_group("nobody"),
    "keyed_state": lambda b, t: b.keyed_state("nobody", t),
    "sink_files": lambda b, _: b.sink_files("nobody"),
    "replace_sink_files": lambda b, _: b.replace_sink_files(
        "nobody", replacement_id="r", add=schema.SINK_FILE.empty_table(), remove=["x"]
    ),
    "open_window": lambda b, _: b.open_window("consumer/nobody", owner="o", duration_ms=1000),
}


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def source(topic: Make) -> str:
    return str(topic(queues=1))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group())


@pytest.mark.parametrize("verb", UNKNOWN_TOPIC)
def test_an_unknown_topic_is_named(
    endpoint: Endpoint, source: str, readers: str, verb: str
) -> None:
    topics = endpoint.broker.list_topics()

    with pytest.raises(errors.TopicNotFoundError, match="nowhere"):
        UNKNOWN_TOPIC[verb](endpoint.broker, readers)

    assert endpoint.broker.list_topics().equals(topics)
    assert endpoint.stored(source) == 0


@pytest.mark.parametrize("verb", UNKNOWN_GROUP)
def test_an_unknown_group_is_named(
    endpoint: Endpoint, source: str, readers: str, messages: Make, verb: str
) -> None:
    endpoint.broker.send(source, messages(3))
    groups = endpoint.broker.list_groups()

    with pytest.raises(errors.ConsumerGroupNotFoundError, match="nobody"):
        UNKNOWN_GROUP[verb](endpoint.broker, source)

    assert endpoint.broker.list_groups().equals(groups)
    assert len(endpoint.drain(source, readers)) == 3


# ---------------------------------------------------------------------------------------- tables

BAD_TABLES = {
    "without its body": (pa.table({"tag": ["a"]}), "body"),
    "with a body of numbers": (pa.table({"body": [1.5]}), "body"),
    "with a tag of lists": (pa.table({"body": [b"x"], "tag": [["a"]]}), "tag"),
    "with keys of text": (pa.table({"body": [b"x"], "keys": ["a"]}), "keys"),
    "with a level of text": (
        pa.table({"body": [b"x"], "delay_level": ["one"]}),
        "delay_level",
    ),
    "with properties of text": (
        pa.table({"body": [b"x"], "properties": ["a=b"]}),
        "properties",
    ),
    "with a column nobody knows": (
        pa.table({"body": [b"x"], "message_grop": ["a"]}),
        "message_grop",
    ),
    "with a column that is there twice": (
        pa.Table.from_arrays([pa.array([b"x"])] * 2, names=["body", "body"]),
        "body",
    ),
    "with no column": (pa.table({}), "body"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_table_to_send_with_a_wrong_column_is_refused_and_the_column_named(
    endpoint: Endpoint, source: str, case: str
) -> None:
    table, column = BAD_TABLES[case]

    with pytest.raises(errors.TableSchemaError, match=column):
        endpoint.broker.send(source, table)

    assert endpoint.stored(source) == 0


@pytest.mark.parametrize("thing", [None, "text", [b"x"], {"body": [b"x"]}])
def test_what_is_no_table_is_refused(endpoint: Endpoint, source: str, thing: Any) -> None:
    with pytest.raises(errors.RequestError):
        endpoint.broker.send(source, thing)

    assert endpoint.stored(source) == 0


def test_receipts_without_their_column_are_refused(
    endpoint: Endpoint, source: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(source, messages(1))
    got = endpoint.broker.receive(readers, source)
    wrong = got.rename_columns([*got.column_names[:-1], "receipt"])

    verbs: list[Callable[[], object]] = [
        lambda: endpoint.broker.ack(wrong),
        lambda: endpoint.broker.change_invisible_duration(wrong, 1_000),
        lambda: endpoint.broker.forward_to_dead_letter_queue(wrong),
    ]
    for verb in verbs:
        with pytest.raises(errors.TableSchemaError, match="receipt_handle"):
            verb()

    endpoint.broker.ack(got)


@pytest.mark.parametrize("column", ["receipt_handle", "outcome"])
def test_outcomes_without_a_column_are_refused(
    endpoint: Endpoint, source: str, readers: str, messages: Make, outcomes: Make, column: str
) -> None:
    endpoint.broker.send(source, messages(1))
    got = endpoint.broker.receive(readers, source)

    with pytest.raises(errors.TableSchemaError, match=column):
        endpoint.broker.settle(readers, outcomes(got, "ack").drop_columns([column]))

    endpoint.broker.ack(got)


def test_outcomes_may_leave_out_what_may_be_null(
    endpoint: Endpoint, source: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(source, messages(1))
    got = endpoint.broker.receive(readers, source)

    endpoint.broker.settle(readers, outcomes(got, "ack").select(["receipt_handle", "outcome"]))

    endpoint.advance(60_000)
    assert endpoint.broker.receive(readers, source).num_rows == 0


def test_a_null_receipt_is_refused(
    endpoint: Endpoint, source: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(source, messages(1))
    got = endpoint.broker.receive(readers, source)
    handles = pa.array([got["receipt_handle"][0].as_py(), None], pa.string())

    with pytest.raises((errors.ReceiptHandleError, errors.TableSchemaError)):
        endpoint.broker.ack(pa.table({"receipt_handle": handles}))

    endpoint.broker.ack(got)


# ------------------------------------------------------------------------------------------- sql


@pytest.mark.parametrize(
    "query",
    [
        "",
        "   ",
        "nonsense",
        "SELECT",
        "SELECT * FROM no_such_view",
        "SELECT no_such_column FROM progress",
        "DELETE FROM topics",
        "INSERT INTO topics SELECT * FROM topics",
        "UPDATE topics SET name = 'x'",
        "DROP VIEW progress",
        "CREATE TABLE t AS SELECT 1",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP VIEW progress",
        "COPY (SELECT 1) TO '/tmp/rmq-out.csv'",
        "ATTACH '/tmp/rmq-other.duckdb'",
        "SET memory_limit = '1GB'",
        "PRAGMA database_list",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CHECKPOINT",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT getenv('HOME')",
    ],
)
def test_sql_is_one_reading_select(
    endpoint: Endpoint, source: str, messages: Make, query: str
) -> None:
    endpoint.broker.send(source, messages(1))

    with pytest.raises(errors.QueryError):
        endpoint.broker.sql(query)

    count = f"SELECT count(*) AS n FROM messages WHERE topic = '{source}'"
    assert endpoint.sql(count) == [{"n": 1}]


def test_sql_has_a_time_limit(endpoint: Endpoint, source: str) -> None:
    del source
    endless = "SELECT count(*) FROM range(10000000) a, range(1000000) b WHERE a.range + b.range = 1"

    with pytest.raises(errors.QueryError):
        endpoint.broker.sql(endless, timeout_s=0.2)

    assert endpoint.sql("SELECT 1 AS one") == [{"one": 1}]


def test_sql_ends_at_its_limit_within_a_function_too(endpoint: Endpoint, source: str) -> None:
    del source
    endless = "SELECT levenshtein(repeat('a', 200000), repeat('b', 200000))"

    with pytest.raises(errors.QueryError, match=r"did not end within 0\.5 s"):
        endpoint.broker.sql(endless, timeout_s=0.5)

    assert endpoint.sql("SELECT levenshtein('ab', 'ac') AS n") == [{"n": 1}]


@pytest.mark.parametrize("timeout_s", [-1, math.nan, math.inf, 1e12, "soon", None, True])
def test_the_time_limit_of_sql_is_a_number(endpoint: Endpoint, timeout_s: Any) -> None:
    with pytest.raises(errors.RequestError, match="timeout_s must be a number"):
        endpoint.broker.sql("SELECT 1", timeout_s=timeout_s)


# ------------------------------------------------------------------------------------------ home


def test_a_home_is_opened_by_one_broker(inside: Endpoint) -> None:
    with pytest.raises(errors.HomeLockedError, match=str(os.getpid())):
        Broker.open(inside.home, clock=ManualClock(), upkeep="none")

    assert inside.broker.list_topics() is not None


def test_a_home_of_a_newer_format_is_refused_and_left_alone(
    inside: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=1)
    inside.broker.send(name, messages(3))
    inside.close()
    mark = inside.home / "format"
    written = mark.read_text()
    mark.write_text("".join("999" if c.isdigit() else c for c in written))

    with pytest.raises(errors.HomeFormatError):
        inside.open()

    mark.write_text(written)
    inside.open()
    assert inside.bodies(name) == [b"0", b"1", b"2"]


def test_a_closed_broker_refuses(inside: Endpoint, topic: Make, messages: Make) -> None:
    name = topic()
    broker = inside.broker
    inside.close()

    with pytest.raises(errors.RocketMQError):
        broker.send(name, messages(1))
    inside.open()

    assert inside.stored(name) == 0


# ----------------------------------------------------------------------------------------- flight


def test_an_error_crosses_the_endpoint_with_its_class_and_its_words(
    endpoint: Endpoint, source: str
) -> None:
    with pytest.raises(errors.TopicNotFoundError) as unknown:
        endpoint.broker.send("nowhere", ONE)
    with pytest.raises(errors.MessageBodyEmptyError) as empty:
        endpoint.broker.send(source, pa.table({"body": [b"x", b""]}))

    assert "nowhere" in unknown.value.message
    assert unknown.value.code == 40402
    assert "1" in empty.value.message
    assert str(empty.value).endswith(empty.value.remedy)


#: Verbs with this topic, group, and a client of this id.
NAMES_A_CLIENT: dict[str, Callable[[Broker, str, str, str], object]] = {
    "receive": lambda b, t, g, c: b.receive(g, t, client_id=c),
    "receive again": lambda b, t, g, c: b.receive(g, t, attempt_id=c),
    "lock_queues": lambda b, t, g, c: b.lock_queues(g, t, queue_ids=[0], client_id=c),
    "unlock_queues": lambda b, t, g, c: b.unlock_queues(g, t, queue_ids=[0], client_id=c),
    "heartbeat": lambda b, t, g, c: b.heartbeat(g, c, topics=[t], details={}),
    "leave": lambda b, _, g, c: b.leave(g, c),
    "open_window": lambda b, _, g, c: b.open_window(f"consumer/{g}", owner=c, duration_ms=1),
    "open_window of a job": lambda b, *c: b.open_window(
        f"upkeep/{c[-1]}", owner="o", duration_ms=1
    ),
}


@pytest.mark.parametrize("verb", NAMES_A_CLIENT)
def test_half_a_character_is_refused_before_it_comes_near_the_log(
    inside: Endpoint, topic: Make, group: Make, verb: str
) -> None:
    broker, engine = inside.broker, inside.broker.engine
    name, readers, state = topic(), group(), inside.broker.engine.state

    with pytest.raises(errors.RequestError, match="unpaired surrogates"):
        NAMES_A_CLIENT[verb](broker, name, readers, "\ud800")

    broker.send(name, ONE)
    assert engine.state is state  # a frame that cannot be written has it rebuilt from disk
