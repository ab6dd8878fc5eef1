"""Checkpoints of DuckDB while queries run: no transaction may read the data that it moves."""

import threading
from collections.abc import Callable
from typing import Final

import duckdb

from rmq_pipeline.clock import Deadline
from rmq_pipeline.store.query.runner import QueryRunner

#: Time for running queries to end before they are interrupted; new queries wait.
_PATIENCE_S: Final = 5.0
#: Time to wait for the broker's own reads after that, and the retry interval.
_READS_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.01


def checkpoint(take: Callable[[], None], queries: QueryRunner) -> None:
    """Take a checkpoint; if a query is in its way, pause or interrupt the queries.

    Raises:
        duckdb.Error: ``take`` failed for another reason, or reads blocked it until the time limit.
    """
    if _is_taken(take):
        return
    with queries.paused(_PATIENCE_S):
        deadline = Deadline(_READS_S)
        pause = threading.Event()
        while not deadline.is_over:
            if _is_taken(take):
                return
            pause.wait(_LOOK_EVERY_S)
        take()


def _is_taken(take: Callable[[], None]) -> bool:
    try:
        take()
    except duckdb.TransactionException:
        return False
    return True
