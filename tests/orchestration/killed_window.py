"""A run of a consumer's window in a process of its own, which may be killed.

``python -m tests.orchestration.killed_window FLIGHT ROOT``: its handler stops at the first message
of group ``b`` and makes the file ROOT/at_work.
"""

import sys
import threading
from pathlib import Path

import pyarrow as pa

from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.consumer import python_consumer
from rmq_pipeline.orchestration.resources import BrokerResource
from tests.orchestration import counting

AT_WORK = "at_work"


def stuck(messages: pa.Table, state: pa.Table) -> Outcome:
    """As the counter's, but never done with group b."""
    if messages["message_group"][0].as_py() == "b":
        (Path(sys.argv[2]) / AT_WORK).touch()
        threading.Event().wait()
    return counting.handler(messages, state)


if __name__ == "__main__":
    consumer = counting.declared(python_consumer, max_batch=2)(stuck)
    counting.window(consumer, BrokerResource(address=sys.argv[1]), Path(sys.argv[2]))
