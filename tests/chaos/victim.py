"""A broker that kills itself at a step of a commit or of dispatch, while it is used.

What it was answered goes to a file, a line each: what the next broker is held to.
"""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.clock import SystemClock
from rmq_pipeline.settings import Settings

MIB = 1 << 20
SETTINGS = Settings(log_file_bytes=MIB, reserve_bytes=MIB)
#: Everything is sealed at once, and merged; there is a snapshot each time.
ARCHIVING = SETTINGS.model_copy(
    update={
        "seal_after_ms": 0,
        "compact_min_inputs": 2,
        "replaced_grace_ms": 0,
        "snapshot_every_ms": 0,
        "snapshot_events": 50,
    }
)
ROUNDS = 60
GROUPS = 3
#: Every so many rounds several callers send at the same time what is decided ahead of a write.
BULK_EVERY = 10
ARCHIVE_EVERY = 4
BULK_ROWS = 300
CALLERS = 3
#: Time that a write waits for the frame after it: a disk in memory is faster than that.
STAGED_WITHIN_S = 0.02


def run(
    *, home: str, facts: str, step: str, times: int, rounds: int = ROUNDS, archive: bool = False
) -> None:
    """Use the home's broker until ``step`` has come so many times.

    Args:
        archive: seal, compact and take snapshots now and then.
    """
    left = times
    writing = False
    staged = threading.Event()

    def fault(name: str) -> None:
        nonlocal left, writing
        if name in ("before_write", "written"):
            writing = name == "before_write"
        if step == "staged_ahead" and name == "before_write":
            staged.clear()
            staged.wait(STAGED_WITHIN_S)
        if name == "staged":
            staged.set()
        if name == step or (step == "staged_ahead" and name == "staged" and writing):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    engine = Engine.open(
        Path(home),
        clock=SystemClock(),
        settings=ARCHIVING if archive else SETTINGS,
        flush="sync",
        fault=fault,
    )
    descriptor = os.open(facts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(**fact: Any) -> None:
        os.write(descriptor, json.dumps(fact).encode() + b"\n")

    with Broker(engine, "none") as broker:
        _prepare(broker)
        for turn in range(rounds):
            _send(broker, turn, note=note)
            if turn % BULK_EVERY == 0:
                _send_at_once(broker, turn, note=note)
            _consume(broker, turn, note=note)
            # Dispatch takes part in every round, not only when it is a quarter of a second behind.
            engine.dispatched()
            if archive and turn % ARCHIVE_EVERY == ARCHIVE_EVERY - 1:
                broker.seal()
                broker.compact()
                broker.expire()


def _prepare(broker: Broker) -> None:
    broker.ensure_topic("plain", queues=3)
    broker.ensure_topic("ordered", type="fifo", queues=2)
    broker.ensure_group("readers", max_attempts=100)
    broker.ensure_group("followers", order="message_group", max_attempts=100)


def _send(broker: Broker, turn: int, *, note: Any) -> None:
    single = [f"{turn}:".encode() + os.urandom(500)]
    many = [f"{turn}.{i}:".encode() + os.urandom(4000) for i in range(20)]
    for bodies in (single, many):
        sent = broker.send("plain", pa.table({"body": bodies, "keys": [["k"]] * len(bodies)}))
        note(sent="plain", rows=_rows(bodies, sent))
    bodies = [f"{turn}.{i}".encode() for i in range(9)]
    groups = [f"g{i % GROUPS}" for i in range(9)]
    sent = broker.send("ordered", pa.table({"body": bodies, "message_group": groups}))
    note(sent="ordered", rows=_rows(bodies, sent))


def _send_at_once(broker: Broker, turn: int, *, note: Any) -> None:
    def send(caller: int) -> None:
        for part in range(4):
            name = f"{turn}.{caller}.{part}"
            bodies = [f"{name}.{i}:".encode() + os.urandom(200) for i in range(BULK_ROWS)]
            sent = broker.send("plain", pa.table({"body": bodies}))
            note(sent="plain", rows=_rows(bodies, sent))

    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(send, range(CALLERS)))


def _rows(bodies: list[bytes], sent: pa.Table) -> list[list[Any]]:
    return [
        [body.hex(), row["message_id"], row["queue_id"], row["queue_offset"]]
        for body, row in zip(bodies, sent.to_pylist(), strict=True)
    ]


def _consume(broker: Broker, turn: int, *, note: Any) -> None:
    got = broker.receive("readers", "plain", limit=12, invisible_duration_ms=300_000)
    ids, handles = got["message_id"].to_pylist(), got["receipt_handle"].to_pylist()
    note(trying=ids[:8])
    broker.ack(handles[:8])
    note(acked=ids[:8])
    got = broker.receive("followers", "ordered", limit=6, invisible_duration_ms=300_000)
    ids, n = got["message_id"].to_pylist(), got.num_rows
    outcomes = {"receipt_handle": got["receipt_handle"], "outcome": ["ack"] * n}
    note(trying=ids, state=turn)
    broker.settle(
        "followers",
        pa.table(outcomes),
        state=pa.table({"message_group": ["g0", "g1"], "turn": [turn, turn]}),
        topic="ordered",
    )
    note(acked=ids, state=turn)
