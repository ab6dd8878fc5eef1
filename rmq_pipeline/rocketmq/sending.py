"""SendMessage and RecallMessage."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.verbs.on_loop import Bridge, Sent
from rmq_pipeline.errors import (
    IllegalTopicError,
    MessageCorruptedError,
    RequestError,
    RocketMQError,
)
from rmq_pipeline.rocketmq import decoding
from rmq_pipeline.rocketmq.clients import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.decoding import Batch
from rmq_pipeline.rocketmq.protocol import (
    OK,
    Code,
    MessageType,
    RecallMessageResponse,
    SendMessageResponse,
)
from rmq_pipeline.rocketmq.transactions import producer_group
from rmq_pipeline.topic import DLQ_PREFIX, is_system

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

    def __init__(self, bridge: Bridge) -> None:
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
        sent = await self._bridge.send(topic, batch.columns())
        return _outcome(await self._bridge.named(sent))

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
            sending = self._bridge.send(topic, batch.columns())
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
            outcome = _outcome(await self._bridge.named(sent))
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


_TRANSACTION: Final = int(MessageType.TRANSACTION)
_STORED: Final = int(Code.OK)


class Sending:
    """Handlers of the producers' calls."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._coalescing = Coalescing(context.bridge)

    async def send_message(self, request: Any, caller: Caller) -> Any:
        """Store the messages of a request, all or none; the reply has an entry for each."""
        keeps_hosts = self._context.settings.grpc_born_hosts
        batch = decoding.Batch.of(request.messages, keeps_hosts=keeps_hosts)
        topic = _topic_of(batch.messages, caller)
        kinds = batch.kinds()
        declared = self._context.bridge.engine.state.topic(topic).topic.type
        decoding.check_types(kinds, declared, topic=topic)
        if batch.is_packed():
            batch = await self._context.bridge.run(batch.unpacked)
        if _TRANSACTION not in kinds:
            return _stored(await self._coalescing.send(topic, batch))
        if len(kinds) > 1:
            raise RequestError("The request mixes half messages with other messages.")
        self._context.clients.transacts(caller, topic, resource=batch.messages[0].topic)
        return await self._send_half(topic, batch)

    async def _send_half(self, topic: str, batch: decoding.Batch) -> Any:
        self._context.bridge.engine.admit()
        stored = await self._context.bridge.send_half(
            topic,
            batch.table(),
            producer_group=producer_group(topic),
            immunity_ms=self._immunity_ms(batch.properties),
        )
        columns = (stored.column(name) for name in ("message_id", "transaction_id", "queue_offset"))
        response = SendMessageResponse(status=OK)
        for one, id_, offset in zip(*(column.to_pylist() for column in columns), strict=True):
            response.entries.add(status=OK, message_id=one, transaction_id=id_, offset=offset)
        return response

    def _immunity_ms(self, properties: Sequence[Any]) -> int:
        """Return the immunity of half messages: the requested one, or the setting's.

        Raises:
            RequestError: the messages differ in it.
        """
        name = "orphaned_transaction_recovery_duration"
        given = {getattr(p, name).ToMilliseconds() if p.HasField(name) else 0 for p in properties}
        if len(given) > 1:
            raise RequestError("The half messages of a request differ in their recovery duration.")
        return given.pop() or self._context.settings.transaction_immunity_ms

    async def recall_message(self, request: Any, caller: Caller) -> Any:
        """Recall a scheduled message."""
        topic = caller.named(request.topic)
        self._context.bridge.engine.state.topic(topic)
        recalled = await self._context.bridge.run(
            self._context.broker.recall,
            topic,
            pa.table([[request.recall_handle]], schema=schema.RECALL),
        )
        return RecallMessageResponse(status=OK, message_id=recalled.column("message_id")[0].as_py())


def _topic_of(messages: Sequence[Any], caller: Caller) -> str:
    """Return the topic of the messages.

    Raises:
        IllegalTopicError: the topic has no name, or clients may not send to it.
        MessageCorruptedError: there is no message, or there are several topics.
    """
    if not messages:
        raise MessageCorruptedError("The request has no message.")
    first = messages[0].topic
    if not first.name:
        raise IllegalTopicError("The topic has no name.")
    topic = caller.named(first)
    if is_system(topic) or topic.startswith(DLQ_PREFIX):
        raise IllegalTopicError(f"Topic {topic} takes no messages from clients.")
    if len(messages) > 1 and any(message.topic != first for message in messages):
        raise MessageCorruptedError("The messages of a request are for several topics.")
    return topic


def _stored(outcome: Outcome) -> Any:
    """Return an entry for each message; a plain message's ``transaction_id`` is its message id."""
    response = SendMessageResponse(status=OK)
    add = response.entries.add
    for message_id, offset in zip(outcome.message_id, outcome.queue_offset, strict=True):
        entry = add(message_id=message_id, transaction_id=message_id, offset=offset)
        entry.status.code = _STORED
    if outcome.recall_handle is not None:
        for entry, handle in zip(response.entries, outcome.recall_handle, strict=True):
            entry.recall_handle = handle or ""
    return response
