"""State that could not be kept is refused at once; the broker goes on, with it and without."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work import keyed_state as settled_state
from rmq_pipeline.errors import MessageBodyTooLargeError, ReceiptHandleError, TableSchemaError
from rmq_pipeline.store import keyed_state, state_history
from tests.broker.sealed_home import messages, open_broker

NO_OUTCOMES = schema.OUTCOME.empty_table()
WIDE = pa.list_(pa.float32(), 2048)
COUNTS = pa.map_(pa.string(), pa.int64())
#: A moment in seconds that microseconds do not reach, and one that not even milliseconds do.
FAR, FARTHEST = 1 << 50, 1 << 60
WITHIN_S = 60.0


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    with open_broker(home) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        yield broker


def settle(broker: Broker, group: str = "a", /, **columns: Any) -> None:
    state = pa.table({"message_group": [group], **columns})
    broker.settle("g", NO_OUTCOMES, state=state, topic="t")


def kept(broker: Broker) -> list[dict[str, Any]] | None:
    """What is there, once dispatch has it; and what seal needs is there, too."""
    broker.send("t", messages(1))
    found = broker.keyed_state("g", "t")
    assert broker.seal()["segments"] == 1
    return None if found is None else found.to_pylist()


REFUSED = {
    "duplicate key": pa.array([[("k", 1), ("k", 2)]], COUNTS),
    "duplicate key in a list": pa.array([[[("k", 1), ("k", 2)]]], pa.list_(COUNTS)),
    "Microsecond": pa.array([FAR], pa.timestamp("s", "UTC")),
    "Microsecond of milliseconds": pa.array([FARTHEST], pa.timestamp("ms", "UTC")),
    "Microsecond in a list": pa.array([[FAR]], pa.list_(pa.timestamp("s", "UTC"))),
    "overflow": pa.array([FARTHEST], pa.timestamp("s")),
    "overflow in a list": pa.array([[FARTHEST]], pa.list_(pa.timestamp("s"))),
    "no child field": pa.array([{}], pa.struct([])),
    "Invalid FIXED_LEN_BYTE_ARRAY length": pa.array([b""], pa.binary(0)),
    "no kernel": pa.array([["a"]], pa.list_(pa.string_view())),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_dispatch_or_seal_cannot_take_is_refused(broker: Broker, what: str) -> None:
    why = what.partition(" in a ")[0].partition(" of ")[0]

    with pytest.raises(TableSchemaError, match=f"Column score .*(?i:{why})"):
        settle(broker, score=REFUSED[what], n=[1])

    assert kept(broker) is None


@pytest.mark.parametrize("what", ["duplicate key", "Microsecond", "overflow in a list"])
def test_values_are_looked_at_in_every_settle(broker: Broker, what: str) -> None:
    wrong = REFUSED[what]
    settle(broker, score=pa.nulls(1, wrong.type))

    with pytest.raises(TableSchemaError, match="Column score"):
        settle(broker, score=wrong)

    assert kept(broker) == [{"message_group": "a", "score": None}]


def test_columns_that_fit_alone_may_be_too_much_together(broker: Broker) -> None:
    wide = pa.array([[0.0] * 2048], WIDE)

    with pytest.raises(MessageBodyTooLargeError, match="takes 73738 bytes"):
        settle(broker, **{f"v{i}": wide for i in range(9)})

    assert kept(broker) is None


def test_columns_of_several_settles_may_not_fit_together(broker: Broker) -> None:
    wide = pa.array([[0.0] * 2048], WIDE)
    for i in range(5):
        settle(broker, **{f"v{i}": wide})

    with pytest.raises(TableSchemaError, match="Out of Memory"):
        settle(broker, **{f"w{i}": wide for i in range(5)})

    assert kept(broker) is not None


def test_columns_of_all_settles_are_counted(home: Path) -> None:
    def many(start: int) -> dict[str, Any]:
        return {f"c{i}": [i] for i in range(start, start + 60)}

    with open_broker(home) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        settle(broker, **many(0))
        settle(broker, "b", **many(60))
        with pytest.raises(TableSchemaError, match=r"would have 180 columns.* may have 150"):
            settle(broker, "c", **many(120))
        broker.engine.dispatched()
    with open_broker(home) as broker:
        with pytest.raises(TableSchemaError, match="would have 180 columns"):
            settle(broker, "c", **many(120))
        settle(broker, "c", **many(50))

        found = kept(broker)

    assert found is not None
    assert [row["c50"] for row in found] == [50, None, 50]


def test_columns_of_settles_that_were_refused_do_not_count(broker: Broker) -> None:
    broker.send("t", messages(1))
    handles = broker.receive("g", "t")["receipt_handle"].to_pylist()
    broker.ack(handles)
    ended = pa.table({"receipt_handle": handles, "outcome": ["ack"]})
    wide = pa.array([[0.0] * 2048], WIDE)
    for i in range(4):
        columns = {f"r{i}_{k}": [1] for k in range(45)} | {f"w{i}": wide, f"v{i}": wide}
        state = pa.table({"message_group": ["a"], **columns})
        with pytest.raises(ReceiptHandleError):
            broker.settle("g", ended, state=state, topic="t")

    settle(broker, **{f"c{k}": [k] for k in range(120)}, wide=wide)

    found = kept(broker)
    assert found is not None
    assert len(found[0]) == 122


def test_a_column_without_values_does_not_wipe_those_of_others(broker: Broker) -> None:
    settle(broker, score=["high"], legs=[["EWR"]], n=[1])
    settle(broker, "b", score=pa.nulls(1), legs=[[]], n=[2])

    assert kept(broker) == [
        {"message_group": "a", "score": "high", "legs": ["EWR"], "n": 1},
        {"message_group": "b", "score": None, "legs": [], "n": 2},
    ]


def test_columns_are_tried_once_whichever_a_settle_has(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []
    original = keyed_state.Trial.refusal

    def refusal(trial: keyed_state.Trial, rows: pa.Table, *, known: pa.Schema) -> str | None:
        tried.append(rows.column_names[3:])
        return original(trial, rows, known=known)

    monkeypatch.setattr(keyed_state.Trial, "refusal", refusal)
    names = ["a", "b", "c", "d"]
    for i in range(16):
        without = [name for at, name in enumerate(names) if i >> at & 1]
        row = {name: None if name in without else "x" for name in names}
        settle(broker, f"g{i}", **{name: [value] for name, value in row.items()})
    settle(broker, **{name: [1] for name in names})
    for i in range(16):
        settle(broker, **{name: [1] if i >> at & 1 else ["x"] for at, name in enumerate(names)})
    settle(broker, a=["x"], D=["x"])

    assert tried == [names, names]


def test_a_file_is_tried_while_others_settle(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = state_history.refusal
    with ThreadPoolExecutor() as other:

        def refusal(rows: pa.Table) -> str | None:
            if rows["message_group"][0].as_py() == "a":
                other.submit(settle, broker, "b", n=[1]).result(WITHIN_S)
            return original(rows)

        monkeypatch.setattr(state_history, "refusal", refusal)

        settle(broker, moments=pa.array([[0]], pa.list_(pa.timestamp("s"))))

    found = kept(broker)
    assert found is not None
    assert sorted(row["message_group"] for row in found) == ["a", "b"]


def test_parts_of_columns_are_counted(broker: Broker) -> None:
    point = pa.array([dict.fromkeys((f"p{i}" for i in range(75)), 1.0)])

    settle(broker, a=point)
    with pytest.raises(TableSchemaError, match=r"would have 152 columns.* may have 150"):
        settle(broker, b=point)


def test_a_home_that_has_more_columns_goes_on_with_these(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(settled_state, "_COLUMNS_MAX", 1000)
        settle(broker, **{f"c{i}": [i] for i in range(200)})

    settle(broker, "b", **{f"c{i}": [i] for i in range(200)})
    with pytest.raises(TableSchemaError, match="would have 201 columns"):
        settle(broker, "b", more=[1])

    found = kept(broker)
    assert found is not None
    assert [row["c199"] for row in found] == [199, 199]


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_a_name_that_duckdb_would_change_is_refused(broker: Broker, name: str) -> None:
    part = pa.StructArray.from_arrays([pa.array([1])], names=[name])

    with pytest.raises(TableSchemaError, match="DuckDB cannot store an empty name"):
        settle(broker, "a", **{name: [1]})
    with pytest.raises(
        TableSchemaError, match=r"Column 'score'.* DuckDB cannot store an empty name"
    ):
        settle(broker, score=pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), part))

    assert kept(broker) is None


def test_nulls_of_a_dictionary_are_nulls(broker: Broker) -> None:
    texts = pa.array(["x", None])
    indices = pa.array([1], pa.int32())

    settle(broker, kind=pa.DictionaryArray.from_arrays(indices, texts))

    assert kept(broker) == [{"message_group": "a", "kind": None}]


def test_a_struct_may_get_other_parts_again_and_again(broker: Broker) -> None:
    for i in range(4):
        settle(broker, f"g{i}", total=[{"usd" if i % 2 else "eur": i}])

    found = kept(broker)

    assert found is not None
    assert [row["total"] for row in found] == [None, None, None, {"usd": 3}]


def test_state_is_answered_by_the_name_that_it_was_settled_by(broker: Broker) -> None:
    settle(broker, Score=[1])
    settle(broker, score=[2])

    assert kept(broker) == [{"message_group": "a", "score": 2}]
