"""Moving due scheduled messages to their topics, and recalling messages before that.

An unreadable message is delayed, and the others are delivered without it.
"""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import limits, receipt, schema
from rmq_pipeline.broker.decide.publish import Send, checked
from rmq_pipeline.broker.decide.schedule import (
    Deliver,
    FindDue,
    FindScheduled,
    PutOff,
    Recall,
    refuse_recall,
)
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.state.schedule import Scheduled, keys_of
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import fetch
from rmq_pipeline.broker.work.unreadable import LeftOut, Stored, read_parts
from rmq_pipeline.broker.work.waiting import LongPoll
from rmq_pipeline.message import Int64s, hash64
from rmq_pipeline.tables import columns_of, contiguous
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID, TIMER_QUEUE

log = logging.getLogger(__name__)

_FOREIGN: Final = "Use the recall_handle of a send to this topic, at this broker."

_COLUMNS = (
    "message_id",
    "tag",
    "keys",
    "message_group",
    "properties",
    "body",
    "born_at_ms",
    "deliver_at_ms",
)
#: Most due messages looked up together. A send may have stored messages of many delivery times in
#: one section; with more messages a look-up, that section is read less often.
_FOUND_AT_ONCE = 200_000
#: Most bytes read at a time, copied and sorted: memory holds three times this.
READ_BYTES = 16 * limits.MIB
#: Most messages that one frame delivers, because other requests wait for the frame.
_FRAME_ROWS = 10_000


class DeliveryReport:
    """Report of one run of deliver_scheduled."""

    def __init__(self) -> None:
        self.delivered = 0
        self.dropped = 0
        self._per_level: dict[str, int] = {}
        self._lateness: list[Int64s] = []

    def add(self, rows: Scheduled, dropped: int, *, lateness: Int64s) -> None:
        """Count one frame."""
        self.delivered += len(rows)
        self.dropped += dropped
        self._lateness.append(lateness)
        for queue_id, n in zip(*np.unique(rows.queue_id, return_counts=True), strict=True):
            level = (
                "time" if queue_id == TIMER_QUEUE else str(queue_id + int(queue_id < TIMER_QUEUE))
            )
            self._per_level[level] = self._per_level.get(level, 0) + int(n)

    def describe(self, next_due_ms: int | None) -> dict[str, Any]:
        """Return the report for JSON; lateness in ms after the requested time."""
        late = np.concatenate(self._lateness) if self._lateness else np.zeros(0)
        quantiles = np.quantile(late, [0.5, 0.99, 1.0]).tolist() if len(late) else [0.0] * 3
        return {
            "delivered": self.delivered,
            "dropped": self.dropped,
            "per_level": self._per_level,
            "lateness_ms": dict(zip(("p50", "p99", "max"), quantiles, strict=True)),
            "next_due_ms": next_due_ms,
        }


def deliver_scheduled(
    engine: Engine, *, wait_ms: int, limit: int, window: tuple[str, int] | None
) -> dict[str, Any]:
    """Deliver the messages due now or within ``wait_ms``, each at its time.

    Returns:
        The report of DeliveryReport.describe.

    Raises:
        FencedError: a newer epoch has opened the window.
    """
    report = DeliveryReport()
    poll = LongPoll(engine.wakeups, wait_ms=wait_ms)
    while True:
        poll.look(SCHEDULE_TOPIC_ID)
        rows, next_due_ms = engine.submit(FindDue(min(_FOUND_AT_ONCE, limit), window))
        if len(rows):
            _deliver_found(engine, rows, window=window, report=report)
            if report.delivered + report.dropped < limit:
                continue
            next_due_ms = engine.submit(FindDue(0, window))[1]
        if report.delivered >= limit or poll.is_over:
            return report.describe(next_due_ms)
        poll.wait(until_ms=next_due_ms)


def _deliver_found(
    engine: Engine, rows: Scheduled, *, window: tuple[str, int] | None, report: DeliveryReport
) -> None:
    """Read these rows in parts and deliver them; delay the unreadable ones."""
    places = Places(rows.position, rows.row)
    for part, messages in read_parts(
        engine,
        Stored(SCHEDULE_TOPIC_ID, rows.queue_id, rows.queue_offset, places),
        columns=_COLUMNS,
        bound_bytes=READ_BYTES,
        leave_out=partial(_put_off, engine, rows=rows, window=window),
    ):
        _deliver_part(engine, rows.take(part), messages=messages, window=window, report=report)


def _put_off(
    engine: Engine, left_out: LeftOut, *, rows: Scheduled, window: tuple[str, int] | None
) -> None:
    """Delay unreadable messages; log each once."""
    some = rows.take(left_out.rows)
    if new := engine.submit(PutOff(some, left_out.alone, window)):
        log.error(
            "%d scheduled messages that are due cannot be read, and are tried again later",
            new,
            exc_info=left_out.why,
        )


def _deliver_part(
    engine: Engine,
    rows: Scheduled,
    *,
    messages: pa.Table,
    window: tuple[str, int] | None,
    report: DeliveryReport,
) -> None:
    """Deliver these rows, frame by frame."""
    for start in range(0, len(rows), _FRAME_ROWS):
        some = rows.take(slice(start, start + _FRAME_ROWS))
        sends = _sends(engine, some, messages=messages.slice(start, len(some)))
        moved, dropped, lateness = engine.submit(Deliver(some, tuple(sends), window))
        report.add(moved, dropped, lateness=lateness)


def _sends(engine: Engine, rows: Scheduled, *, messages: pa.Table) -> Iterator[tuple[Int64s, Send]]:
    """Yield for each target topic its rows, and the send of their copies."""
    now_ms = engine.clock.now_ms()
    for topic_id in np.unique(rows.target_topic_id).tolist():
        target = engine.state.topics.get(topic_id)
        if target is None:
            continue
        at = np.flatnonzero(rows.target_topic_id == topic_id)
        part = messages if len(at) == len(rows) else messages.take(pa.array(at))
        columns = {name: contiguous(part.column(name)) for name in _COLUMNS}
        columns["delivered_at"] = columns["deliver_at_ms"]
        columns["delay_level"] = pa.nulls(len(at), pa.int32())
        columns["deliver_at_ms"] = pa.nulls(len(at), pa.int64())
        send = checked(
            target.topic,
            columns,
            ids=engine.ids,
            delay_max_ms=engine.settings.delay_max_ms,
            now_ms=now_ms,
        )
        yield at, send


def recall(engine: Engine, topic: str, *, handles: pa.Table) -> pa.Table:
    """Recall scheduled messages of a topic, all of them or none.

    Returns:
        schema.RECALLED, in the order of the handles.

    Raises:
        RecallError: a message was delivered or recalled before, is of another topic, or is unknown.
    """
    texts = columns_of(handles, schema.RECALL)["recall_handle"]
    wanted = receipt.decode_recall(texts)
    topic_id = engine.state.topic(topic).topic.topic_id
    if not len(wanted):
        return schema.RECALLED.empty_table()
    refuse_recall(wanted.topic_id != topic_id, what=f"it is not of topic {topic}", remedy=_FOREIGN)
    keys = keys_of(wanted.queue_id, wanted.queue_offset)
    refuse_recall(_repeated(keys), what="it is given twice", remedy="Give each handle once.")
    found: tuple[Scheduled, npt.NDArray[np.bool_]] = engine.submit(FindScheduled(keys))
    rows, still = found
    refuse_recall(~still)
    ids = fetch(
        engine,
        Places(rows.position, rows.row),
        columns=("message_id",),
        topic_id=SCHEDULE_TOPIC_ID,
        queue_id=rows.queue_id,
        offset=rows.queue_offset,
    ).column("message_id")
    message_id = pa.concat_arrays(ids.chunks)
    other = hash64(message_id) != wanted.message_id_hash
    refuse_recall(
        other | (rows.target_topic_id != topic_id),
        what="no such message is scheduled",
        remedy=_FOREIGN,
    )
    engine.submit(Recall(rows))
    return pa.Table.from_arrays([texts, message_id], schema=schema.RECALLED)


def _repeated(keys: Int64s) -> npt.NDArray[np.bool_]:
    repeated = np.ones(len(keys), dtype=np.bool_)
    repeated[np.unique(keys, return_index=True)[1]] = False
    return repeated
