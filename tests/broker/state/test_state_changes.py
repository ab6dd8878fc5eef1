"""Whatever becomes of a column's type, sealing goes on, and what was sealed stays readable."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import StorageError
from rmq_pipeline.store import state_history
from tests.broker.sealed_home import MIB, messages, open_broker, seal_all

TOPIC, GROUP = "legs", "counters"
HOUR_MS = 3_600_000
#: A value and one of another type; the first in the form of the second.
CHANGES = {
    "text to number": (["many"], [1], None),
    "number to text": ([1], ["many"], "1"),
    "number to list": ([1], [[1]], None),
    "struct to number": ([{"a": 1}], [1], None),
    "struct to struct": ([{"eur": 1}], [{"usd": 1}], {"eur": 1, "usd": None}),
    "view to number": (pa.array(["1"], pa.string_view()), [1], 1),
    "bytes to number": ([b"\xff"], [1], None),
    "moment to another": (
        pa.array([1_500_000], pa.timestamp("us")),
        pa.array([1], pa.timestamp("s", "UTC")),
        datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
    ),
}


def begin(home: Path, clock: ManualClock | None = None, **settings: Any) -> Broker:
    broker = open_broker(home, clock, **settings)
    broker.create_topic(TOPIC, type="fifo", queues=1)
    broker.create_group(GROUP, order="message_group", max_attempts=1)
    return broker


def turn(broker: Broker, **columns: Any) -> None:
    """A message of group a is sent, received and settled, and leaves that state."""
    broker.send(TOPIC, pa.table({"body": [b"x"], "message_group": ["a"]}))
    got = broker.receive(GROUP, TOPIC, limit=10)
    outcomes = pa.table({"receipt_handle": got["receipt_handle"], "outcome": ["ack"]})
    state = pa.table({"message_group": ["a"], **columns})
    broker.settle(GROUP, outcomes, state=state, topic=TOPIC)


def around(broker: Broker, offset: int) -> dict[str, Any]:
    """The column v before and after a message of group a."""
    first = {"queue_id": [0], "queue_offset": [offset], "stored_at_ms": [0]}
    last = {"last_queue_id": [0], "last_queue_offset": [offset]}
    asked = pa.table({"message_group": ["a"], **first, **last})
    found = broker.keyed_state_history(GROUP, TOPIC, places=asked).to_pylist()
    return {row["moment"]: row.get("v", row.get("V")) for row in found if row["moment"] != "begins"}


def test_the_log_becomes_shorter_after_a_type_has_changed(home: Path) -> None:
    clock = ManualClock()
    with begin(home, clock) as broker:
        turn(broker, v=["1"])
        turn(broker, v=[1])
        for start in range(0, 32, 8):
            for i in range(start, start + 8):
                broker.send(TOPIC, messages(1, start=i, body_bytes=MIB // 2, message_group=["b"]))
            clock.advance(60_000)

            assert broker.seal()["dropped_files"] >= 3

        assert around(broker, 1) == {"before": 1, "after": 1}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("sealed", ["together", "first"])
def test_a_changed_type_is_sealed_and_read(home: Path, what: str, sealed: str) -> None:
    old, new, expected = CHANGES[what]
    with begin(home) as broker:
        turn(broker, v=old)
        if sealed == "first":
            seal_all(broker)
        turn(broker, v=new)
        if sealed == "together":
            seal_all(broker)

        found = around(broker, 1)

    assert found["before"] == expected
    assert found["after"] is not None


def test_old_states_of_changed_types_are_made_one_file(home: Path) -> None:
    clock = ManualClock()
    with begin(home, clock, state_retention_ms=HOUR_MS) as broker:
        for i in range(10):
            turn(broker, v=[str(i)] if i % 2 else [i])
            seal_all(broker)
        clock.advance(2 * HOUR_MS)
        turn(broker, V=[10])
        seal_all(broker)
        files = list((home / "state").glob("*/*.parquet"))

        assert len(files) == 2
        assert around(broker, 10) == {"before": 9, "after": 10}


def test_what_arrow_refuses_while_sealing_is_an_error_of_the_store(home: Path) -> None:
    def refuse(step: str) -> None:
        if step == "events_renamed":
            raise pa.ArrowTypeError("no such type")

    with begin(home) as broker:
        turn(broker, v=[1])

        with pytest.raises(StorageError, match="Sealing failed: no such type"):
            seal_all(broker, refuse)

        assert seal_all(broker)["segments"] == 1


def test_a_column_that_no_file_takes_is_left_out_of_the_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixed = [["a"], [1], [False], [64], [0], [0], [0]]
    columns = dict(zip(state_history.HISTORY.names, fixed, strict=True))
    schema = state_history.HISTORY
    for name, of_type in (("v", pa.struct([])), ("n", pa.int64())):
        schema = schema.append(pa.field(name, of_type))
    rows = pa.table({**columns, "v": [{}], "n": [1]}, schema=schema)
    owner = state_history.Owner(1, 2)

    state_history.write(tmp_path, {owner: [rows]}, start=0, end=128)

    (file,) = tmp_path.glob("*/*.parquet")
    assert pq.read_table(file).equals(rows.drop_columns(["v"]))
    assert "v" in caplog.text
