"""A micro-batch that leaves more than one settle may hold is settled in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from rmq_pipeline import limits
from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer import window
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.results import BatchReport, WindowReport
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.settings import Settings

SINK: Final = pa.schema([("text", pa.string()), ("step", pa.int64()), ("born_at_ms", pa.int64())])
STATE: Final = pa.schema([("steps", pa.int64()), ("notes", pa.string())])


def noted(messages: pa.Table, state: pa.Table) -> Outcome:
    """A row, a published message and a state step for each; ``long…`` makes a long state."""
    before = state["steps"][0].as_py() if state.num_rows else 0
    texts = [body.decode() for body in messages["body"].to_pylist()]
    steps = list(range(before + 1, before + 1 + len(texts)))
    notes = "x" * 100_000 if any(text.startswith("long") for text in texts) else ""
    return Outcome(
        rows=pa.table([texts, steps, messages["born_at_ms"]], schema=SINK),
        state=pa.table({"steps": steps[-1:], "notes": [notes]}, schema=STATE),
        publish={"onward": pa.table({"body": messages["body"]})},
    )


def plain(messages: pa.Table, _: pa.Table) -> Outcome:
    """The same without order and state."""
    return Outcome(publish={"onward": pa.table({"body": messages["body"]})})


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic("steps", type="fifo", queues=1)
        broker.create_topic("onward", queues=1)
        broker.create_group("walkers", order="message_group", max_attempts=2, backoff_ms=[1])
        yield broker


def run(broker: Broker, folder: Path, **changes: Any) -> tuple[WindowReport, list[BatchReport]]:
    """A window that takes all there is at once, if it may."""
    settings: dict[str, Any] = {
        "name": "walkers",
        "topic": "steps",
        "group": "walkers",
        "handler": noted,
        "order_by": "message_group",
        "state": STATE,
        "sink": folder / "sink",
        "sink_schema": SINK,
        "publishes": ("onward",),
    }
    spec = ConsumerSpec(**{**settings, **changes})
    batches: list[BatchReport] = []
    report = window.run_window(
        spec, broker, owner="test", idle_s=0.2, parallelism=2, on_batch=batches.append
    )
    return report, batches


def send(broker: Broker, *bodies: str, groups: int) -> None:
    broker.send(
        "steps",
        pa.table(
            {
                "body": [body.encode() for body in bodies],
                "message_group": [f"g{i % groups}" for i in range(len(bodies))],
                "born_at_ms": [0] * len(bodies),
            }
        ),
    )


def onward(broker: Broker) -> list[str]:
    found = broker.read("onward", 0, offset=0, limit=1000)["body"].to_pylist()
    return [body.decode() for body in found]


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_what_is_too_much_for_one_settle_is_settled_in_parts(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    bodies = [str(i) for i in range(16)]
    send(broker, *bodies, groups=groups)
    monkeypatch.setattr(limits, "BATCH_ROWS", 5)

    report, batches = run(broker, tmp_path)

    assert (report.acked, report.retried, report.lost) == (16, 0, 0)
    assert sorted(onward(broker), key=int) == bodies
    assert len(batches) >= 4
    rows = sorted((int(r["text"]), r["step"]) for r in read_sink(tmp_path / "sink").to_pylist())
    assert rows == [(i, 1 + i // groups) for i in range(16)]
    # What was staged for the settle that was too large is gone.
    on_disk = sum(1 for _ in (tmp_path / "sink").rglob("*.parquet"))
    assert on_disk == report.files


def test_messages_without_order_are_settled_in_parts_too(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_group("all")
    bodies = [str(i) for i in range(16)]
    send(broker, *bodies, groups=16)
    monkeypatch.setattr(limits, "BATCH_ROWS", 5)
    changes = {"state": None, "order_by": None, "sink": None, "sink_schema": None}

    report, _ = run(broker, tmp_path, group="all", handler=plain, **changes)

    assert (report.acked, report.retried) == (16, 0)
    assert sorted(onward(broker), key=int) == bodies


def test_a_message_that_alone_leaves_too_much_fails_alone(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(broker, "0", "1", "long 2", "3", "4", "5", groups=3)
    monkeypatch.setattr(limits, "SETTLE_BYTES", 50_000)

    report, _ = run(broker, tmp_path)

    assert (report.acked, report.retried, report.dead_lettered) == (5, 1, 1)
    assert sorted(onward(broker)) == ["0", "1", "3", "4", "5"]
    (dead,) = broker.sql("SELECT reason FROM dead_letters")["reason"].to_pylist()
    assert "50000" in dead
    assert "state" in dead


def test_what_the_broker_finds_too_large_is_settled_in_parts(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame of the log has its own bound."""
    bodies = [f"{i}".ljust(2_000, "x") for i in range(32)]
    send(broker, *bodies, groups=32)
    monkeypatch.setattr("rmq_pipeline.store.log.commit_log.FRAME_BYTES_MAX", 20_000)

    report, _ = run(broker, tmp_path, max_batch=32)

    assert (report.acked, report.retried) == (32, 0)
    assert sorted(onward(broker)) == sorted(bodies)


def test_a_window_learns_how_much_a_settle_holds(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(broker, *(str(i) for i in range(200)), groups=200)
    monkeypatch.setattr(limits, "BATCH_ROWS", 20)

    report, batches = run(broker, tmp_path)

    assert report.acked == 200
    # The first one alone was cut; nothing was handled twice after it.
    assert max(batch.messages for batch in batches[4:]) <= 20
    assert len(batches) <= 25


def test_a_window_learns_from_a_refusal_of_the_broker(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not know the bound, so it goes by the number of messages."""
    send(broker, *(f"{i}".ljust(2_000, "x") for i in range(400)), groups=400)
    monkeypatch.setattr("rmq_pipeline.store.log.commit_log.FRAME_BYTES_MAX", 50_000)
    called: list[int] = []

    def counted(messages: pa.Table, state: pa.Table) -> Outcome:
        called.append(messages.num_rows)
        return noted(messages, state)

    report, batches = run(broker, tmp_path, handler=counted)

    assert report.acked == len(onward(broker)) == 400
    # Every batch of 8 times as many as the last one would be refused, and handled twice or more.
    assert sum(called) <= 400 + 200
    assert len(batches) <= 45


def test_a_state_that_is_too_large_after_an_upgrade_is_told_and_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A home may hold states of more than the limit: from before it, or from larger settings."""
    large = Settings(reserve_bytes=1 << 20, duckdb_memory_bytes=512 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=large) as broker:
        broker.create_topic("steps", type="fifo", queues=1)
        broker.create_topic("onward", queues=1)
        broker.create_group("walkers", order="message_group", max_attempts=2, backoff_ms=[1])
        send(broker, "0", "long 1", groups=2)
        assert run(broker, tmp_path)[0].acked == 2
    small = Settings(reserve_bytes=1 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=small) as broker:
        send(broker, "2", "long 3", groups=2)

        report, batches = run(broker, tmp_path)

        (dead,) = broker.sql("SELECT reason FROM dead_letters")["reason"].to_pylist()
        kept = broker.keyed_state(
            "walkers", "steps", message_groups=pa.table({"message_group": ["g1"]})
        )

    assert (report.acked, report.retried, report.dead_lettered) == (1, 1, 1)
    (told,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    for said in (told, dead):
        assert "message group g1 takes 100019 bytes" in said
        assert "65536" in said
        assert "raise the broker's setting duckdb_memory_bytes" in said
    assert "group=walkers" in told
    shown = [failure.traceback for batch in batches for failure in batch.failures]
    assert shown == [f"TooMuchError: {dead}"] * 2
    assert kept is not None
    assert kept["steps"].to_pylist() == [1]
