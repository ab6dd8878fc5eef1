"""Verbs for coroutines of one event loop, which none of them blocks.

The gRPC endpoint calls them. They are the verbs of a single message or receipt: the requests of
one turn of the loop share a frame, and a receive waits without a thread.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa
from typing_extensions import override

from rmq_pipeline.broker.decide.deliver import Delivery, Receive, receipts_of
from rmq_pipeline.broker.decide.group_offsets import CommittedOffset, Offsets
from rmq_pipeline.broker.decide.members import SyncLiteSubscription
from rmq_pipeline.broker.decide.publish import prepare
from rmq_pipeline.broker.decide.request import Request
from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.broker.decide.settle import Mask
from rmq_pipeline.broker.decide.settle_each import AckEach, ChangeInvisible, ReleaseEach, Renew
from rmq_pipeline.broker.decide.transaction import TargetsOf
from rmq_pipeline.broker.state.members import check_client, check_names
from rmq_pipeline.broker.work import arguments, transaction
from rmq_pipeline.broker.work.arguments import check_readable
from rmq_pipeline.broker.work.check_offers import NEW_OFFERS
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import delivered, name_first, part_of
from rmq_pipeline.broker.work.receive import Leasing
from rmq_pipeline.broker.work.settle import forward
from rmq_pipeline.broker.work.timekeeping import Timers
from rmq_pipeline.broker.work.unreadable import UNREADABLE, sorted_out
from rmq_pipeline.broker.work.waiting import Place, Waiter
from rmq_pipeline.broker.work.writer import Done
from rmq_pipeline.errors import BrokerUnavailableError, IllegalQueueError, RocketMQError
from rmq_pipeline.message import Int64s
from rmq_pipeline.receipt import Receipts

__all__ = [
    "UNREADABLE",
    "Bridge",
    "Delivery",
    "LoopReceive",
    "Place",
    "Poll",
    "Sent",
    "check_client",
    "check_names",
    "check_readable",
    "receipts_of",
]

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Duration of a lease that ends by the group's backoff.
GROUP_BACKOFF: Final = -1
#: Threads for verbs that read or wait; sends and acks go to the writer without a thread.
_THREADS: Final = 8


#: Bodies in the newest bytes of the log are in the page cache: the loop may read them itself.
_HOT_BYTES: Final = 32 << 20


class Bridge:
    """The broker's verbs for coroutines of one event loop.

    Its methods are for the loop's thread, unless they say otherwise.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        #: The open broker; coroutines may read its settings, its clock, and topics and groups.
        self.engine = engine
        self._loop = loop
        self.timers = Timers(engine.clock)
        #: Receives and pulls that sleep.
        self._sleeping: set[Poll] = set()
        self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rmq-grpc")
        #: Answers from the writer for the loop, which is woken once per frame.
        self._answers: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False
        #: Requests of the current turn of the loop.
        self._joining: list[tuple[Request, Done]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def submit(self, request: Request) -> "asyncio.Future[Any]":
        """Return a future of the answer, which is set once the request is on disk.

        Call it from the loop's thread. The requests of one turn of the loop wake the writer once
        and share a frame.
        """
        future = self._loop.create_future()
        if request.is_bulk():
            self.engine.post(request, partial(self.answer, future))
            return future
        if not self._joining:
            self._loop.call_soon(self._post)
        self._joining.append((request, partial(self.answer, future)))
        return future

    def _post(self) -> None:
        joining, self._joining = self._joining, []
        try:
            self.engine.post_together(joining)
        except RocketMQError as error:
            for _, answered in joining:
                answered(None, error)

    def answer(self, future: "asyncio.Future[Any]", *outcome: Any) -> None:
        """Set a future's result or error in the loop; may be called from any thread.

        Args:
            future: of the loop.
            outcome: the result and the error, one of them None; nothing for a wakeup.
        """
        answer, error = outcome or (None, None)
        # Append before reading the flag: _deliver clears the flag before it empties the queue,
        # so an answer is never left behind.
        self._answers.append((future, answer, error))
        if not self._woken:
            self._woken = True
            self.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self._answers:
            future, answer, error = self._answers.popleft()
            if future.done():  # the caller has gone
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

    async def run(self, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """Run a blocking verb in a thread of the pool and return its result."""
        return await self._loop.run_in_executor(self._pool, partial(function, *args, **keywords))

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop; may be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed, so no caller waits for the answer
            log.debug("an answer came after the endpoint had closed")

    def spawn(self, make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine in the loop without awaiting it; may be called from any thread."""
        self.call_soon(self.start, make)

    def start(self, make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine without awaiting it; call it from the loop's thread."""
        task = self._loop.create_task(make())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task of the gRPC endpoint failed", exc_info=error)

    async def finish(self, timeout_s: float) -> None:
        """Wait until all started coroutines have ended, at most ``timeout_s``."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def close(self) -> None:
        """Shut the pool down; calls that have not started are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------------------------- producers

    def send(self, topic: str, columns: dict[str, pa.Array]) -> "asyncio.Future[Sent]":
        """Store messages of columns that are checked already; ``named`` completes the answer."""
        engine = self.engine
        engine.admit()
        return self.submit(
            prepare(
                engine.state.topic(topic).topic,
                columns,
                ids=engine.ids,
                delay_max_ms=engine.settings.delay_max_ms,
                now_ms=engine.clock.now_ms(),
                delay_levels_ms=engine.settings.delay_levels_ms,
            )
        )

    async def named(self, sent: Sent) -> Sent:
        """Return the answer of a send with the ids of repeated messages."""
        return sent if sent.unnamed is None else await self.run(name_first, self.engine, sent)

    async def send_half(
        self, topic: str, messages: pa.Table, *, producer_group: str, immunity_ms: int
    ) -> pa.Table:
        """Store half messages; return schema.HALF_SENT, row for row."""
        stored: pa.Table = await self.submit(
            transaction.prepare(
                self.engine,
                topic,
                messages=messages,
                producer_group=producer_group,
                immunity_ms=arguments.immunity_ms(immunity_ms),
            )
        )
        return stored

    async def topics_of_transactions(self, resolutions: pa.Table) -> set[str]:
        """Return the topics of these transactions."""
        topics: set[str] = await self.submit(TargetsOf(resolutions))
        return topics

    def on_checks(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call a listener in the loop when checks are due; return a function that removes it."""
        return self.engine.wakeups.listen(lambda _: self.call_soon(listener), topic_id=NEW_OFFERS)

    # ---------------------------------------------------------------------------------- consumers

    def receive(
        self,
        topic: str,
        *,
        group: str,
        limit: int,
        invisible_ms: int,
        filter: str,
        filter_type: str,
        client_id: str,
        attempt_id: str,
        bits: int,
        until_ms: int,
        wanted: Callable[[], bool],
    ) -> "LoopReceive":
        """Return a receive; its ``lease`` waits for messages until ``until_ms``.

        Args:
            topic, group, limit, filter, filter_type, client_id, attempt_id: as of ``receive``.
            invisible_ms: length of the leases.
            bits: bits that the delivery number gets.
            wanted: returns False once the caller has gone.
        """
        request = arguments.receive(
            self.engine,
            topic,
            group=group,
            limit=limit,
            invisible_duration_ms=invisible_ms,
            filter=filter,
            filter_type=filter_type,
            client_id=client_id,
            window=None,
            attempt_id=attempt_id,
        )
        if bits:
            request = replace(request, delivery=request.delivery | bits)
        return LoopReceive(self, request, until_ms=until_ms, wanted=wanted)

    async def read(self, delivery: Delivery) -> pa.Table:
        """Return the leased messages as schema.RECEIVED."""
        hot = max(0, self.engine.log.synced - _HOT_BYTES)
        for _, taken in delivery.taken:
            if int(taken.position.min()) < hot:
                return await self.run(delivered, self.engine, delivery)
        return delivered(self.engine, delivery)

    async def sorted_out(self, delivery: Delivery, request: Receive) -> Delivery:
        """Return the readable part of a delivery; fail or delay the rest."""
        return await self.run(sorted_out, self.engine, delivery, request=request)

    def release(self, delivery: Delivery) -> None:
        """Release messages that reached no client, without counting the attempt."""
        if len(delivery):
            self.start(partial(self._awaited, ReleaseEach(receipts_of(delivery))))

    async def _awaited(self, request: Request) -> None:
        await self.submit(request)

    async def renew_delivery(self, delivery: Delivery, duration_ms: int) -> Delivery | None:
        """Renew the leases of a delivery; return the part that is still leased."""
        holds = await self.renew(receipts_of(delivery), duration_ms)
        return part_of(delivery, holds) if holds.any() else None

    def renew(self, receipts: Receipts, duration_ms: int) -> "asyncio.Future[Mask]":
        """Extend running leases under the same receipts; return a mask of the valid ones."""
        return self.submit(Renew(receipts, duration_ms))

    def ack_each(self, receipts: Receipts) -> "asyncio.Future[Mask]":
        """Ack receipts of several callers; return a mask of the valid ones."""
        return self.submit(AckEach(receipts))

    async def change_invisible_duration(
        self, receipts: Receipts, duration_ms: int, *, failed: Callable[[], bool], bits: int
    ) -> Int64s:
        """Set a new end for leases; return their new delivery numbers.

        Args:
            receipts: valid ones.
            duration_ms: from now on.
            failed: returns True if the group's backoff applies instead.
            bits: bits that the delivery numbers get.
        """
        duration_ms = arguments.invisible_ms(duration_ms)
        deliveries = self.engine.new_deliveries(len(receipts)) | bits
        duration_ms = GROUP_BACKOFF if failed() else duration_ms
        await self.submit(ChangeInvisible(receipts, duration_ms, deliveries))
        return deliveries

    async def forward(self, handle: str, *, reason: str) -> None:
        """Dead-letter a delivery; leases behind it in its message group continue."""
        await self.run(forward, self.engine, [handle], reason=reason, keep_behind=True)

    async def committed_offset(self, group: str, topic: str, *, queue_id: int) -> int | None:
        """Return a group's committed offset in a queue; None if there is none."""
        offset: int | None = await self.submit(CommittedOffset(group, topic, queue_id))
        return offset

    async def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the first and the next offset of a queue.

        Raises:
            IllegalQueueError: the topic has no such queue.
        """
        _, bounds = await self.submit(Offsets(topic))
        if not 0 <= queue_id < len(bounds):
            raise IllegalQueueError(f"Topic {topic} has no queue {queue_id}.")
        low, high = bounds[queue_id]
        return low, high

    async def sync_lite(
        self, group: str, topic: str, *, client_id: str, action: str, names: tuple[str, ...] = ()
    ) -> None:
        """Change the lite topics of a client; see ``check_lite``."""
        await self.submit(SyncLiteSubscription(group, topic, client_id, action, names))

    # ------------------------------------------------------------------------------------ waiting

    def __len__(self) -> int:
        """Return how many polls sleep."""
        return len(self._sleeping)

    @property
    def closed(self) -> bool:
        """True once this endpoint or the broker is stopping: polls must end."""
        return self._closed or self.engine.wakeups.closed

    def check_open(self) -> None:
        """Refuse to wait any longer once the broker is stopping.

        Raises:
            BrokerUnavailableError: the broker is stopping.
        """
        if self.closed:
            raise BrokerUnavailableError("The broker is stopping.")

    def stop_waiting(self) -> None:
        """Wake all polls; they do not wait again."""
        self._closed = True
        for poll in self._sleeping:
            poll.notify()

    def poll(self, place: Place) -> "Poll":
        """Enter the line of a place; call it before the first look, and ``end`` the result."""
        return Poll(self, place)

    async def sleep(self, poll: "Poll", future: "asyncio.Future[None]", *, at_ms: int) -> None:
        """Wait until the future of a poll is set, or until ``at_ms``."""
        timer = self.timers.at(at_ms, partial(self.answer, future))
        self._sleeping.add(poll)
        try:
            await future
        finally:
            self._sleeping.discard(poll)
            timer.cancel()


class Poll(Waiter):
    """A call of an event loop in its line; a wakeup during its look is not lost."""

    def __init__(self, bridge: Bridge, place: Place) -> None:
        self._bridge = bridge
        self._future: asyncio.Future[None] | None = None
        super().__init__(bridge.engine.wakeups, place)

    @override
    def notify(self) -> None:
        if self._future is not None:
            self._bridge.answer(self._future)

    async def sleep(self, at_ms: int) -> None:
        """Wait until woken, or until ``at_ms``."""
        # In this order: a wakeup from now on sets the future.
        self._future = asyncio.get_running_loop().create_future()
        if not self.is_called() and not self._bridge.closed:
            await self._bridge.sleep(self, self._future, at_ms=at_ms)
        self.again()


class LoopReceive(Leasing):
    """A receive that an event loop awaits."""

    def __init__(
        self,
        bridge: Bridge,
        request: Receive,
        *,
        until_ms: int,
        wanted: Callable[[], bool],
    ) -> None:
        super().__init__(bridge.engine, request, until_ms=until_ms)
        self._bridge = bridge
        self._wanted = wanted

    @override
    def enter(self, place: Place) -> Poll:
        return self._bridge.poll(place)

    @override
    async def submit(self) -> Delivery:
        leasing = self._bridge.submit(self.request)
        try:
            delivery: Delivery = await asyncio.shield(leasing)
        except asyncio.CancelledError:  # the request may lease messages nevertheless
            leasing.add_done_callback(self._release_unwanted)
            raise
        return delivery

    def _release_unwanted(self, leasing: "asyncio.Future[Delivery]") -> None:
        """Release a delivery that was leased after its caller was gone."""
        if not leasing.cancelled() and leasing.exception() is None:
            self.release(leasing.result())

    @override
    async def load(self, load: Callable[..., bool], delivery: Delivery) -> bool:
        if not (delivery.pages or delivery.backlogs or delivery.unjudged or delivery.exhausted):
            return False
        row_filter = self.request.row_filter
        return await self._bridge.run(load, self.engine, delivery, row_filter=row_filter)

    @override
    async def wait(self, waiter: Waiter, at_ms: int) -> None:
        assert isinstance(waiter, Poll)
        await waiter.sleep(at_ms)

    @override
    def is_wanted(self) -> bool:
        return self._wanted()

    @override
    def is_closed(self) -> bool:
        return self._bridge.closed

    @override
    def release(self, delivery: Delivery) -> None:
        self._bridge.release(delivery)
