"""Redrives of dead letters and effects of messages: folding them in dispatch, and reading them."""

from typing import Final

import duckdb
import numpy as np
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.statements import named

#: Events that may change the outcome of a redrive; the first lease does not.
_OUTCOMES: Final = frozenset(
    {
        Kind.LEASE,
        Kind.ACK,
        Kind.RETRY,
        Kind.EXPIRE,
        Kind.DEAD_LETTER,
        Kind.PARK,
        Kind.RESET,
        Kind.TOPIC_DELETED,
        Kind.GROUP_DELETED,
    }
)
#: Old effects are deleted at most once per interval of the log's time.
_FORGET_EVERY_MS: Final = 60_000


class RedriveFold:
    """Applies the events of a dispatch transaction to store.redrives and store.effects."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        #: True if a redrive has no final outcome yet; None: unknown.
        self._open: bool | None = None
        self._forgotten_at_ms = 0

    def forget(self) -> None:
        """Discard what was cached during a transaction that was rolled back."""
        self._open = None

    def take(self, kinds: frozenset[int], at_ms: int) -> None:
        """Apply staged_events; ``kinds`` are its kinds, ``at_ms`` the time of its last event."""
        if Kind.REDRIVEN in kinds:
            self._run("insert_redrives")
            self._open = True
        if _OUTCOMES & kinds and self._has_open():
            self._run("fold_redrives")
            self._run("set_redrive_outcomes")
            self._open = None
        if Kind.EFFECT in kinds:
            self._run("insert_effects")
            if at_ms - self._forgotten_at_ms >= _FORGET_EVERY_MS:
                window = limits.IDEMPOTENCY_WINDOW_MS
                self._run("forget_effects", {"at_ms": at_ms, "usual_ms": window})
                self._forgotten_at_ms = at_ms

    def _has_open(self) -> bool:
        if self._open is None:
            ((count,),) = self._connection.sql(named("count_open_redrives")).fetchall()
            self._open = count > 0
        return self._open

    def _run(self, name: str, params: dict[str, int] | None = None) -> None:
        self._connection.execute(named(name), params)


def origins(
    cursor: duckdb.DuckDBPyConnection, *, topic_id: int, queue_id: Int32s, queue_offset: Int64s
) -> pa.Table:
    """Return the origins of dead letters; see Database.dead_letter_origins."""
    asked = {
        "queue_id": queue_id,
        "queue_offset": queue_offset,
        "ordinal": np.arange(len(queue_id)),
    }
    cursor.register("asked_places", pa.table(asked))
    params = {"topic_id": topic_id}
    return cursor.sql(named("dead_letter_origins"), params=params).to_arrow_table()


def seen(
    cursor: duckdb.DuckDBPyConnection, *, group_id: int, keys: pa.Array, after_ms: int
) -> pa.Array:
    """Return when each key last had an effect after ``after_ms``; null if never."""
    numbered = {"idempotency_key": keys, "ordinal": np.arange(len(keys))}
    cursor.register("asked_keys", pa.table(numbered))
    params = {"group_id": group_id, "after_ms": after_ms}
    found = cursor.sql(named("effects_seen"), params=params).to_arrow_table()
    when = np.full(len(keys), -1, dtype=np.int64)
    when[found.column("ordinal").to_numpy()] = found.column("seen_at_ms").to_numpy()
    return pa.array(when, mask=when < 0)
