"""What DuckDB and the log could not digest is refused at once, and the broker goes on."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import errors, schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from rmq_pipeline.broker import Broker
    from tests.behaviour.conftest import Endpoint, Make

HALF = "a\ud800"
MINUTE = 60_000
NO_OUTCOMES = schema.OUTCOME.empty_table()
ONE = pa.table({"body": [b"x"]})


def texts(*given: bytes) -> pa.Array:
    """Texts of these bytes, be they UTF-8 or not."""
    ends = np.cumsum([0, *map(len, given)]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(given))]
    return pa.Array.from_buffers(pa.string(), len(given), buffers)


NOT_UTF8 = texts(b"good", b"a\xff\xfe")
OFFSETS = pa.array([0, 1, 2], pa.int32())
NAMES = pa.array(["k", "k"])


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def source(topic: Make) -> str:
    return str(topic(queues=1))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group())


def assert_goes_on(endpoint: Endpoint, topic: str) -> None:
    """Others are served: dispatch lives, and SQL sees what is sent."""
    assert endpoint.broker.send(topic, ONE).num_rows == 1
    [row] = endpoint.sql(f"SELECT count(*) AS n FROM messages WHERE topic = '{topic}'")
    assert row["n"] == endpoint.stored(topic)


# -------------------------------------------------------------------------------------- one text

#: Verbs with a topic, a group, and half of a surrogate pair in the argument of this name.
HALF_TEXTS: dict[str, Callable[[Broker, str, str], object]] = {
    "partition_time": lambda b, _t, _g: b.create_topic("new", partition_time=HALF),
    "partition_time ensured": lambda b, _t, _g: b.ensure_topic("new", partition_time=HALF),
    "partition_time altered": lambda b, t, _g: b.alter_topic(t, partition_time=HALF),
    "Topic name": lambda b, _t, _g: b.create_topic(HALF),
    "Group name": lambda b, _t, _g: b.create_group(HALF),
    "backoff": lambda b, _t, _g: b.create_group("new", backoff=HALF),
    "owner": lambda b, _t, g: b.open_window(f"consumer/{g}", owner=HALF, duration_ms=MINUTE),
    "window": lambda b, _t, _g: b.open_window(f"upkeep/{HALF}", owner="o", duration_ms=MINUTE),
    "client_id of a receive": lambda b, t, g: b.receive(g, t, client_id=HALF),
    "attempt_id": lambda b, t, g: b.receive(g, t, attempt_id=HALF),
    "filter": lambda b, t, g: b.receive(g, t, filter=HALF),
    "filter sql92": lambda b, t, g: b.receive(g, t, filter=f"a = '{HALF}'", filter_type="sql92"),
    "filter of a read": lambda b, t, _g: b.read(t, 0, offset=0, limit=1, filter=HALF),
    "filter of a pull": lambda b, t, _g: b.pull(t, {0: 0}, filter=HALF),
    "reason": lambda b, _t, _g: b.forward_to_dead_letter_queue(["x"], reason=HALF),
    "window of a settle": lambda b, _t, g: b.settle(g, NO_OUTCOMES, window=(HALF, 1)),
    "redrive_id": lambda b, _t, g: b.redrive(g, schema.DEAD_LETTER.empty_table(), redrive_id=HALF),
    "client_id of a heartbeat": lambda b, _t, g: b.heartbeat(g, HALF, topics=[], details={}),
    "topics": lambda b, _t, g: b.heartbeat(g, "c", topics=[HALF], details={}),
    "details": lambda b, _t, g: b.heartbeat(g, "c", topics=[], details={"host": HALF}),
    "client_id of a lock": lambda b, t, g: b.lock_queues(g, t, queue_ids=[0], client_id=HALF),
    "client_id of a commit": lambda b, t, g: b.commit_offsets(
        g, t, offsets={0: (-1, 0)}, client_id=HALF
    ),
    "client_id of a check": lambda b, _t, _g: b.fetch_checks(client_id=HALF),
    "producer group": lambda b, t, _g: b.send_half(t, ONE, producer_group=HALF),
    "query": lambda b, _t, _g: b.sql(f"SELECT '{HALF}'"),
    "key": lambda b, t, _g: b.find(t, key=HALF),
    "message_id": lambda b, t, _g: b.find(t, message_id=HALF),
    "added": lambda b, _t, _g: b.replace_segments([], added=HALF),
}


@pytest.mark.parametrize("what", HALF_TEXTS)
def test_half_a_character_is_refused(
    endpoint: Endpoint, source: str, readers: str, what: str
) -> None:
    name = what.partition(" ")[0]

    with pytest.raises(errors.RequestError, match=name):
        HALF_TEXTS[what](endpoint.broker, source, readers)

    assert_goes_on(endpoint, source)


def test_a_settle_id_of_half_a_character_is_refused(
    endpoint: Endpoint, source: str, readers: str, outcomes: Make
) -> None:
    name = f"consumer/{readers}"
    window = (name, endpoint.broker.open_window(name, owner="o", duration_ms=MINUTE)["epoch"])
    endpoint.broker.send(source, ONE)
    got = endpoint.broker.receive(readers, source, window=window)

    with pytest.raises(errors.RequestError, match="settle_id"):
        endpoint.broker.settle(readers, outcomes(got, "ack"), settle_id=HALF, window=window)

    endpoint.broker.settle(readers, outcomes(got, "ack"), settle_id="s", window=window)
    assert_goes_on(endpoint, source)


@pytest.mark.parametrize("name", ["replacement_id", "reason", "remove", "partitions"])
def test_a_replacement_with_half_a_character_is_refused(
    endpoint: Endpoint, source: str, readers: str, name: str
) -> None:
    wrong: Any = [HALF] if name in ("remove", "partitions") else HALF
    how: dict[str, Any] = {"replacement_id": "r", "remove": [], name: wrong}

    with pytest.raises(errors.RequestError, match=name):
        endpoint.broker.replace_sink_files(readers, add=pa.table({"path": ["f"]}), **how)

    assert endpoint.broker.sink_files(readers).num_rows == 0
    assert_goes_on(endpoint, source)


def test_a_lite_topic_of_half_a_character_is_refused(
    inside: Endpoint, topic: Make, group: Make
) -> None:
    name, readers = topic(type="lite", queues=1), group()
    state = inside.inside.engine.state

    with pytest.raises(errors.IllegalLiteTopicError, match="is not a text"):
        inside.broker.sync_lite_subscription(
            readers, name, client_id="c", action="add", lite_topics=[HALF]
        )

    assert inside.inside.engine.state is state
    assert inside.broker.lite_subscriptions(readers, name).num_rows == 0


# ---------------------------------------------------------------------------------- keyed state

RUN_ENDS = pa.array([2], pa.int32())
#: Columns of two rows that do not come back from DuckDB as they went, and what is wrong there.
UNKEPT = {
    "halffloat": pa.array(np.array([1, 2], np.float16)),
    "decimal256": pa.array([Decimal(1), Decimal(2)], pa.decimal256(60, 2)),
    "duration": pa.array([1, 2], pa.duration("us")),
    "run_end_encoded": pa.RunEndEncodedArray.from_arrays(RUN_ENDS, pa.array([7])),
    "list_view": pa.array([[1], [2]], pa.list_view(pa.int8())),
    "dense_union": pa.UnionArray.from_dense(
        pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [pa.array([1, 2])]
    ),
    "month_day_nano_interval": pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval()),
    "dictionary<values=int64": pa.array([1, 2]).dictionary_encode(),
    "with duration": pa.array([[{"a": [1]}]] * 2, pa.list_(pa.struct({"a": pa.list_(pa.int64())}))),
    "UTF8": NOT_UTF8,
    "duplicate key": pa.array([[], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8())),
    "out of bounds": pa.array([1, 1 << 60], pa.timestamp("ms", "UTC")),
    "no child field": pa.array([{}, {}], pa.struct([])),
    "name": pa.StructArray.from_arrays([pa.array([1, 2])], names=[""]),
}
UNKEPT["with duration"] = UNKEPT["with duration"].cast(
    pa.list_(pa.struct({"a": pa.list_(pa.duration("s"))}))
)


@pytest.mark.parametrize("what", UNKEPT)
def test_state_that_does_not_come_back_as_it_went_is_refused(
    endpoint: Endpoint, source: str, readers: str, what: str
) -> None:
    state = pa.table({"message_group": ["a", "b"], "score": UNKEPT[what]})

    with pytest.raises(errors.TableSchemaError, match=f"Column '?score'? .*{what}"):
        endpoint.broker.settle(readers, NO_OUTCOMES, state=state, topic=source)

    assert endpoint.broker.keyed_state(readers, source) is None
    assert_goes_on(endpoint, source)


def test_state_that_the_store_has_no_memory_for_is_refused(
    endpoint: Endpoint, source: str, readers: str
) -> None:
    wide = pa.array([None, None], pa.list_(pa.float64(), 1 << 17))
    state = pa.table({"message_group": ["a", "b"], "score": wide})

    with pytest.raises(errors.MessageBodyTooLargeError, match=r"group a takes 10485.. bytes"):
        endpoint.broker.settle(readers, NO_OUTCOMES, state=state, topic=source)

    assert endpoint.broker.keyed_state(readers, source) is None
    assert_goes_on(endpoint, source)


@pytest.mark.parametrize("name", ["Removed", "Message_Group", "Staged_order", "SCORE"])
def test_state_columns_are_told_apart_by_more_than_case(
    endpoint: Endpoint, source: str, readers: str, name: str
) -> None:
    state = pa.table({"message_group": ["a"], "score": [1], name: [2]})

    with pytest.raises(errors.TableSchemaError, match=name):
        endpoint.broker.settle(readers, NO_OUTCOMES, state=state, topic=source)

    assert_goes_on(endpoint, source)


KEPT = {
    "nothing": pa.nulls(1),
    "decimal": pa.array([Decimal("1.25")], pa.decimal128(38, 2)),
    "text view": pa.array(["é"], pa.string_view()),
    "bytes": pa.array([b"\xff\x00"], pa.large_binary()),
    "id": pa.array([b"0123456789abcdef"], pa.binary(16)),
    "moment": pa.array([1_600_000_001_001_001_007], pa.timestamp("ns", "UTC")),
    "time": pa.array([86_399], pa.time32("s")),
    "pair": pa.array([[1, 2]], pa.list_(pa.int8(), 2)),
    "nested": pa.array([[{"a": {"k": [1.5]}}]]),
    "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("what", KEPT)
def test_other_state_comes_back_as_it_went(
    endpoint: Endpoint, source: str, readers: str, what: str
) -> None:
    state = pa.table({"message_group": ["a"], "score": KEPT[what]})

    endpoint.broker.settle(readers, NO_OUTCOMES, state=state, topic=source)

    found = cast(pa.Table, endpoint.broker.keyed_state(readers, source))
    assert found.select(state.column_names).equals(state)


def test_state_may_have_more_categories_than_one_settle(
    endpoint: Endpoint, source: str, readers: str
) -> None:
    short = pa.dictionary(pa.int8(), pa.string())
    for part in range(3):
        names = [f"m-{part}-{i}" for i in range(100)]
        kinds = pa.array(names).cast(short)
        state = pa.table({"message_group": names, "kind": kinds})
        endpoint.broker.settle(readers, NO_OUTCOMES, state=state, topic=source)

    found = cast(pa.Table, endpoint.broker.keyed_state(readers, source))

    assert found["kind"].to_pylist() == found["message_group"].to_pylist()
    assert len(set(found["kind"].to_pylist())) == 300


# --------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("name", "column", "error"),
    [
        ("tag", NOT_UTF8, errors.IllegalMessageTagError),
        ("message_id", NOT_UTF8, errors.IllegalMessageIdError),
        ("keys", pa.ListArray.from_arrays(OFFSETS, NOT_UTF8), errors.IllegalMessageKeyError),
        (
            "properties",
            pa.MapArray.from_arrays(OFFSETS, NAMES, NOT_UTF8),
            errors.IllegalMessagePropertyError,
        ),
        (
            "properties",
            pa.MapArray.from_arrays(OFFSETS, NOT_UTF8, NAMES),
            errors.IllegalMessagePropertyError,
        ),
        ("message_group", NOT_UTF8, errors.IllegalMessageGroupError),
        ("lite_topic", NOT_UTF8, errors.IllegalLiteTopicError),
    ],
)
@pytest.mark.parametrize("after", [0, 100])
def test_a_message_that_is_not_utf8_is_refused(
    endpoint: Endpoint,
    topic: Make,
    name: str,
    column: pa.Array,
    error: type[errors.RequestError],
    after: int,
) -> None:
    types = {"message_group": "fifo", "lite_topic": "lite"}
    to = topic(queues=1, type=types.get(name, "normal"))
    # A few rows are checked otherwise than many.
    columns = {
        "body": [b"x"] * (after + 2),
        name: pa.concat_arrays([column[:1]] * after + [column]),
    }
    sent = endpoint.stored(to)

    with pytest.raises(error, match=f"Row {after + 1}: .*{name} .*UTF-8"):
        endpoint.broker.send(to, pa.table(columns))

    assert endpoint.stored(to) == sent
    assert endpoint.sql("SELECT 1 AS one") == [{"one": 1}]


@pytest.mark.parametrize("name", ["idempotency_key", "reason", "error_type", "run_id"])
def test_an_outcome_that_is_not_utf8_is_refused(
    endpoint: Endpoint, source: str, readers: str, messages: Make, name: str
) -> None:
    endpoint.broker.send(source, messages(2))
    got = endpoint.broker.receive(readers, source)
    outcome = "ack" if name == "idempotency_key" else "retry"
    columns = {"receipt_handle": got["receipt_handle"], "outcome": [outcome] * 2}

    with pytest.raises(errors.TableSchemaError, match=f"Column {name} of outcomes"):
        endpoint.broker.settle(readers, pa.table({**columns, name: NOT_UTF8}))

    endpoint.broker.settle(readers, pa.table(columns))
    assert_goes_on(endpoint, source)


def test_sink_files_that_are_not_utf8_are_refused(
    endpoint: Endpoint, source: str, readers: str
) -> None:
    files = pa.table({"path": NOT_UTF8})

    with pytest.raises(errors.TableSchemaError, match="Column path of sink files"):
        endpoint.broker.settle(readers, NO_OUTCOMES, sink_files=files)
    with pytest.raises(errors.TableSchemaError, match="Column path of sink files"):
        endpoint.broker.replace_sink_files(readers, replacement_id="r", add=files, remove=[])

    assert endpoint.broker.sink_files(readers).num_rows == 0
    assert_goes_on(endpoint, source)


def test_keys_asked_for_that_are_not_utf8_are_refused(
    endpoint: Endpoint, source: str, readers: str
) -> None:
    with pytest.raises(errors.TableSchemaError, match="Column idempotency_key of keys"):
        endpoint.broker.seen_before(readers, pa.table({"idempotency_key": NOT_UTF8}))

    assert_goes_on(endpoint, source)
