"""Small sends of many callers become one: a table for each topic and frame."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.sending.publish import Send, prepare_columns
from rmq_pipeline.broker.sending.repeating import name_first
from rmq_pipeline.broker.sending.sent import Sent
from rmq_pipeline.errors import RequestError, RocketMQError
from rmq_pipeline.rocketmq.bridge import Bridge
from rmq_pipeline.rocketmq.decoding import Batch

#: A request of more than this is a table of its own: it would hold up those that share it.
SMALL_ROWS: Final = 32
SMALL_BYTES: Final = 256 * 1024
#: One table takes at most so much; the rest goes into the next.
_TABLE_ROWS: Final = 1024
_TABLE_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where the messages of a request went, row for row."""

    message_id: list[str]
    queue_offset: list[int]
    #: None: none of them is scheduled.
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


class _Going(NamedTuple):
    """Requests of a topic that are sent as one."""

    topic: str
    chosen: list[_Waiting]


class Coalescing:
    """Sends for coroutines of one event loop."""

    def __init__(self, engine: Engine, bridge: Bridge) -> None:
        self._engine = engine
        self._bridge = bridge
        #: By topic: what has come while the send before is under way, which is there as its key.
        self._waiting: dict[str, list[_Waiting]] = {}

    async def send(self, topic: str, batch: Batch) -> Outcome:
        """Store the messages of a request, all or none.

        Raises:
            RequestError: a message is wrong; those of other requests are stored all the same.
        """
        size = batch.size()
        if len(batch) > SMALL_ROWS or size > SMALL_BYTES:
            return await self._send_alone(topic, batch)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(batch, size, loop.create_future())
        line = self._waiting.get(topic)
        if line is not None:
            line.append(waiting)
        else:
            self._waiting[topic] = [waiting]
            # Calls that have come are still on their way through the loop: they go with it.
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
        """Send what waits for a topic; what comes while it is under way is sent after it."""
        line = self._waiting[topic]
        if not line:
            del self._waiting[topic]
            return
        chosen, self._waiting[topic] = _fitting(line)
        going = _Going(topic, chosen)
        try:
            batch = Batch.joined([waiting.batch for waiting in chosen])
            sending = self._bridge.submit(self._prepared(topic, batch))
        except Exception as error:  # noqa: BLE001 whatever it was, it is the answer
            self._bridge.start(partial(self._refuse, going, error))
        else:
            sending.add_done_callback(partial(self._sent, going))

    def _sent(self, going: _Going, sending: "asyncio.Future[Sent]") -> None:
        try:
            sent = sending.result()
        except Exception as error:  # noqa: BLE001 whatever it was, it is the answer
            self._bridge.start(partial(self._refuse, going, error))
            return
        if sent.unnamed is not None:
            self._bridge.start(partial(self._name, going, sent))
            return
        try:
            _share(_outcome(sent), going.chosen)
        finally:
            self._send_next(going.topic)

    async def _refuse(self, going: _Going, error: Exception) -> None:
        """Tell all, but when one may be to blame try each by itself: they share a frame still.

        That may be of an error that nobody has foreseen, too; nothing was stored.
        """
        topic, chosen = going
        if len(chosen) > 1 and (
            isinstance(error, RequestError) or not isinstance(error, RocketMQError)
        ):
            await asyncio.gather(*(self._send_one(topic, waiting) for waiting in chosen))
        else:
            for waiting in chosen:
                waiting.refuse(error)
        self._send_next(topic)

    async def _name(self, going: _Going, sent: Sent) -> None:
        try:
            outcome = await self._named(sent)
        except Exception as error:  # noqa: BLE001 whatever it was, it is the answer to all
            for waiting in going.chosen:
                waiting.refuse(error)
        else:
            _share(outcome, going.chosen)
        self._send_next(going.topic)

    async def _send_one(self, topic: str, waiting: _Waiting) -> None:
        """A request by itself, as one of those beside it is refused; they share a frame still."""
        try:
            outcome = await self._send_alone(topic, waiting.batch)
        except Exception as error:  # noqa: BLE001 whatever it was, it is the answer
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


def _fitting(line: list[_Waiting]) -> tuple[list[_Waiting], list[_Waiting]]:
    """The first that fit into a table, at least one, and the others."""
    rows = size = 0
    for at, waiting in enumerate(line):
        rows += len(waiting.batch)
        size += waiting.size
        if at and (rows > _TABLE_ROWS or size > _TABLE_BYTES):
            return line[:at], line[at:]
    return line, []


def _share(whole: Outcome, chosen: list[_Waiting]) -> None:
    """Give each request its part of the answer."""
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
