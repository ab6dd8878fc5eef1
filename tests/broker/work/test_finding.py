"""Messages are found by key, id and time, wherever they lie."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from tests.broker.archive_home import HOUR_MS, everything, fill, opened
from tests.broker.sealed_home import messages, seal_all


@pytest.fixture(params=["log", "sealed", "both", "compacted", "no index", "damaged index"])
def broker(home: Path, clock: ManualClock, request: pytest.FixtureRequest) -> Iterator[Broker]:
    """480 messages of two queues in turns of 40, an hour apart, that lie in several places."""
    with opened(home, clock, seal_after_ms=0) as broker:
        if request.param == "log":
            _send(broker, clock, turns=12)
        else:
            fill(broker, turns=8 if request.param == "both" else 12)
        if request.param == "both":
            _send(broker, clock, turns=4, first=8)
        if request.param == "compacted":
            assert broker.compact()["compactions"] > 0
        for index in (home / "topics").rglob("*.index"):
            if request.param == "no index":
                index.unlink()
            if request.param == "damaged index":
                index.write_bytes(index.read_bytes()[:40])
        yield broker


def _send(broker: Broker, clock: ManualClock, *, turns: int, first: int = 0) -> None:
    broker.ensure_topic("t", queues=2)
    for turn in range(first, first + turns):
        keys = [[f"k{turn}", f"u{turn}-{i}"] for i in range(40)]
        broker.send("t", messages(40, start=40 * turn, body_bytes=1000, keys=keys))
        clock.advance(HOUR_MS)


def looked_for(broker: Broker, **wanted: Any) -> pa.Table:
    """The same found by looking at everything."""
    rows = []
    for row in everything(broker).to_pylist():
        if wanted.get("key") is not None and wanted["key"] not in row["keys"]:
            continue
        if wanted.get("message_id") not in (None, row["message_id"]):
            continue
        if not wanted.get("from_ms", 0) <= row["stored_at_ms"] < wanted.get("to_ms", 1 << 60):
            continue
        rows.append(row)
    rows.sort(key=lambda row: (row["stored_at_ms"], row["queue_id"], row["queue_offset"]))
    rows = rows[: wanted.get("limit", 100)]
    if not wanted.get("with_body"):
        rows = [{**row, "body": None} for row in rows]
    return pa.Table.from_pylist(rows, schema=schema.READ)


def test_messages_are_found_by_everything_they_are_known_by(broker: Broker) -> None:
    whole = everything(broker)
    assert whole.num_rows == 480
    ids, times = whole["message_id"].to_pylist(), sorted(set(whole["stored_at_ms"].to_pylist()))
    asked: list[dict[str, Any]] = [
        {"key": "u0-0"},
        {"key": "u11-39", "with_body": True},
        {"key": "k5"},
        {"key": "k9", "limit": 3},
        {"key": "none of them"},
        {"key": "none of them", "with_body": True},
        {"key": "k5", "message_id": ids[100]},
        {"key": "u0-0", "message_id": ids[-1]},
        *({"message_id": ids[at]} for at in (0, 1, 239, 240, 479)),
        {"message_id": "nobody's"},
        {"from_ms": times[3], "to_ms": times[5], "limit": 1000},
        {"from_ms": times[-1]},
        {"to_ms": times[0]},
        {"key": "k7", "from_ms": times[7] + 1},
        {"key": "k7", "from_ms": times[7], "to_ms": times[8], "limit": 7},
        {"key": "k7", "limit": 0},
    ]

    for wanted in asked:
        found = broker.find("t", **wanted)
        assert found.equals(looked_for(broker, **wanted)), wanted
        assert found.schema.equals(schema.READ)


NOT_UTF8: Final = b"\xff\x00\xfe"


@pytest.mark.parametrize("sealed", [0, 2, 4], ids=["log", "both", "sealed"])
def test_bodies_and_properties_are_read_wherever_they_lie(one_queue: Broker, sealed: int) -> None:
    for at in range(4):
        properties = pa.array([[("at", str(at))]], schema.PROPERTIES)
        sent = {"body": [NOT_UTF8 + bytes([at])], "keys": [["k"]], "properties": properties}
        one_queue.send("t", pa.table(sent))
        if at == sealed - 1:
            assert seal_all(one_queue)["segments"] > 0

    for wanted in ({"key": "k"}, {"from_ms": 0}):
        found = one_queue.find("t", **wanted, with_body=True)
        assert found["body"].to_pylist() == [NOT_UTF8 + bytes([at]) for at in range(4)]
        assert found["properties"].to_pylist() == [[("at", str(at))] for at in range(4)]
        assert one_queue.find("t", **wanted)["body"].null_count == 4


@pytest.mark.parametrize("sealed", [False, True])
def test_an_answer_with_bodies_is_limited_in_bytes(
    one_queue: Broker, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    one_queue.send("t", pa.table({"body": [bytes(1000)] * 200, "keys": [["k"]] * 200}))
    if sealed:
        assert seal_all(one_queue)["segments"] > 0

    for most, n in (
        (1, 1),
        (1000, 1),
        (2999, 2),
        (63_999, 63),
        (64_000, 64),
        (150_000, 150),
        (200_000, 200),
    ):
        monkeypatch.setattr(limits, "FIND_BYTES", most)
        found = one_queue.find("t", key="k", limit=200, with_body=True)
        assert found["queue_offset"].to_pylist() == list(range(n))
        assert found.schema.equals(schema.READ)
    assert one_queue.find("t", key="k", limit=200).num_rows == 200


@pytest.fixture
def one_queue(home: Path, clock: ManualClock) -> Iterator[Broker]:
    with opened(home, clock, compact_target_bytes=1 << 30, compact_min_inputs=2) as broker:
        broker.create_topic("t", queues=1)
        yield broker


def test_ids_that_do_not_ascend_are_found(one_queue: Broker) -> None:
    ids = [f"{(i * 7919) % 1000:04d}" for i in range(1000)]
    for start in range(0, 1000, 250):
        some = {"message_id": ids[start : start + 250]}
        one_queue.send("t", messages(250, start=start, body_bytes=5000, **some))
        seal_all(one_queue)
    assert one_queue.compact("t")["inputs"] > 1

    for at in range(0, 1000, 37):
        found = one_queue.find("t", message_id=ids[at])
        assert found["queue_offset"].to_pylist() == [at]


def test_expired_messages_are_not_found(one_queue: Broker, clock: ManualClock) -> None:
    one_queue.send("t", messages(3, keys=[["a"], ["b"], ["a"]]))
    clock.advance(HOUR_MS)
    seal_all(one_queue)
    one_queue.send("t", messages(1, keys=[["a"]]))
    one_queue.alter_topic("t", retention_ms=1000)
    one_queue.expire()

    assert one_queue.find("t", key="a")["queue_offset"].to_pylist() == [3]


@pytest.mark.parametrize(
    "wrong", [{}, {"limit": 5}, {"key": "a", "limit": -1}, {"key": "a", "limit": 100_001}]
)
def test_what_is_out_of_range_is_refused(one_queue: Broker, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.RequestError):
        one_queue.find("t", **wrong)
    with pytest.raises(errors.TopicNotFoundError):
        one_queue.find("nowhere", key="a")
