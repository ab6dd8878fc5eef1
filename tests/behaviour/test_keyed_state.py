"""What settle keeps for a consumer: the state of its keys, and the files that count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def source(topic: Make) -> str:
    return str(topic(name="source", type="fifo", queues=2))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(name="readers", order="message_group"))


def totals(**by_key: int) -> pa.Table:
    return pa.table({"message_group": list(by_key), "total": pa.array(by_key.values(), pa.int64())})


def state_of(endpoint: Endpoint, **which: Any) -> dict[str, int] | None:
    found = endpoint.broker.keyed_state("readers", "source", **which)
    if found is None:
        return None
    return {row["message_group"]: row["total"] for row in found.to_pylist()}


def files(*names: str) -> pa.Table:
    n = len(names)
    columns = [list(names), [10] * n, [1_000] * n, ["hour=1"] * n]
    return pa.table(columns, names=schema.SINK_FILE.names[:4])


def open_window(
    endpoint: Endpoint, owner: str = "run-1", *, takeover: bool = False
) -> tuple[str, int]:
    opened = endpoint.broker.open_window(
        "consumer/readers", owner=owner, duration_ms=10 * MINUTE, takeover=takeover
    )
    return "consumer/readers", opened["epoch"]


def settle_state(endpoint: Endpoint, state: pa.Table) -> None:
    nothing = schema.OUTCOME.empty_table()
    endpoint.broker.settle("readers", nothing, state=state, topic="source")


@pytest.mark.every_endpoint
def test_keyed_state_is_read_back_as_last_written(
    endpoint: Endpoint, source: str, readers: str
) -> None:
    del source, readers
    before = state_of(endpoint)

    settle_state(endpoint, totals(a=1, b=2))
    settle_state(endpoint, totals(b=20, c=3))

    assert before is None
    assert state_of(endpoint) == {"a": 1, "b": 20, "c": 3}


def test_keyed_state_is_read_for_some_message_groups(
    endpoint: Endpoint, source: str, readers: str
) -> None:
    del source, readers
    settle_state(endpoint, totals(a=1, b=2, c=3))
    wanted = pa.table({"message_group": ["c", "unheard of", "a"]})

    found = state_of(endpoint, message_groups=wanted)

    assert found == {"a": 1, "c": 3}


def test_keyed_state_keeps_the_types_of_its_columns(
    endpoint: Endpoint, source: str, readers: str
) -> None:
    del source, readers
    table = pa.table(
        {
            "message_group": ["a", "ž"],
            "count": pa.array([1, None], pa.int32()),
            "ratio": [0.5, None],
            "name": ["x", None],
            "done": [True, None],
            "raw": [b"\x00\xff", None],
        }
    )

    settle_state(endpoint, table)

    found = endpoint.broker.keyed_state("readers", "source")
    assert found is not None
    assert found.select(table.column_names).schema.equals(table.schema)
    assert sorted(found.to_pylist(), key=str) == sorted(table.to_pylist(), key=str)


@pytest.mark.parametrize(
    "type",
    [
        pa.timestamp("ms", "UTC"),
        pa.timestamp("us"),
        pa.date32(),
        pa.int8(),
        pa.uint64(),
        pa.float32(),
        pa.decimal128(10, 2),
        pa.list_(pa.int64()),
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
    ],
    ids=str,
)
def test_keyed_state_of_any_type_is_read_back(
    endpoint: Endpoint, source: str, readers: str, type: pa.DataType
) -> None:
    del source, readers
    value: Any = {"a": 1, "b": "x"} if pa.types.is_struct(type) else 1
    column = pa.array([[1, 2]] if pa.types.is_list(type) else [value], type)
    table = pa.table({"message_group": ["a"], "it": column})

    settle_state(endpoint, table)

    found = endpoint.broker.keyed_state("readers", "source")
    assert found is not None
    assert found.select(["message_group", "it"]).equals(table)


def test_the_last_row_of_a_key_counts(endpoint: Endpoint, source: str, readers: str) -> None:
    del source, readers
    settle_state(endpoint, pa.table({"message_group": ["a", "b", "a"], "total": [1, 2, 3]}))

    assert state_of(endpoint) == {"a": 3, "b": 2}


def test_a_removed_key_is_gone(endpoint: Endpoint, source: str, readers: str) -> None:
    del source, readers
    settle_state(endpoint, totals(a=1, b=2))
    gone = pa.table({"message_group": ["a"], "removed": [True], "total": pa.nulls(1, pa.int64())})

    settle_state(endpoint, gone)

    assert state_of(endpoint) == {"b": 2}


def test_keyed_state_belongs_to_one_group_and_topic(
    endpoint: Endpoint, source: str, readers: str, topic: Make, group: Make
) -> None:
    del source
    other_topic, other_group = topic(type="fifo"), group(order="message_group")

    settle_state(endpoint, totals(a=1))

    assert endpoint.broker.keyed_state(readers, other_topic) is None
    assert endpoint.broker.keyed_state(other_group, "source") is None


# ------------------------------------------------------------------------------------- sink files


def test_sink_files_are_listed_in_the_order_settled(
    endpoint: Endpoint, source: str, readers: str, messages: Make, outcomes: Make
) -> None:
    window = open_window(endpoint)
    for i, names in enumerate([("b.parquet", "a.parquet"), ("c.parquet",)]):
        endpoint.broker.send(source, messages(1, groups=["a"]))
        got = endpoint.broker.receive(readers, source, window=window)
        endpoint.broker.settle(
            readers,
            outcomes(got, "ack"),
            settle_id=str(i),
            window=window,
            sink_files=files(*names),
        )
        endpoint.advance(1_000)

    listed = endpoint.broker.sink_files(readers)

    start = endpoint.clock.now_ms() - 2_000
    assert listed["path"].to_pylist() == ["b.parquet", "a.parquet", "c.parquet"]
    assert listed["rows"].to_pylist() == [10] * 3
    assert listed["bytes"].to_pylist() == [1_000] * 3
    assert listed["partition"].to_pylist() == ["hour=1"] * 3
    assert listed["epoch"].to_pylist() == [window[1]] * 3
    assert listed["at_ms"].to_pylist() == [start, start, start + 1_000]
