"""Long polls for checks: what is open still, with its message, for a producer or a checker."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import limits, schema, transaction
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.scheduling.readable import LeftOut, read_parts
from rmq_pipeline.broker.transactions.ending import stored_halves
from rmq_pipeline.broker.transactions.halves import Rows
from rmq_pipeline.broker.transactions.offers import NEW_OFFERS
from rmq_pipeline.broker.transactions.transaction import FindHalves, check_producer_group
from rmq_pipeline.errors import RequestError

log = logging.getLogger(__name__)

_READ: Final = ("message_id", "tag", "keys", "properties", "body", "born_at_ms", "stored_at_ms")
#: Offers change hands when a producer is gone for a while: then nobody rings.
_LOOK_AGAIN_MS: Final = 1_000
_NONE: Final = np.empty(0, dtype=np.int64)


def fetch_checks(
    engine: Engine,
    *,
    topics: Sequence[str] | None,
    producer_group: str | None,
    client_id: str,
    limit: int,
    wait_ms: int,
    window: tuple[str, int] | None,
) -> pa.Table:
    """Checks that wait to be asked, as schema.CHECK; empty when none came within ``wait_ms``.

    Raises:
        FencedError: the window has been taken over.
        TopicNotFoundError: one of the topics does not exist.
        RequestError: they are no list.
    """
    if producer_group is not None:
        check_producer_group(producer_group)
    if topics is not None and not isinstance(topics, list | tuple):
        # Doors ask for the rights to the topics of a list.
        raise RequestError(f"topics is a list of names, not {topics!r}.")
    state = engine.state
    topic_ids = None if topics is None else [state.topic(name).topic.topic_id for name in topics]
    deadline = engine.clock.now_ms() + wait_ms
    while True:
        version = engine.arrivals.version(NEW_OFFERS)
        if window is not None:  # before it takes any: those would be asked about much later
            engine.submit(FindHalves(_NONE, _NONE, window))
        now_ms = engine.clock.now_ms()
        taken = engine.offers.take(
            now_ms,
            producer_group=producer_group,
            topic_ids=topic_ids,
            limit=limit,
            window=window,
        )
        if taken:
            found = _all_described(engine, taken)
            if found.num_rows:
                log.info("checks given out: client=%s rows=%d", client_id, found.num_rows)
                return found
            continue
        if now_ms >= deadline or engine.arrivals.closed:
            return schema.CHECK.empty_table()
        wake = min(deadline, now_ms + _LOOK_AGAIN_MS)
        engine.arrivals.wait(NEW_OFFERS, version, at_ms=wake)


def _all_described(engine: Engine, taken: Mapping[str, Rows]) -> pa.Table:
    """Those of all producer groups; nobody has asked about any of them when that fails."""
    try:
        return pa.concat_tables(
            [_described(engine, rows, producer_group=name) for name, rows in taken.items()]
        )
    except Exception:
        for name, rows in taken.items():
            engine.offers.put_back(name, rows)
        raise


def _described(engine: Engine, rows: Rows, *, producer_group: str) -> pa.Table:
    """Those that are open still and can be read, as schema.CHECK."""
    open_rows, still, _ = engine.submit(FindHalves(rows["queue_offset"], rows["message_id_hash"]))
    there = np.isin(open_rows["target_topic_id"], list(engine.state.topics))
    rows = rows[still][there]
    if not len(rows):
        return schema.CHECK.empty_table()
    fitting, messages = _messages(engine, rows, producer_group=producer_group)
    rows = rows[fitting]
    ids = transaction.encode(rows["queue_offset"], rows["message_id_hash"])
    known = {
        "topic": _names(engine, rows),
        "transaction_id": ids,
        "producer_group": pa.repeat(pa.scalar(producer_group, pa.string()), len(rows)),
        "checks": pa.array(rows["checks"]),
    }
    columns = [known[n] if n in known else messages.column(n) for n in schema.CHECK.names]
    return pa.table(columns, schema=schema.CHECK)


def _messages(
    engine: Engine, rows: Rows, *, producer_group: str
) -> tuple[npt.NDArray[np.intp], pa.Table]:
    """The first rows that can be read, and their messages; what would be too much is offered again.

    What cannot be read is offered again with the next check.
    """
    left = np.ones(len(rows), dtype=np.bool_)

    def leave_out(left_out: LeftOut) -> None:
        left[left_out.rows] = False
        log.warning("%d half messages cannot be read: %s", len(left_out.rows), left_out.why)

    parts = read_parts(
        engine,
        stored_halves(rows),
        columns=_READ,
        bound_bytes=limits.STEP_BYTES,
        leave_out=leave_out,
    )
    fitting, messages = next(parts, (_NONE, schema.CHECK.empty_table()))
    left[fitting] = False
    if left.any():
        engine.offers.put_back(producer_group, rows[left])
    return fitting, messages


def _names(engine: Engine, rows: Rows) -> pa.Array:
    topics = engine.state.topics
    ids, of_row = np.unique(rows["target_topic_id"], return_inverse=True)
    names = [topics[topic_id].topic.name if topic_id in topics else None for topic_id in ids]
    return pa.array(names, pa.string()).take(pa.array(of_row))
