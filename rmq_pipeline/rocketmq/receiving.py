"""ReceiveMessage: a batch for a consumer, at once or after a long poll."""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from rmq_pipeline import receipt
from rmq_pipeline.broker.verbs.on_loop import UNREADABLE, Delivery, LoopReceive, receipts_of
from rmq_pipeline.errors import IllegalTopicError, InvisibleDurationError, RequestError
from rmq_pipeline.rocketmq.clients import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.encoding import (
    PROLONGED,
    Recent,
    copies,
    messages_of,
    places_of,
    timestamp,
)
from rmq_pipeline.rocketmq.leases import LEASE_MS
from rmq_pipeline.rocketmq.protocol import (
    OK,
    Code,
    FilterType,
    ReceiveMessageRequest,
    ReceiveMessageResponse,
    Status,
)

#: Receivers whose last attempt is remembered; a client has one receiver for each queue it reads.
KEPT: Final = 4096


class Receiver(NamedTuple):
    """Sender of one sequence of attempts: a client that reads a queue for a group."""

    client_id: str
    group: str
    topic: str
    queue_id: int


class Attempts:
    """The last attempt of every receiver that got messages, and the calls under way.

    A reply may be lost. The client then repeats the call with the same attempt id. Without this
    table it would wait for messages, or message groups, that it has leased itself. The earlier call
    may still be running without knowing that its client left; what it leases later is released.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self.last: OrderedDict[Receiver, tuple[str, Delivery]] = OrderedDict()
        self.running: dict[tuple[Receiver, str], Attempt] = {}


class Attempt:
    """One call of an attempt; it supersedes an earlier call with the same attempt id."""

    def __init__(self, attempts: Attempts, receiver: Receiver, *, attempt_id: str) -> None:
        self._attempts = attempts
        self.receiver = receiver
        self.attempt_id = attempt_id
        if attempt_id:
            attempts.running[receiver, attempt_id] = self

    def is_current(self) -> bool:
        """Return True unless a later call repeats the attempt; always True without an id."""
        running = self._attempts.running
        return not self.attempt_id or running.get((self.receiver, self.attempt_id)) is self

    def before(self) -> Delivery | None:
        """Return what an earlier call of the attempt leased."""
        attempt_id, delivery = self._attempts.last.get(self.receiver, ("", None))
        return delivery if attempt_id == self.attempt_id else None

    def leased(self, delivery: Delivery) -> None:
        """Remember a delivery in place of the earlier one: a repeated call returns it."""
        if not self.attempt_id:
            return
        last = self._attempts.last
        last[self.receiver] = self.attempt_id, delivery
        last.move_to_end(self.receiver)
        if len(last) > self._attempts.kept:
            last.popitem(last=False)

    def released(self) -> None:
        """Forget the delivery, because it was released or settled."""
        if self.before() is not None:
            del self._attempts.last[self.receiver]

    def end(self) -> None:
        """Unregister the call."""
        if self.attempt_id and self.is_current():
            del self._attempts.running[self.receiver, self.attempt_id]


#: Messages of one answer.
BATCH: Final = 32
INVISIBLE_MIN_MS: Final = 10_000
#: Default and maximum duration of a long poll.
POLL_MS: Final = 20_000
#: Part of the client's deadline that is left for the answer's way.
_MARGIN_MS: Final = 300
#: The loop encodes smaller batches itself.
_SMALL_BYTES: Final = 1 << 20
#: A few new messages often go to many groups, so their encoding is cached; larger batches rarely
#: do.
_SHARED: Final = 8
_EMPTY: Final = Status(code=Code.MESSAGE_NOT_FOUND, message="no new message")


def duration_ms(duration: Any) -> int:
    """Return the protocol's Duration or Timestamp in ms, unchecked."""
    return int(duration.seconds) * 1000 + int(duration.nanos) // 1_000_000


def poll_ms(request: Any, caller: Caller) -> int:
    """Return how long a call may wait: as requested, and short enough for the client's deadline."""
    asked = POLL_MS
    if request.HasField("long_polling_timeout"):
        asked = min(POLL_MS, max(0, duration_ms(request.long_polling_timeout)))
    remaining = caller.remaining_ms()
    return asked if remaining is None else max(0, min(asked, remaining - _MARGIN_MS))


def filter_of(expression: Any) -> tuple[str, str]:
    """Return a filter as the broker takes it: the expression, and ``tag`` or ``sql92``."""
    kind = "sql92" if expression.type == FilterType.SQL else "tag"
    return expression.expression or ("*" if kind == "tag" else ""), kind


class Receiving:
    """Handler of the receives of all consumers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._attempts = Attempts()
        self._recent = Recent()

    async def receive_message(
        self, request: ReceiveMessageRequest, caller: Caller
    ) -> AsyncGenerator[Any, None]:
        """Yield a status, the messages, and the time of delivery.

        If the caller goes before it has read all of them, the whole batch is released.
        """
        # Begin before anything is awaited: of two calls of one attempt the later one counts.
        queue = request.message_queue
        topic, group = caller.named(queue.topic), caller.named(request.group)
        receiver = Receiver(caller.client_id, group, topic, queue.id)
        attempt = Attempt(self._attempts, receiver, attempt_id=request.attempt_id)
        try:
            receive = await self._asked(request, caller, attempt=attempt)
            delivery = await self._again(receive.request.invisible_duration_ms, attempt)
            if delivery is None:
                delivery = await self._lease(receive, attempt)
            if delivery is None:
                yield ReceiveMessageResponse(status=_EMPTY)
                yield self._delivered_now()
                return
            handles: list[str] = []
            sent = False
            try:
                delivery, found = await self._readable(delivery, queue.topic, receive=receive)
                handles = [message.system_properties.receipt_handle for message in found]
                if request.auto_renew:
                    self._context.leases.hold(caller.client_id, handles)
                yield ReceiveMessageResponse(status=OK)
                for message in found:
                    yield ReceiveMessageResponse(message=message)
                yield self._delivered_now()
                sent = True
            finally:
                # A later call of the same attempt, if there is one, has these messages.
                if not sent and attempt.is_current():
                    self._release_undelivered(delivery, handles, attempt=attempt)
        finally:
            attempt.end()

    def _release_undelivered(
        self, delivery: Delivery, handles: Sequence[str], *, attempt: Attempt
    ) -> None:
        """Release a delivery that did not reach its caller."""
        attempt.released()
        for handle in handles:
            self._context.leases.settled(attempt.receiver.client_id, handle)
        self._context.bridge.release(delivery)

    def _delivered_now(self) -> Any:
        now = timestamp(self._context.clock.now_ms())
        return ReceiveMessageResponse(delivery_timestamp=now)

    async def _asked(
        self, request: ReceiveMessageRequest, caller: Caller, *, attempt: Attempt
    ) -> LoopReceive:
        context, topic, group = self._context, attempt.receiver.topic, attempt.receiver.group
        if not request.message_queue.topic.name:
            raise IllegalTopicError("The topic has no name.")
        context.bridge.engine.state.topic(topic)
        wanted, filter_type = filter_of(request.filter_expression)
        if request.batch_size < 1:
            raise RequestError(f"batch_size {request.batch_size} must be at least 1.")
        invisible_ms = _invisible_ms(request)
        await context.groups.ensure(group, [topic])
        return context.bridge.receive(
            topic,
            group=group,
            limit=min(BATCH, request.batch_size),
            invisible_ms=invisible_ms,
            filter=wanted,
            filter_type=filter_type,
            client_id=caller.client_id,
            attempt_id=request.attempt_id,
            bits=PROLONGED if request.auto_renew else 0,
            until_ms=context.clock.now_ms() + poll_ms(request, caller),
            wanted=attempt.is_current,
        )

    async def _again(self, duration_ms: int, attempt: Attempt) -> Delivery | None:
        """Renew the unsettled leases of the attempt's earlier call; None if there are none."""
        before = attempt.before()
        if before is None or not attempt.is_current():  # a later call has its messages
            return None
        try:
            again = await self._context.bridge.renew_delivery(before, duration_ms)
        except BaseException:  # release them, as if this call had leased them
            if attempt.is_current():
                handles = receipt.encode(receipts_of(before)).to_pylist()
                self._release_undelivered(before, handles, attempt=attempt)
            raise
        if again is None:
            attempt.released()
        return again

    async def _lease(self, receive: LoopReceive, attempt: Attempt) -> Delivery | None:
        """Lease messages, waiting for them if need be; None if none came in time."""
        delivery = await receive.lease()
        if not attempt.is_current():  # a later call of the attempt gets the messages
            if delivery is not None:
                self._context.bridge.release(delivery)
            return None
        if delivery is not None:
            attempt.leased(delivery)
        elif self._context.clock.now_ms() < receive.until_ms:
            self._context.bridge.check_open()
        return delivery

    async def _readable(
        self, delivery: Delivery, topic: Any, *, receive: LoopReceive
    ) -> tuple[Delivery, list[Any]]:
        """Return the readable part of a delivery, and its messages."""
        request = receive.request
        read = partial(self._messages, topic=topic, group=request.group, name=request.topic)
        try:
            return delivery, await read(delivery)
        except UNREADABLE:
            rest = await self._context.bridge.sorted_out(delivery, receive.request)
            return rest, await read(rest) if len(rest) else []

    async def _messages(
        self, delivery: Delivery, topic: Any, *, group: str, name: str
    ) -> list[Any]:
        bridge = self._context.bridge
        meter = bridge.engine.meter
        kind = self._context.bridge.engine.state.topic(name).topic.type
        places = places_of(delivery) if len(delivery) <= _SHARED else []
        known: list[Any] = [self._recent.get(place) for place in places]
        if known and all(known):
            size = sum(len(message.body) for message in known)  # few and small
            meter.delivered(group, name, size=size)
            return copies(known, delivery, topic=topic)
        table = await bridge.read(delivery)
        meter.delivered(group, name, size=table["body"])
        encode = partial(messages_of, topic=topic, type=kind, name=name)
        if table.nbytes >= _SMALL_BYTES:
            return await bridge.run(encode, table)
        found = encode(table)
        for place, message in zip(places, found, strict=False):
            self._recent.put(place, message)
        return found


def _invisible_ms(request: ReceiveMessageRequest) -> int:
    """Return the invisible duration: the requested one, or LEASE_MS where the broker renews it.

    Raises:
        InvisibleDurationError: it is shorter than the endpoint allows.
    """
    if request.auto_renew:
        return LEASE_MS
    asked = duration_ms(request.invisible_duration)
    if asked < INVISIBLE_MIN_MS:
        raise InvisibleDurationError(
            f"The invisible duration of {asked} ms is below the minimum of {INVISIBLE_MIN_MS} ms.",
            remedy="Use a longer duration.",
        )
    return asked
