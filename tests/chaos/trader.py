"""A broker that kills itself at a step of a commit or of dispatch, while transactions go on.

What it was answered goes to a file, a line each. ``python -m tests.chaos.trader`` runs it.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.clock import ManualClock
from tests.chaos.victim import SETTINGS

ROUNDS = 20
PER_ROUND = 6
#: Every round is later by this; half messages are checked, and none is given up.
LATER_MS = 10_000


def ends(ids: list[str], resolution: str) -> pa.Table:
    """How these transactions end."""
    return pa.table({"transaction_id": ids, "resolution": [resolution] * len(ids)})


def run(home: Path, facts: Path, *, step: str, times: int) -> None:
    """Trade until ``step`` has come so many times."""
    left = times

    def fault(name: str) -> None:
        nonlocal left
        left -= name == step
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    clock = ManualClock()
    engine = Engine.open(home, clock=clock, settings=SETTINGS, flush="sync", fault=fault)
    descriptor = os.open(facts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, value: Any) -> None:
        os.write(descriptor, json.dumps([what, value]).encode() + b"\n")

    with Broker(engine, "none") as broker:
        broker.ensure_topic("trades", type="transaction", queues=2)
        for _ in range(ROUNDS):
            _round(broker, note)
            clock.advance(LATER_MS)
            engine.dispatched()


def _round(broker: Broker, note: Any) -> None:
    table = pa.table({"body": [os.urandom(3000) for _ in range(PER_ROUND)]})
    sent = broker.send_half("trades", table, producer_group="traders")
    ids = sent["transaction_id"].to_pylist()
    note("begun", dict(zip(ids, sent["message_id"].to_pylist(), strict=True)))
    for resolution, some in (("commit", ids[:2]), ("rollback", ids[2:4])):
        note("trying", dict.fromkeys(some, resolution))
        broker.end_transactions(ends(some, resolution))
        note(resolution, some)
    broker.check_transactions()
    asked = broker.fetch_checks()["transaction_id"].to_pylist()
    note("trying", dict.fromkeys(asked, "commit"))
    broker.end_transactions(ends(asked, "commit"))
    note("commit", asked)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), step=sys.argv[3], times=int(sys.argv[4]))
