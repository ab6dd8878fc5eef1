"""Checks of open half messages: the job that offers them, and the calls that fetch them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import limits, schema, transaction
from rmq_pipeline.broker.decide.publish import Send, checked
from rmq_pipeline.broker.decide.transaction import FindHalves, GiveUp, PutOff, Sweep, Swept
from rmq_pipeline.broker.state.halves import Rows
from rmq_pipeline.broker.work.check_offers import NEW_OFFERS
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.transaction import (
    COPIED,
    check_producer_group,
    plain_columns,
    stored_halves,
)
from rmq_pipeline.broker.work.unreadable import LeftOut, read_parts
from rmq_pipeline.broker.work.waiting import LongPoll, waits_no_more
from rmq_pipeline.errors import RequestError
from rmq_pipeline.message import with_properties
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import GIVEN_UP_TOPIC_ID, HALF_TOPIC_ID

log = logging.getLogger(__name__)

#: Most half messages that one frame counts, and that one frame ends as exhausted
#: (limits.STEP_BYTES).
_AT_ONCE: Final = 50_000
_GIVEN_UP_AT_ONCE: Final = 10_000
_READ: Final = ("message_id", "tag", "keys", "properties", "body", "born_at_ms", "stored_at_ms")
#: An offer passes to other callers when its producer is gone for a while; no wakeup reports that.
_LOOK_AGAIN_MS: Final = 1_000
_NONE: Final = np.empty(0, dtype=np.int64)


def check_transactions(
    engine: Engine, *, wait_ms: int, limit: int, window: tuple[str, int] | None
) -> dict[str, Any]:
    """Count and offer the checks that are due now or within ``wait_ms``.

    Returns:
        checked (offered, counted or not), given_up, dropped, next_due_ms.

    Raises:
        FencedError: a newer epoch has opened the window.
    """
    done = {"checked": 0, "given_up": 0, "dropped": 0}
    poll = LongPoll(engine.wakeups, wait_ms=wait_ms)
    while True:
        poll.look(HALF_TOPIC_ID)
        left = limit - sum(done.values())
        swept = _sweep(engine, left, window=window)
        done["checked"] += len(swept.asked)
        done["dropped"] += swept.dropped
        done["given_up"] += _give_up(engine, swept)
        if len(swept) and sum(done.values()) < limit:
            continue
        if sum(done.values()) >= limit or poll.is_over:
            return {**done, "next_due_ms": swept.next_due_ms}
        poll.wait(until_ms=swept.next_due_ms)


def _sweep(engine: Engine, limit: int, *, window: tuple[str, int] | None) -> Swept:
    settings = engine.settings
    request = Sweep(
        limit=min(_AT_ONCE, limit),
        check_max=settings.transaction_check_max,
        interval_ms=settings.transaction_check_interval_ms,
        window=window,
        waiting=engine.offers.waiting(engine.clock.now_ms(), windows=engine.state.windows),
    )
    swept: Swept = engine.submit(request)
    for name, mask in swept.producers.items():
        engine.offers.offer(name, swept.asked[mask], now_ms=swept.at_ms)
    if swept.is_all:  # the older offers left belong to half messages that have ended
        engine.offers.forget(swept.at_ms)
    if len(swept.asked):
        engine.wakeups.send({NEW_OFFERS: None})
    return swept


def _give_up(engine: Engine, swept: Swept) -> int:
    """End the exhausted half messages; return how many."""
    given_up = 0
    names = np.full(len(swept.exhausted), "", dtype=object)
    for name, mask in swept.exhausted_of.items():
        names[mask] = name
    for start in range(0, len(swept.exhausted), _GIVEN_UP_AT_ONCE):
        at_once = slice(start, start + _GIVEN_UP_AT_ONCE)
        some, of_some = swept.exhausted[at_once], names[at_once]
        for part, messages in _read_parts(engine, some):
            copies = _copies(engine, some[part], messages=messages, producer_groups=of_some[part])
            given_up += engine.submit(GiveUp(some[part], copies))
    return given_up


def _read_parts(engine: Engine, rows: Rows) -> Iterator[tuple[npt.NDArray[np.intp], pa.Table]]:
    """Yield parts of these half messages, a frame each; delay the unreadable ones."""

    def put_off(left_out: LeftOut) -> None:
        if new := engine.submit(PutOff(rows["queue_offset"][left_out.rows])):
            log.error(
                "%d half messages cannot be read; they are ended when they can be read be",
                new,
                exc_info=left_out.why,
            )

    return read_parts(
        engine,
        stored_halves(rows),
        columns=COPIED,
        bound_bytes=limits.STEP_BYTES,
        leave_out=put_off,
    )


def _copies(engine: Engine, rows: Rows, *, messages: pa.Table, producer_groups: np.ndarray) -> Send:
    """Return the send that copies these half messages to TRANS_CHECK_MAX_TIME_TOPIC."""
    columns = plain_columns(messages)
    topics = engine.state.topics
    names = {t: topics[t].topic.name for t in np.unique(rows["target_topic_id"]) if t in topics}
    targets = [names.get(topic_id, "") for topic_id in rows["target_topic_id"].tolist()]
    added = {
        "REAL_TOPIC": pa.array(targets, pa.string()),
        "PGROUP": pa.array(producer_groups, pa.string()),
        "TRANSACTION_CHECK_TIMES": pa.array(rows["checks"]).cast(pa.string()),
    }
    columns["properties"] = with_properties(columns["properties"], added)
    return checked(
        topics[GIVEN_UP_TOPIC_ID].topic,
        columns,
        ids=engine.ids,
        delay_max_ms=engine.settings.delay_max_ms,
        now_ms=engine.clock.now_ms(),
    )


def fetch_checks(
    engine: Engine,
    *,
    topics: Sequence[str] | None,
    producer_group: str | None,
    client_id: str,
    limit: int,
    wait_ms: int,
    window: tuple[str, int] | None,
    holder: str,
) -> pa.Table:
    """Return waiting checks as schema.CHECK; empty if none came within ``wait_ms``.

    Raises:
        FencedError: a newer epoch has opened the window.
        TopicNotFoundError: one of the topics does not exist.
        RequestError: ``topics`` is not a list.
    """
    if producer_group is not None:
        check_producer_group(producer_group)
    if topics is not None and not isinstance(topics, list | tuple):
        # Endpoints check the access rights of a list's topics only.
        raise RequestError(f"topics must be a list of names, not {topics!r}.")
    state = engine.state
    topic_ids = None if topics is None else [state.topic(name).topic.topic_id for name in topics]
    poll = LongPoll(engine.wakeups, wait_ms=wait_ms)
    while True:
        now_ms = poll.look(NEW_OFFERS)
        if window is not None:  # a fenced caller must take none
            engine.submit(FindHalves(_NONE, _NONE, window))
        if waits_no_more():
            return schema.CHECK.empty_table()
        taken = engine.offers.take(
            now_ms,
            producer_group=producer_group,
            topic_ids=topic_ids,
            limit=limit,
            window=window,
            holder=holder,
        )
        if taken:
            found = _all_described(engine, taken)
            if found.num_rows:
                log.info("checks sent: client=%s rows=%d", client_id, found.num_rows)
                return found
            continue
        if poll.is_over:
            return schema.CHECK.empty_table()
        poll.wait(until_ms=now_ms + _LOOK_AGAIN_MS)


def keep_checks(engine: Engine, holder: str, *, checks: pa.Table | None) -> int:
    """Hold checks of open half messages for a caller; return how many it has.

    Args:
        engine: of the broker.
        holder: has these checks and no others from now on.
        checks: schema.CHECK_ID; None for what the holder was given last.

    Raises:
        TransactionNotFoundError: an id was not made by a broker.
    """
    offsets = None
    if checks is not None:
        ids = columns_of(checks, schema.CHECK_ID)["transaction_id"]
        open_rows, _, _ = engine.submit(FindHalves(*transaction.decode(ids)))
        offsets = open_rows["queue_offset"]
    return engine.offers.keep(holder, engine.clock.now_ms(), offsets=offsets)


def _all_described(engine: Engine, taken: Mapping[str, Rows]) -> pa.Table:
    """Return the checks of all producer groups; on an error, put all of them back."""
    try:
        return pa.concat_tables(
            [_described(engine, rows, producer_group=name) for name, rows in taken.items()]
        )
    except Exception:
        for name, rows in taken.items():
            engine.offers.put_back(name, rows)
        raise


def _described(engine: Engine, rows: Rows, *, producer_group: str) -> pa.Table:
    """Return the checks that are open and readable, as schema.CHECK."""
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
    """Return the first readable rows and their messages, limits.STEP_BYTES at most.

    The rows beyond the limit are offered again. An unreadable one is offered at its next check.
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
