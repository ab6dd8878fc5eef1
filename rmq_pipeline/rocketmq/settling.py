"""AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue."""

import asyncio
import logging
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from rmq_pipeline.broker.verbs.on_loop import Bridge
from rmq_pipeline.errors import ReceiptHandleError, RequestError, RocketMQError
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.rocketmq.clients import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.encoding import PROLONGED, Handle, parse
from rmq_pipeline.rocketmq.protocol import (
    OK,
    AckMessageRequest,
    AckMessageResponse,
    AckMessageResultEntry,
    ChangeInvisibleDurationRequest,
    ChangeInvisibleDurationResponse,
    ClientType,
    Code,
    ForwardMessageToDeadLetterQueueRequest,
    ForwardMessageToDeadLetterQueueResponse,
    Status,
    status_of,
)
from rmq_pipeline.rocketmq.receiving import duration_ms

log = logging.getLogger(__name__)

#: A push consumer that reports a failure with a shorter delay has misread its settings; the
#: group's own backoff applies.
_NO_DELAY_MS: Final = 1000
_PUSH: Final = (ClientType.PUSH_CONSUMER, ClientType.LITE_PUSH_CONSUMER)
#: A client that pipelines its acks has more of them on their way: the endpoint waits this long to
#: put them into the same frame.
_GATHER_S: Final = 0.002
#: Acks of one request.
_ENTRIES: Final = 10_000
_MIXED: Final = Status(code=Code.MULTIPLE_RESULTS, message="entries have different results")


class Settling:
    """Handlers of acks, changed lease ends and dead letters."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._acks = _Acks(context.bridge)

    async def ack_message(self, request: AckMessageRequest, caller: Caller) -> Any:
        """Ack each entry on its own; the overall status is theirs if all have the same."""
        entries, leases = request.entries, self._context.leases
        if not 1 <= len(entries) <= _ENTRIES:
            raise RequestError(f"An ack needs 1 to {_ENTRIES} entries, not {len(entries)}.")
        rows = [self._row(entry.receipt_handle, request, caller=caller) for entry in entries]
        sound = [row for row in rows if row is not None]
        done = iter(await self._acks.settle(sound, caller.client_id)) if sound else iter(())
        results = [OK if row is not None and next(done) else _refused() for row in rows]
        for entry, status in zip(entries, results, strict=True):
            if status is OK:
                leases.settled(caller.client_id, entry.receipt_handle)
        mixed = len({status.code for status in results}) > 1
        return AckMessageResponse(
            status=_MIXED if mixed else results[0],
            entries=[
                AckMessageResultEntry(
                    message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=status
                )
                for entry, status in zip(entries, results, strict=True)
            ],
        )

    async def change_invisible_duration(
        self, request: ChangeInvisibleDurationRequest, caller: Caller
    ) -> Any:
        """Change the end of a lease and return its new handle; after an error, the old one."""
        handle = request.receipt_handle
        try:
            renewed = await self._changed(request, caller)
        except RocketMQError as error:
            return ChangeInvisibleDurationResponse(status=status_of(error), receipt_handle=handle)
        self._context.leases.settled(caller.client_id, handle)
        return ChangeInvisibleDurationResponse(status=OK, receipt_handle=renewed)

    async def _changed(self, request: ChangeInvisibleDurationRequest, caller: Caller) -> str:
        row = self._row(request.receipt_handle, request, caller=caller)
        if row is None:
            raise _ended()
        asked = duration_ms(request.invisible_duration)
        deliveries = await self._context.bridge.change_invisible_duration(
            _receipts([row]),
            asked or 1,
            failed=lambda: asked < _NO_DELAY_MS and self._is_push(row, caller),
            bits=row.delivery & PROLONGED,
        )
        return row._replace(delivery=int(deliveries[0])).text()

    def _is_push(self, row: Handle, caller: Caller) -> bool:
        """Return whether a push consumer's listener failed; other consumers choose a delay.

        The handle still shows it after a restart of the broker, which forgets its clients.
        """
        if row.is_prolonged:
            return True
        client = self._context.clients.find(caller.client_id)
        return client is not None and client.type in _PUSH

    async def forward(self, request: ForwardMessageToDeadLetterQueueRequest, caller: Caller) -> Any:
        """Dead-letter a message that its client has tried often enough; release nothing else.

        A repeated call succeeds, and so does one for a lease that has ended. Clients repeat the
        call until it succeeds, and consume nothing else before.
        """
        if self._row(request.receipt_handle, request, caller=caller) is None:
            raise _ended()
        attempts = f"{request.delivery_attempt} of {request.max_delivery_attempts}"
        reason = f"failed in the client, attempt {attempts}"
        try:
            await self._context.bridge.forward(request.receipt_handle, reason=reason)
        except ReceiptHandleError as error:
            log.info(
                "a message to dead-letter was settled before: client=%s: %s",
                caller.client_id,
                error,
            )
        self._context.leases.settled(caller.client_id, request.receipt_handle)
        return ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _row(self, handle: str, request: Any, *, caller: Caller) -> Handle | None:
        """Return the fields of a handle if it belongs to the request's group and topic."""
        row = parse(handle)
        if row is None:
            return None
        state = self._context.bridge.engine.state
        group, topic = state.groups.get(row.group_id), state.topics.get(row.topic_id)
        if group is None or topic is None or group.name != caller.named(request.group):
            return None
        return row if topic.topic.name == caller.named(request.topic) else None


class _Waiting(NamedTuple):
    """An ack that has not been submitted yet."""

    rows: list[Handle]
    client_id: str
    answer: "asyncio.Future[list[bool]]"


class _Acks:
    """Acks of all callers: those that come while a frame is written share the next one."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._waiting: list[_Waiting] = []
        self._busy = False

    async def settle(self, rows: list[Handle], client_id: str) -> list[bool]:
        """Ack receipts and return for each whether it was valid."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(rows, client_id, loop.create_future())
        self._waiting.append(waiting)
        if not self._busy:
            self._busy = True
            loop.call_soon(self._next)  # other acks of this turn of the loop join
        return await waiting.answer

    def _next(self) -> None:
        some, self._waiting = self._waiting, []
        self._busy = bool(some)
        if not some:
            return
        try:
            settling = self._bridge.ack_each(_receipts([row for w in some for row in w.rows]))
        except Exception as error:  # noqa: BLE001 every error is the answer of the acks
            _refuse(some, error)
            self._next()
            return
        settling.add_done_callback(partial(self._answer, some))

    def _answer(self, some: list[_Waiting], settling: "asyncio.Future[Any]") -> None:
        self._tell(some, settling)
        if self._more_are_coming({waiting.client_id for waiting in some}):
            asyncio.get_running_loop().call_later(_GATHER_S, self._next)
        else:
            self._next()

    def _tell(self, some: list[_Waiting], settling: "asyncio.Future[Any]") -> None:
        error = settling.exception()
        if error is None:
            holds: list[bool] = settling.result().tolist()
            for waiting in some:
                if not waiting.answer.done():
                    waiting.answer.set_result(holds[: len(waiting.rows)])
                del holds[: len(waiting.rows)]
        elif len(some) > 1 and not isinstance(error, RocketMQError):
            # An error outside the broker's hierarchy may come from one of them: ack each by itself.
            for waiting in some:
                alone = self._bridge.ack_each(_receipts(waiting.rows))
                alone.add_done_callback(partial(self._tell, [waiting]))
        else:
            _refuse(some, error)

    def _more_are_coming(self, answered: set[str]) -> bool:
        """Return whether a client pipelines: it sent an ack before it had its last answer."""
        clients = [waiting.client_id for waiting in self._waiting]
        return len(set(clients)) < len(clients) or not answered.isdisjoint(clients)


def _refuse(some: list[_Waiting], error: BaseException) -> None:
    for waiting in some:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)


def _refused() -> Any:
    return status_of(_ended())


def _ended() -> ReceiptHandleError:
    return ReceiptHandleError(
        "The lease has ended or was settled, or the receipt belongs to another group."
    )


def _receipts(rows: list[Handle]) -> Receipts:
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), len(Handle._fields)).T
    delivery, queue_offset, queue_id, topic_id, group_id = columns
    return Receipts(
        group_id.astype(np.int32),
        topic_id.astype(np.int32),
        queue_id.astype(np.int32),
        queue_offset,
        delivery,
    )
