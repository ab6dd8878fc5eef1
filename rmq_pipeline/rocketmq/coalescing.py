"""Coalescing of small sends: the requests of one topic share one table per frame."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from rmq_pipeline.broker.decide.publish import Send, prepare_columns
from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.broker.work.duplicates import name_first
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import RequestError, RocketMQError
from rmq_pipeline.rocketmq.bridge import Bridge
from rmq_pipeline.rocketmq.decoding import Batch

#: A larger request gets a table of its own, so that it does not delay the small ones.
SMALL_ROWS: Final = 32
SMALL_BYTES: Final = 256 * 1024
#: Size limit of one table; the other requests go into the next.
_TABLE_ROWS: Final = 1024
_TABLE_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ids and offsets of the stored messages of a request, row for row."""

    message_id: list[str]
    queue_offset: list[int]
    #: None: no message is scheduled.
    recall_handle: list[str | None] | None


@dataclass(slots=True, eq=False)
class _Waiting:
    batch: Batch
    size: int
    done: "asyncio.Future[Outcome]"

    def accept(self, outcome: Outcome) -> None:
        if not self.done.done():  # else its caller has gone
            self.done.set_result(outcome)

    def refuse(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _InFlight(NamedTuple):
    """Requests of a topic that are sent as one table."""

    topic: str
    chosen: list[_Waiting]


class Coalescing:
    """Sends for coroutines of one event loop."""

    def __init__(self, engine: Engine, bridge: Bridge) -> None:
        self._engine = engine
        self._bridge = bridge
        #: By topic: requests that arrived during a send. A key means that a send is under way.
        self._waiting: dict[str, list[_Waiting]] = {}

    async def send(self, topic: str, batch: Batch) -> Outcome:
        """Store the messages of a request, all or none.

        Raises:
            RequestError: a message is invalid; other requests are stored all the same.
        """
        size = batch.size()
        if len(batch) > SMALL_ROWS or size > SMALL_BYTES:
            return await self._send_alone(topic, batch)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(batch, size, loop.create_future())
        pending = self._waiting.get(topic)
        if pending is not None:
            pending.append(waiting)
        else:
            self._waiting[topic] = [waiting]
            # The loop has yet to run other calls of this turn; call_soon lets them join the table.
            loop.call_soon(self._send_next, topic)
        return await waiting.done

    async def _send_alone(self, topic: str, batch: Batch) -> Outcome:
        sent: Sent = await self._bridge.submit(self._prepared(topic, batch))
        return await self._named(sent)

    def _prepared(self, topic: str, batch: Batch) -> Send:
        engine = self._engine
        engine.admit()
        return prepare_columns(
            engine.state.topic(topic).topic,
            batch.columns(),
            ids=engine.ids,
            delay_max_ms=engine.settings.delay_max_ms,
            now_ms=engine.clock.now_ms(),
            delay_levels_ms=engine.settings.delay_levels_ms,
        )

    def _send_next(self, topic: str) -> None:
        """Send the waiting requests of a topic; later ones wait until that send has ended."""
        pending = self._waiting[topic]
        if not pending:
            del self._waiting[topic]
            return
        chosen, self._waiting[topic] = _split(pending)
        in_flight = _InFlight(topic, chosen)
        try:
            batch = Batch.joined([waiting.batch for waiting in chosen])
            sending = self._bridge.submit(self._prepared(topic, batch))
        except Exception as error:  # noqa: BLE001 every error is the answer of the request
            self._bridge.start(partial(self._refuse, in_flight, error))
        else:
            sending.add_done_callback(partial(self._sent, in_flight))

    def _sent(self, in_flight: _InFlight, sending: "asyncio.Future[Sent]") -> None:
        try:
            sent = sending.result()
        except Exception as error:  # noqa: BLE001 every error is the answer of the request
            self._bridge.start(partial(self._refuse, in_flight, error))
            return
        if sent.unnamed is not None:
            self._bridge.start(partial(self._name, in_flight, sent))
            return
        try:
            _share(_outcome(sent), in_flight.chosen)
        finally:
            self._send_next(in_flight.topic)

    async def _refuse(self, in_flight: _InFlight, error: Exception) -> None:
        """Answer requests whose shared table was refused; nothing of it was stored.

        If one request may be the cause, send each by itself: they still share a frame. An error
        outside the broker's hierarchy may have such a cause, too.
        """
        topic, chosen = in_flight
        if len(chosen) > 1 and (
            isinstance(error, RequestError) or not isinstance(error, RocketMQError)
        ):
            await asyncio.gather(*(self._send_one(topic, waiting) for waiting in chosen))
        else:
            for waiting in chosen:
                waiting.refuse(error)
        self._send_next(topic)

    async def _name(self, in_flight: _InFlight, sent: Sent) -> None:
        try:
            outcome = await self._named(sent)
        except Exception as error:  # noqa: BLE001 every error is the answer of the requests
            for waiting in in_flight.chosen:
                waiting.refuse(error)
        else:
            _share(outcome, in_flight.chosen)
        self._send_next(in_flight.topic)

    async def _send_one(self, topic: str, waiting: _Waiting) -> None:
        """Send a request by itself, because another one in its table was refused."""
        try:
            outcome = await self._send_alone(topic, waiting.batch)
        except Exception as error:  # noqa: BLE001 every error is the answer of the request
            waiting.refuse(error)
        else:
            waiting.accept(outcome)

    async def _named(self, sent: Sent) -> Outcome:
        if sent.unnamed is not None:
            sent = await self._bridge.run(name_first, self._engine, sent)
        return _outcome(sent)


def _outcome(sent: Sent) -> Outcome:
    handles = None
    if sent.later is not None and np.any(sent.later):
        handles = sent.table().column("recall_handle").to_pylist()
    return Outcome(sent.message_id.to_pylist(), sent.queue_offset.tolist(), handles)


def _split(pending: list[_Waiting]) -> tuple[list[_Waiting], list[_Waiting]]:
    """Split off the first requests that fit into a table: at least one."""
    rows = size = 0
    for at, waiting in enumerate(pending):
        rows += len(waiting.batch)
        size += waiting.size
        if at and (rows > _TABLE_ROWS or size > _TABLE_BYTES):
            return pending[:at], pending[at:]
    return pending, []


def _share(whole: Outcome, chosen: list[_Waiting]) -> None:
    """Give each request its slice of the answer."""
    start = 0
    for waiting in chosen:
        rows = slice(start, start + len(waiting.batch))
        handles = whole.recall_handle
        part = Outcome(
            whole.message_id[rows],
            whole.queue_offset[rows],
            None if handles is None else handles[rows],
        )
        waiting.accept(part)
        start = rows.stop
