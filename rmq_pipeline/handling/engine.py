"""What works on a window's micro-batches: Spark, or threads; and what it is given."""

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
    """A micro-batch, and what is to be known for walking it."""

    rules: Rules
    batch: Batch
    #: The state of its message groups; None: the consumer keeps none, or nobody has any.
    state: pa.Table | None
    sink: Path | None
    #: The window's.
    epoch: int
    #: The window before never closed: a message may have ended its process, and must not end this
    #: window with it.
    is_suspect: bool = False


class Engine(Protocol):
    """Gives the parts of a micro-batch to the handler, and stages its sink files."""

    @property
    def first_rows(self) -> int:
        """How many messages to begin with, while nobody knows how long one takes."""
        ...

    @property
    def least_rows(self) -> int:
        """How many messages to take at least, whatever they take."""
        ...

    @property
    def at_once(self) -> int:
        """How many parts are worked on side by side, at most."""
        ...

    def parts(self, rows: int) -> int:
        """Into how many parts so many messages are cut, at most."""
        ...

    def task(self, work: Work, stopping: threading.Event) -> Callable[[], Worked]:
        """Get ready, in the window's thread; what is returned is called in a thread beside it.

        Args:
            work: the micro-batch.
            stopping: set when nobody wants the result any more.
        """
        ...
