"""A broker that kills itself between the step that exhausts a message and the one that buries it.

``python -m tests.chaos.dead_lettering`` runs it.
"""

import os
import signal
import sys
from pathlib import Path

import pyarrow as pa

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.clock import ManualClock
from tests.chaos.victim import SETTINGS


def run(home: Path, *, step: str) -> None:
    """Doom the first of three ordered messages; the second ``step`` is one of its burying."""
    left = 0

    def fault(name: str) -> None:
        nonlocal left
        if name == step and left:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    clock = ManualClock()
    engine = Engine.open(home, clock=clock, settings=SETTINGS, flush="sync", fault=fault)
    with Broker(engine, "none") as broker:
        broker.create_topic("orders", type="fifo", queues=1)
        broker.create_group("readers", order="message_group")
        bodies, groups = [b"0", b"1", b"2"], ["g"] * 3
        broker.send("orders", pa.table({"body": bodies, "message_group": groups}))
        got = broker.receive("readers", "orders", limit=1)
        left = 2
        broker.forward_to_dead_letter_queue(got, reason="odd")


if __name__ == "__main__":
    run(Path(sys.argv[1]), step=sys.argv[2])
