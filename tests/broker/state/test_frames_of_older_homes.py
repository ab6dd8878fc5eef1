"""What older versions let into the log stops neither a start nor dispatch, or says where it is."""

import dataclasses
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.state.event_rows import single, to_batch
from rmq_pipeline.broker.work.engine import SCHEMAS
from rmq_pipeline.errors import CorruptLogError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.message import hash64
from rmq_pipeline.orchestration.checks import dispatch_result
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.dispatch import StuckError
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.recovery import VALIDATED_FILE
from tests.store.log_batches import forget_validation
from tests.waiting import until

SMALL = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20)
MESSAGES, EVENTS = 1, 2
BAD = b"\xff\xfe"


def opened(home: Path) -> Broker:
    return Broker.open(home, upkeep="none", settings=SMALL)


@pytest.fixture
def sent(home: Path) -> pa.RecordBatch:
    """A closed home with a topic, a group and a message; the message as the log has it."""
    with opened(home) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        start = broker.engine.log.end
        broker.send("t", pa.table({"body": [b"one"], "tag": ["a"], "keys": [["k"]]}))
        ((_, sections),) = broker.engine.log.frames(start, broker.engine.log.end)
        return sections[0].batch


@dataclasses.dataclass
class Frame:
    """A frame that was added to a home's log."""

    position: int
    byte: int


def add(home: Path, kind: int, batch: pa.RecordBatch) -> Frame:
    """Write a frame to the log of a closed home, as an older version might have."""
    if (home / "log" / VALIDATED_FILE).exists():
        forget_validation(home / "log")
    log = CommitLog.open(
        home / "log", schemas=SCHEMAS, file_bytes=8 << 20, reserve_bytes=1 << 20
    )  # fmt: skip
    position = log.end
    log.stage(kind, batch)
    log.commit()
    added = Frame(position, log.file_of(position).offset_of(position))
    log.close()
    return added


def following(batch: pa.RecordBatch, **columns: pa.Array) -> pa.RecordBatch:
    """The next message of a queue, with other columns."""
    columns["queue_offset"] = pa.array([1], pa.int64())
    arrays = [columns.get(name, batch.column(name)) for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def bad_text() -> Any:
    ends = struct.pack("<2i", 0, len(BAD))
    return pa.StringArray.from_buffers(1, pa.py_buffer(ends), pa.py_buffer(BAD))


BAD_COLUMNS = {
    "tag": bad_text,
    "message_id": bad_text,
    "message_group": bad_text,
    "keys": lambda: pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), bad_text()),
}


@pytest.mark.parametrize("column", BAD_COLUMNS)
def test_a_message_with_texts_that_are_none_stops_nothing(
    home: Path, sent: pa.RecordBatch, column: str
) -> None:
    bad: pa.Array = BAD_COLUMNS[column]()  # type: ignore[no-untyped-call]
    add(home, MESSAGES, following(sent, **{column: bad}))

    for _ in range(2):  # before and after dispatch has taken it
        with opened(home) as broker:
            broker.send("t", pa.table({"body": [b"next"]}))

            found = broker.sql("SELECT queue_offset FROM messages ORDER BY ALL")
            assert found["queue_offset"].to_pylist()[:3] == [0, 1, 2]
            store = broker.status()["store"]
            assert (store["failing"], store["repairs"], store["stuck"]) == (None, 0, None)
            assert broker.receive("g", "t", limit=10)["body"].to_pylist()[-1] == b"next"


def test_an_older_attempt_is_repeated_and_an_older_lock_keeps_its_time(home: Path) -> None:
    locked_at_ms = 1_700_000_000_000
    with opened(home) as broker:
        topic = broker.create_topic("t", queues=1)
        group = broker.create_group("g", order="queue")
        broker.send("t", pa.table({"body": [b"one", b"two"]}))
    now_ms = time.time_ns() // 1_000_000
    ids = {"group_id": group["group_id"], "topic_id": topic["topic_id"], "queue_id": 0}
    common = {**ids, "at_ms": now_ms, "visible_at_ms": now_ms + 3_600_000, "client_id": "me"}
    lease = {"kind": Kind.LEASE, "queue_offset": 0, "attempt": 1, "delivery": 5}
    # Written out as older versions did: below 0 is the hash of client and attempt id.
    older = -1 - abs(int(hash64(pa.array(["me\nan-attempt"]))[0]) >> 1)
    lock = {"kind": Kind.QUEUE_LOCKED, "queue_offset": -1, "epoch": locked_at_ms}
    rows = [{**common, **lease, "epoch": older}, {**common, **lock}]
    filled = [dict.fromkeys(("attempt", "delivery", "message_group_hash"), 0) | row for row in rows]
    add(home, EVENTS, pa.RecordBatch.from_pylist(filled, schema=schema.EVENT))

    for _ in range(2):  # before and after dispatch has taken them
        with opened(home) as broker:
            got = broker.receive("g", "t", client_id="me", attempt_id="an-attempt")
            (lock_now,) = broker.describe_group("g")["locks"]
            (shown,) = broker.sql("SELECT epoch FROM in_flight")["epoch"].to_pylist()
            (since,) = broker.sql("SELECT locked_at_ms FROM queue_locks")["locked_at_ms"]

        assert got["body"].to_pylist() == [b"one"]
        assert lock_now["locked_at_ms"] == since.as_py() == locked_at_ms
        assert shown == 0


@pytest.fixture
def refused(home: Path, sent: pa.RecordBatch) -> Frame:
    """A frame that the state takes, and the database does not, in the middle of others."""
    add(home, MESSAGES, following(sent))
    event = single(Kind.SEGMENT, 0, topic_id=sent.column("topic_id")[0].as_py(), detail="no JSON")
    return add(home, EVENTS, to_batch([event]))


@pytest.fixture
def broker(home: Path, refused: Frame) -> Iterator[Broker]:
    assert refused.position > 0
    with opened(home) as broker:
        yield broker


def test_the_broker_goes_on_behind_a_frame_that_the_database_does_not_take(
    home: Path, broker: Broker, refused: Frame
) -> None:
    broker.send("t", pa.table({"body": [b"behind"]}))

    got = broker.receive("g", "t", limit=10)
    assert got["body"].to_pylist() == [b"one", b"one", b"behind"]
    broker.ack(got)

    with pytest.raises(StuckError, match=rf"position {refused.position} \(byte {refused.byte} "):
        broker.sql("SELECT 1")
    assert f"position {refused.position}" in broker.status()["store"]["stuck"]
    assert broker.status()["store"]["repairs"] == 0
    broker.close()

    with opened(home) as again:
        assert again.receive("g", "t").num_rows == 0
        again.send("t", pa.table({"body": [b"later"]}))
        assert again.receive("g", "t")["body"].to_pylist() == [b"later"]


def test_a_check_of_dagster_is_red_before_such_a_frame(broker: Broker, refused: Frame) -> None:
    until(lambda: broker.status()["store"]["stuck"])

    with FlightServer(broker) as server, Client(server.address) as client:
        found = dispatch_result(client)

    assert not found.passed
    assert f"position {refused.position}" in str(found.metadata["stuck"].value)


def test_a_check_of_dagster_is_green_otherwise(home: Path) -> None:
    with opened(home) as broker, FlightServer(broker) as server:
        assert dispatch_result(Client(server.address)).passed


def test_what_lies_before_such_a_frame_is_in_the_database(broker: Broker, refused: Frame) -> None:
    until(lambda: broker.status()["store"]["stuck"])

    assert broker.engine.database.dispatched == refused.position


@pytest.mark.usefixtures("sent")
def test_a_frame_that_the_state_does_not_take_is_named(home: Path) -> None:
    event = single(Kind.TOPIC, 0, topic_id=99, detail="no JSON")
    added = add(home, EVENTS, to_batch([event]))

    with pytest.raises(CorruptLogError) as refusal:
        opened(home)

    assert f"position {added.position} (byte {added.byte})" in refusal.value.message
    assert "1 rows of kind 2" in refusal.value.message
    assert "version" in refusal.value.remedy
