"""Handlers whose tasks go wrong once their rows are staged; Spark's workers import this module.

What goes wrong goes wrong in the first attempt of a task only.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pyarrow as pa
from pyspark import TaskContext

from rmq_pipeline.handling import sink
from rmq_pipeline.handling.handler import Outcome
from tests.spark.handlers import placed

#: Whether this task has the message that is handled slowly.
_SLOW = threading.local()


_WHOLE: Any = sink.stage


def _staging_ends_with(fault: Callable[[], None]) -> None:
    """Run a function in this process after a file is written and before it is registered."""

    def stage(*args: Any, **named: Any) -> pa.Table:
        staged = _WHOLE(*args, **named)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            fault()
        return staged

    sink.stage = stage


def _raise() -> None:
    raise OSError("a fault after the file was written")


def _die() -> None:
    os._exit(9)


def _kill_executor() -> None:
    executor = next(each for each in psutil.Process().parents() if each.name() == "java")
    executor.kill()
    threading.Event().wait()


def _hang() -> None:
    if getattr(_SLOW, "here", False):
        threading.Event().wait()


def raises(messages: pa.Table, state: pa.Table) -> Outcome:
    """The task raises."""
    _staging_ends_with(_raise)
    return placed(messages, state)


def dies(messages: pa.Table, state: pa.Table) -> Outcome:
    """The Python worker dies."""
    _staging_ends_with(_die)
    return placed(messages, state)


def kills_executor(messages: pa.Table, state: pa.Table) -> Outcome:
    """The executor's JVM is killed."""
    _staging_ends_with(_kill_executor)
    return placed(messages, state)


def hangs(messages: pa.Table, state: pa.Table) -> Outcome:
    """The task of the message ``slow`` never ends, so that a copy of it is begun."""
    _staging_ends_with(_hang)
    _SLOW.here = b"slow" in messages["body"].to_pylist()
    return placed(messages, state)
