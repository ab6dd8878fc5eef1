"""The engine of a window (Spark or threads), and the work it receives."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from rmq_pipeline.handling.batch import Batch
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.worked import Worked


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch, with the context that its walk needs."""

    rules: Rules
    batch: Batch
    #: State of its message groups; None if the consumer keeps no state, or no group has any.
    state: pa.Table | None
    sink: Path | None
    #: The window's epoch.
    epoch: int
    #: The previous window was never closed. A message may have killed its process, and must not
    #: kill the process of this window.
    is_suspect: bool = False


class Engine(Protocol):
    """Runs the handler on the parts of a micro-batch, and stages its sink files."""

    @property
    def first_rows(self) -> int:
        """Number of messages of the first batch, before the handler's speed is known."""
        ...

    @property
    def least_rows(self) -> int:
        """Minimum number of messages of a batch, however long a message takes."""
        ...

    @property
    def at_once(self) -> int:
        """Maximum number of parts that run concurrently."""
        ...

    def parts(self, rows: int) -> int:
        """Return the maximum number of parts for a batch of ``rows`` messages."""
        ...

    def task(self, work: Work, stopping: threading.Event) -> Callable[[], Worked]:
        """Prepare a task in the window's thread; the stage's thread then calls the task.

        Args:
            work: the micro-batch.
            stopping: set when the result is no longer needed.
        """
        ...
