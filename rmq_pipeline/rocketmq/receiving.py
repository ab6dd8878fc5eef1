"""ReceiveMessage: a batch for a consumer, at once or after a long poll."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from rmq_pipeline import receipt
from rmq_pipeline.broker.decide.deliver import Delivery, Receive, receipts_of
from rmq_pipeline.broker.decide.settle_each import ReleaseEach, Renew
from rmq_pipeline.broker.work import arguments
from rmq_pipeline.broker.work.reading import delivered, part_of
from rmq_pipeline.broker.work.receive import begin, followers_of, load_missing
from rmq_pipeline.broker.work.unreadable import UNREADABLE, sorted_out
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
from rmq_pipeline.rocketmq.polls import Place, Watch
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
        self._kept = kept
        self._last: OrderedDict[Receiver, tuple[str, Delivery]] = OrderedDict()
        self._running: dict[tuple[Receiver, str], Attempt] = {}

    def begin(self, receiver: Receiver, attempt_id: str) -> "Attempt":
        """Register a call; it supersedes an earlier call with the same attempt id."""
        attempt = Attempt(self, receiver, attempt_id=attempt_id)
        if attempt_id:
            self._running[receiver, attempt_id] = attempt
        return attempt

    def is_current(self, attempt: "Attempt") -> bool:
        """Return True unless a later call repeats the attempt; always True without an id."""
        running = self._running.get((attempt.receiver, attempt.attempt_id))
        return not attempt.attempt_id or running is attempt

    def end(self, attempt: "Attempt") -> None:
        """Unregister a call."""
        if attempt.attempt_id and self.is_current(attempt):
            del self._running[attempt.receiver, attempt.attempt_id]

    def remember(self, attempt: "Attempt", delivery: Delivery) -> None:
        """Remember what an attempt leased, in place of the receiver's earlier attempt."""
        if not attempt.attempt_id:
            return
        self._last[attempt.receiver] = attempt.attempt_id, delivery
        self._last.move_to_end(attempt.receiver)
        if len(self._last) > self._kept:
            self._last.popitem(last=False)

    def forget(self, attempt: "Attempt") -> None:
        """Forget the delivery of an attempt, because it was released or settled."""
        if self.before(attempt) is not None:
            del self._last[attempt.receiver]

    def before(self, attempt: "Attempt") -> Delivery | None:
        """Return what an earlier call with the same attempt id leased."""
        attempt_id, delivery = self._last.get(attempt.receiver, ("", None))
        return delivery if attempt_id == attempt.attempt_id else None


class Attempt:
    """One call of an attempt."""

    def __init__(self, attempts: Attempts, receiver: Receiver, *, attempt_id: str) -> None:
        self._attempts = attempts
        self.receiver = receiver
        self.attempt_id = attempt_id

    @property
    def is_current(self) -> bool:
        """False once a later call repeats the attempt."""
        return self._attempts.is_current(self)

    def before(self) -> Delivery | None:
        """Return what an earlier call of the attempt leased."""
        return self._attempts.before(self)

    def leased(self, delivery: Delivery) -> None:
        """Remember a delivery, so that a repeated call returns it."""
        self._attempts.remember(self, delivery)

    def released(self) -> None:
        """Forget the delivery, because it was released or settled."""
        self._attempts.forget(self)

    def end(self) -> None:
        """Unregister the call."""
        self._attempts.end(self)


#: Messages of one answer.
BATCH: Final = 32
INVISIBLE_MIN_MS: Final = 10_000
#: Default and maximum duration of a long poll.
POLL_MS: Final = 20_000
#: Part of the client's deadline that is left for the answer's way.
_MARGIN_MS: Final = 300
#: Bodies in the newest bytes of the log are in the page cache: the loop may read them itself.
_HOT_BYTES: Final = 32 << 20
_SMALL_BYTES: Final = 1 << 20
#: A few new messages often go to many groups, so their encoding is cached; larger batches rarely
#: do.
_SHARED: Final = 8
_EMPTY: Final = Status(code=Code.MESSAGE_NOT_FOUND, message="no new message")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A decoded request: the broker's part, and where and until when to wait."""

    request: Receive
    place: Place
    until_ms: int


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
        attempt = self._attempts.begin(_receiver(request, caller), request.attempt_id)
        try:
            asked = await self._asked(request, caller)
            delivery = await self._again(asked, attempt) or await self._lease(asked, attempt)
            if delivery is None:
                yield ReceiveMessageResponse(status=_EMPTY)
                yield self._delivered_now()
                return
            handles: list[str] = []
            sent = False
            try:
                topic = request.message_queue.topic
                delivery, found = await self._readable(delivery, topic, asked=asked)
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
                if not sent and attempt.is_current:
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
        self._release(delivery)

    def _delivered_now(self) -> Any:
        now = timestamp(self._context.clock.now_ms())
        return ReceiveMessageResponse(delivery_timestamp=now)

    async def _asked(self, request: ReceiveMessageRequest, caller: Caller) -> _Asked:
        context = self._context
        topic, group = caller.named(request.message_queue.topic), caller.named(request.group)
        if not request.message_queue.topic.name:
            raise IllegalTopicError("The topic has no name.")
        found = context.engine.state.topic(topic).topic
        wanted, filter_type = filter_of(request.filter_expression)
        if request.batch_size < 1:
            raise RequestError(f"batch_size {request.batch_size} must be at least 1.")
        invisible_ms = _invisible_ms(request)
        await context.groups.ensure(group, [topic])
        receive = arguments.receive(
            context.engine,
            topic,
            group=group,
            limit=min(BATCH, request.batch_size),
            invisible_duration_ms=invisible_ms,
            filter=wanted,
            filter_type=filter_type,
            client_id=caller.client_id,
            window=None,
            attempt_id=request.attempt_id,
        )
        if request.auto_renew:
            receive = replace(receive, delivery=receive.delivery | PROLONGED)
        # Clients of a group share its messages, except those of lite topics.
        who = (filter_type, wanted, caller.client_id if found.type == "lite" else "")
        until_ms = context.clock.now_ms() + poll_ms(request, caller)
        return _Asked(receive, self._place(receive, who), until_ms)

    def _place(self, request: Receive, who: Hashable) -> Place:
        """Return the place where a receive waits.

        Raises:
            NotFoundError: its topic or its group was deleted.
        """
        state = self._context.engine.state
        topic, group = state.topic(request.topic).topic, state.group(request.group)
        return Place(topic.topic_id, group.group_id, who)

    async def _again(self, asked: _Asked, attempt: Attempt) -> Delivery | None:
        """Renew the unsettled leases of the attempt's earlier call; None if there are none."""
        before = attempt.before()
        if before is None or not attempt.is_current:  # a later call has its messages
            return None
        renewal = Renew(receipts_of(before), asked.request.invisible_duration_ms)
        try:
            holds = await self._context.bridge.submit(renewal)
        except BaseException:  # release them, as if this call had leased them
            if attempt.is_current:
                handles = receipt.encode(renewal.receipts).to_pylist()
                self._release_undelivered(before, handles, attempt=attempt)
            raise
        if not holds.any():
            attempt.released()
            return None
        return part_of(before, holds)

    async def _lease(self, asked: _Asked, attempt: Attempt) -> Delivery | None:
        """Lease messages, waiting for them if need be; None if none came in time."""
        polls = self._context.polls
        watch = polls.watch(asked.place)
        try:
            delivery = await self._found(asked, watch, attempt=attempt)
            if delivery is not None and not attempt.is_current:
                self._release(delivery)  # for the later call of the attempt, or for other clients
                delivery = None
        finally:
            watch.end()
        if delivery is not None:
            attempt.leased(delivery)
        return delivery

    async def _found(self, asked: _Asked, watch: Watch, *, attempt: Attempt) -> Delivery | None:
        polls, clock = self._context.polls, self._context.clock
        # Wakeups to pass on at the end. By default one: another poll looks after this wakeup, and
        # after the time at which a message becomes visible again. None after an empty look without
        # such a time. Two after a full batch, because a backlog then drains faster.
        owing = 1
        try:
            while attempt.is_current:  # a later call of the attempt gets the messages
                delivery = await self._try(asked.request)
                loaded = await self._load(delivery, asked.request)
                if len(delivery):
                    owing = followers_of(delivery, asked.request, loaded=loaded)
                    return delivery
                if loaded or delivery.scanned_out:
                    continue
                owing = int(delivery.next_visible_ms is not None)
                if clock.now_ms() >= asked.until_ms:
                    return None
                polls.check_open()
                place = self._place(asked.request, asked.place.who)
                if place != asked.place:  # the topic or the group was deleted and created again
                    asked = replace(asked, place=place)
                    watch.move(place)
                    continue
                at_ms = asked.until_ms
                if delivery.next_visible_ms is not None:
                    at_ms = min(at_ms, delivery.next_visible_ms)
                await watch.wait(at_ms)
                owing = 1
            return None
        finally:
            for _ in range(owing):
                polls.wake_one(asked.place)

    async def _try(self, request: Receive) -> Delivery:
        begin(request)
        leasing = self._context.bridge.submit(request)
        try:
            delivery: Delivery = await asyncio.shield(leasing)
        except asyncio.CancelledError:  # the request may lease messages nevertheless
            leasing.add_done_callback(self._release_unwanted)
            raise
        return delivery

    async def _load(self, delivery: Delivery, request: Receive) -> bool:
        """Load what the receive lacked; return whether another try may find more."""
        if not (delivery.pages or delivery.backlogs or delivery.unjudged or delivery.exhausted):
            return False
        engine, run = self._context.engine, self._context.bridge.run
        try:
            return await run(load_missing, engine, delivery, row_filter=request.row_filter)
        except BaseException:
            self._release(delivery)
            raise

    async def _readable(
        self, delivery: Delivery, topic: Any, *, asked: _Asked
    ) -> tuple[Delivery, list[Any]]:
        """Return the readable part of a delivery, and its messages."""
        read = partial(self._messages, topic=topic, asked=asked)
        try:
            return delivery, await read(delivery)
        except UNREADABLE:
            engine, run = self._context.engine, self._context.bridge.run
            rest = await run(sorted_out, engine, delivery, request=asked.request)
            return rest, await read(rest) if len(rest) else []

    async def _messages(self, delivery: Delivery, topic: Any, *, asked: _Asked) -> list[Any]:
        engine, run, name = self._context.engine, self._context.bridge.run, asked.request.topic
        kind = engine.state.topic(name).topic.type
        encode = partial(messages_of, topic=topic, type=kind, name=name)
        hot = max(0, engine.log.synced - _HOT_BYTES)
        if any(int(taken.position.min()) < hot for _, taken in delivery.taken):
            return await run(lambda: encode(delivered(engine, delivery)))
        places = places_of(delivery) if len(delivery) <= _SHARED else []
        known = [self._recent.get(place) for place in places]
        if known and all(known):
            return copies(known, delivery, topic=topic)
        table: pa.Table = delivered(engine, delivery)
        if table.nbytes >= _SMALL_BYTES:
            return await run(encode, table)
        found = encode(table)
        for place, message in zip(places, found, strict=False):
            self._recent.put(place, message)
        return found

    async def _submit(self, request: ReleaseEach) -> None:
        await self._context.bridge.submit(request)

    def _release_unwanted(self, leasing: "asyncio.Future[Delivery]") -> None:
        """Release a delivery that was leased after its caller was gone."""
        if not leasing.cancelled() and leasing.exception() is None:
            self._release(leasing.result())

    def _release(self, delivery: Delivery) -> None:
        if len(delivery):
            request = ReleaseEach(receipts_of(delivery))
            self._context.bridge.start(lambda: self._submit(request))


def _receiver(request: ReceiveMessageRequest, caller: Caller) -> Receiver:
    queue = request.message_queue
    topic, group = caller.named(queue.topic), caller.named(request.group)
    return Receiver(caller.client_id, group, topic, queue.id)


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
