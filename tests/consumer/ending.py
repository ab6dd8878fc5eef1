"""A handler that ends its process over one message, and one window of it in a process of its own.

``python -m tests.consumer.ending FLIGHT``
"""

import os
import sys
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.handler import Handler, Outcome
from rmq_pipeline.handling.results import WindowReport
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.verbs import Verbs

TOPIC, GROUP = "steps", "walkers"
#: What a process ends with that the handler has ended.
CODE: Final = 3
#: State of a message group: how many messages were handled.
STATE: Final = pa.schema([("seen", pa.int64())])


def ending(messages: pa.Table, state: pa.Table) -> Outcome:
    """Count, but end the process over the body ``end``."""
    if b"end" in messages["body"].to_pylist():
        os._exit(CODE)
    seen = messages.num_rows + (state["seen"][0].as_py() if state.num_rows else 0)
    return Outcome(state=pa.table({"seen": [seen]}, schema=STATE))


@dataclass(frozen=True)
class Declared:
    """As a decorator leaves it: the name is that of what holds the handler."""

    spec: ConsumerSpec


def spec(handler: Handler) -> ConsumerSpec:
    """A consumer of one state."""
    return ConsumerSpec(
        name="walkers",
        topic=TOPIC,
        group=GROUP,
        handler=handler,
        order_by="message_group",
        state=STATE,
    )


def window(handler: Handler, verbs: Verbs, *, owner: str) -> WindowReport:
    """Run one window, also if another process has the last one."""
    return run_window(spec(handler), verbs, owner=owner, idle_s=0.2, parallelism=2, takeover=True)


@lambda handler: Declared(spec(handler))
def decorated(messages: pa.Table, state: pa.Table) -> Outcome:
    """The same, made into a consumer."""
    return ending(messages, state)


if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        window(ending, client, owner=f"run {os.getpid()}")
