"""The check job: count and offer the checks of open half messages, and end exhausted ones."""

import logging
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.publish import Send, checked
from rmq_pipeline.broker.decide.transaction import GiveUp, PutOff, Sweep, Swept
from rmq_pipeline.broker.state.halves import Rows
from rmq_pipeline.broker.work.check_offers import NEW_OFFERS
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.transaction import COPIED, plain_columns, stored_halves
from rmq_pipeline.broker.work.unreadable import LeftOut, read_parts
from rmq_pipeline.broker.work.waiting import LongPoll
from rmq_pipeline.message import with_properties
from rmq_pipeline.topic import GIVEN_UP_TOPIC_ID, HALF_TOPIC_ID

log = logging.getLogger(__name__)

#: Most half messages that one frame counts, and that one frame ends as exhausted
#: (limits.STEP_BYTES).
_AT_ONCE: Final = 50_000
_GIVEN_UP_AT_ONCE: Final = 10_000


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
