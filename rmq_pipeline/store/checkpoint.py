"""Checkpoints beside queries: DuckDB takes none while another transaction reads what it moves."""

import threading
import time
from collections.abc import Callable
from typing import Final

import duckdb

from rmq_pipeline.store.query_runner import QueryRunner

#: How long queries may go on before they are stopped; no other begins meanwhile.
_PATIENCE_S: Final = 5.0
#: How long reads of the broker itself are waited for after that, and how often.
_READS_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.01


def checkpoint(take: Callable[[], None], queries: QueryRunner) -> None:
    """Take a checkpoint; if need be between two queries, or instead of them.

    Raises:
        duckdb.Error: ``take`` failed for another reason, or something has read all the time.
    """
    if _is_taken(take):
        return
    with queries.paused(_PATIENCE_S):
        give_up_at = time.monotonic() + _READS_S
        pause = threading.Event()
        while time.monotonic() < give_up_at:
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
