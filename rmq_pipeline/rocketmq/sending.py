"""SendMessage and RecallMessage."""

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.work import arguments, transaction
from rmq_pipeline.errors import IllegalTopicError, MessageCorruptedError, RequestError
from rmq_pipeline.rocketmq import decoding
from rmq_pipeline.rocketmq.caller import Caller
from rmq_pipeline.rocketmq.coalescing import Coalescing, Outcome
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.protocol import (
    Code,
    MessageType,
    RecallMessageResponse,
    SendMessageResponse,
)
from rmq_pipeline.rocketmq.status import OK
from rmq_pipeline.rocketmq.transactions import producer_group
from rmq_pipeline.topic import DLQ_PREFIX, is_system

_TRANSACTION: Final = int(MessageType.TRANSACTION)
_STORED: Final = int(Code.OK)


class Sending:
    """Handlers of the producers' calls."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._coalescing = Coalescing(context.engine, context.bridge)

    async def send_message(self, request: Any, caller: Caller) -> Any:
        """Store the messages of a request, all or none; the reply has an entry for each."""
        keeps_hosts = self._context.settings.grpc_born_hosts
        batch = decoding.Batch.of(request.messages, keeps_hosts=keeps_hosts)
        topic = _topic_of(batch.messages, caller)
        kinds = batch.kinds()
        declared = self._context.engine.state.topic(topic).topic.type
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
        engine = self._context.engine
        engine.admit()
        request = transaction.prepare(
            engine,
            topic,
            messages=batch.table(),
            producer_group=producer_group(topic),
            immunity_ms=self._immunity_ms(batch.properties),
        )
        stored = await self._context.bridge.submit(request)
        columns = (stored.column(name) for name in ("message_id", "transaction_id", "queue_offset"))
        response = SendMessageResponse(status=OK)
        for one, id_, offset in zip(*(column.to_pylist() for column in columns), strict=True):
            response.entries.add(status=OK, message_id=one, transaction_id=id_, offset=offset)
        return response

    def _immunity_ms(self, properties: Sequence[Any]) -> int:
        """Return the immunity of half messages: the requested one, or the setting's.

        Raises:
            RequestError: the messages differ in it, or it is out of range.
        """
        name = "orphaned_transaction_recovery_duration"
        given = {getattr(p, name).ToMilliseconds() if p.HasField(name) else 0 for p in properties}
        if len(given) > 1:
            raise RequestError("The half messages of a request differ in their recovery duration.")
        return arguments.immunity_ms(given.pop() or self._context.settings.transaction_immunity_ms)

    async def recall_message(self, request: Any, caller: Caller) -> Any:
        """Recall a scheduled message."""
        topic = caller.named(request.topic)
        self._context.engine.state.topic(topic)
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
