"""Settling of messages at the broker: in batches, by one thread, until the broker answers."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.clock import Clock, Deadline
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.errors import (
    BusyError,
    OperatorError,
    ReceiptHandleError,
    RocketMQError,
)
from rmq_pipeline.group import Exponential, delay_ms
from rmq_pipeline.text import speakable
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Pause before a call is repeated that had no reply or that the broker was too busy for.
PAUSE_S: Final = 0.2
#: Pause before refused results are sent again, doubled each time up to the maximum.
REFUSED_S: Final = 1.0
REFUSED_MOST_S: Final = 30.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """Messages of one call of the listener with the same outcome."""

    messages: Sequence[ReceivedMessage]
    #: "ack", "retry", "dead_letter", "give_up" (the last failure; the group's on_failure applies),
    #: or "retry_in_place" (the attempt counts, the lease stays).
    outcome: str = "ack"
    #: Delay of a retry; None: the group's backoff.
    retry_after_ms: int | None = None
    reason: str = ""
    error_type: str = ""


class Settling(Protocol):
    """Receiver of the listener's results."""

    def settle(self, *parts: Part) -> None:
        """Settle the messages of one call, atomically."""
        ...

    def count(self, part: Part) -> None:
        """Count a failed attempt of messages that stay here for the next try."""
        ...

    def release(self, messages: Sequence[ReceivedMessage]) -> None:
        """Release messages that the listener never got."""
        ...

    def hurry(self) -> None:
        """Settle pending results at once, because a worker waits for new messages."""
        ...


class Settler:
    """Settler of leased messages; settles the results of one listener call in one broker call.

    If the broker refuses a receipt, its lease has ended and the message is redelivered. The other
    results of that call are then settled one by one. Results refused for another reason, such as
    a revoked permission, are retried until ``close``; then their messages are redelivered.
    """

    def __init__(
        self,
        verbs: Verbs,
        group: str,
        *,
        held: Callable[[], Iterable[ReceivedMessage]] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Start the thread.

        Args:
            held: returns the messages whose leases must be renewed; None: no renewals.
            pace: the times of leases and calls.
        """
        self._verbs, self._group, self._held = verbs, group, held
        self._pace = pace or Pace()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._renewed_at = self._called_at = time.monotonic()
        #: Results refused for another reason than their receipt, and the time of the next try.
        self._refused: list[_Results] = []
        self._refused_until = 0.0
        self._refused_s = REFUSED_S
        #: No call is repeated after this time, which ``close`` sets.
        self._closes_by: Deadline | None = None
        self._closing = threading.Event()
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmq-settler", daemon=True)
        self._thread.start()

    def settle(self, *parts: Part) -> None:
        """Settle the messages of one call, in the background."""
        for part in parts:
            _each_queue(part.messages, lambda held, ours: held.remove(ours, unsettled=True))
        self._work.put(_Results(parts))

    def count(self, part: Part) -> None:
        """Count a failed attempt, in the background; the messages stay leased."""
        self._work.put(_Results([replace(part, outcome="retry_in_place")]))

    def release(self, messages: Sequence[ReceivedMessage]) -> None:
        """Release messages, in the background; their attempt is not counted."""
        if messages:
            self._work.put(_Released(messages))

    def hurry(self) -> None:
        """Settle pending results without waiting for more."""
        self._hurried.set()

    def close(self, timeout_s: float) -> None:
        """Settle everything and stop; messages unsettled after the timeout are redelivered."""
        self._closes_by = Deadline(timeout_s)
        self._work.put(None)
        self.hurry()
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            work, goes_on = self._next()
            counted = [each for each in work if isinstance(each, _Results) and each.is_counted]
            results = [each for each in work if isinstance(each, _Results) and not each.is_counted]
            if not goes_on or time.monotonic() >= self._refused_until:
                results, self._refused = self._refused + results, []
            if counted:  # in a call of their own: a receipt may appear once per call
                self._divide(counted, self._settle, refused=self._uncounted)
            if results:
                self._called_at = time.monotonic()
                self._send(results)
            for each in work:
                if isinstance(each, _Released):
                    self._divide(each.messages, self._release, refused=self._goes_on)
            if not goes_on:
                self._close_unsettled()
                return
            if (
                self._held is not None
                and time.monotonic() - self._renewed_at >= self._pace.lease_renew_s
            ):
                self._renewed_at = time.monotonic()
                self._renew(list(self._held()))

    def _next(self) -> "tuple[list[_Work], bool]":
        """Wait for work; return it, and False if it is the last."""
        work: list[_Work] = []
        moments = [self._refused_until] if self._refused else []
        if self._held is not None:
            moments.append(self._renewed_at + self._pace.lease_renew_s)
        wait_s = max(0.0, min(moments) - time.monotonic()) if moments else None
        try:
            first = self._work.get(timeout=wait_s)
            if first is None:
                return work, False
            work.append(first)
            gap_s = self._called_at + self._pace.settle_gap_s - time.monotonic()
            if gap_s > 0:
                self._hurried.wait(gap_s)
            self._hurried.clear()
            while True:
                another = self._work.get_nowait()
                if another is None:
                    return work, False
                work.append(another)
        except queue.Empty:
            return work, True

    def _send(self, results: "Sequence[_Results]") -> None:
        def refused(one: _Results, error: Exception) -> None:
            """Settle the messages of a refused call one by one."""
            if not isinstance(error, ReceiptHandleError):
                self._keep(one, error)
            elif len(one.messages) == 1:
                log.info("group %s settled %r too late", self._group, one.messages[0])
            else:
                self._divide(one.singles(), self._settle, refused=refused)

        kept = len(self._refused)
        self._divide(results, self._settle, refused=refused)
        left = {id(m) for one in self._refused[kept:] for m in one.messages}
        for one in results:
            told = [m for m in one.messages if id(m) not in left] if left else one.messages
            if told:
                _each_queue(told, lambda held, ours: held.settled(len(ours)))
        if left:
            self._refused_until = time.monotonic() + self._refused_s
            self._refused_s = min(2 * self._refused_s, REFUSED_MOST_S)
        elif not self._refused:
            self._refused_s = REFUSED_S

    def _keep(self, one: "_Results", error: Exception) -> None:
        """Retain results that were refused for another reason than a receipt, for a retry."""
        if not self._refused:
            log.error(
                "group %s cannot settle and retries until it closes; then unsettled messages are"
                " redelivered: %s",
                self._group,
                error,
                exc_info=None if isinstance(error, RocketMQError) else error,
            )
        self._refused.append(one)

    def _close_unsettled(self) -> None:
        if self._refused:
            count = sum(len(one.messages) for one in self._refused)
            log.warning("group %s closes: redelivering %d unsettled messages", self._group, count)
            for one in self._refused:
                _each_queue(one.messages, lambda held, ours: held.settled(len(ours)))

    def _goes_on(self, message: ReceivedMessage, error: Exception) -> None:
        """Log a failed release or renewal; the message is redelivered when its lease ends."""
        if not isinstance(error, ReceiptHandleError):
            log.warning("group %s leaves %r leased: %s", self._group, message, error)

    def _uncounted(self, one: "_Results", error: Exception) -> None:
        """Log an attempt that was not counted; the messages get one more attempt."""
        level = logging.INFO if isinstance(error, ReceiptHandleError) else logging.WARNING
        log.log(level, "group %s: the failure of %r is not counted: %s", self._group, one, error)

    def _settle(self, results: "Sequence[_Results]") -> None:
        parts = [part for one in results for part in one.parts]
        if all(part.outcome == "ack" for part in parts):
            self._verbs.ack([m.receipt_handle for part in parts for m in part.messages])
        else:
            self._verbs.settle(self._group, _outcomes(parts))

    def _release(self, messages: Sequence[ReceivedMessage]) -> None:
        self._verbs.release([message.receipt_handle for message in messages])

    def _renew(self, messages: list[ReceivedMessage]) -> None:
        def change(some: Sequence[ReceivedMessage]) -> None:
            receipts = [message.receipt_handle for message in some]
            renewed = self._verbs.change_invisible_duration(receipts, self._pace.lease_ms)
            handles = renewed.column("receipt_handle").to_pylist()
            for message, handle in zip(some, handles, strict=True):
                message.receipt_handle = handle

        def lost(message: ReceivedMessage, error: Exception) -> None:
            self._goes_on(message, error)
            if isinstance(error, ReceiptHandleError):
                message.queue.lose(message)

        self._divide(messages, change, refused=lost)

    def _divide(
        self,
        items: Sequence[_T],
        call: Callable[[Sequence[_T]], None],
        *,
        refused: Callable[[_T, Exception], None],
    ) -> None:
        """Make a call for all items, and bisect them while the broker refuses."""
        if not items or (refusal := self._refusal(lambda: call(items))) is None:
            return
        if len(items) == 1:
            refused(items[0], refusal)
            return
        middle = len(items) // 2
        self._divide(items[:middle], call, refused=refused)
        self._divide(items[middle:], call, refused=refused)

    def _refusal(self, call: Callable[[], None]) -> Exception | None:
        """Repeat a call until it has a reply; return the refusal, or None."""
        silent = False
        while True:
            try:
                call()
            except (BusyError, OperatorError) as error:
                if not silent:
                    log.warning("group %s settles later: %s", self._group, error)
                silent = True
                if self._closes_by is not None and self._closes_by.is_over:
                    log.warning("group %s closes unsettled: messages are redelivered", self._group)
                    return None
                self._closing.wait(PAUSE_S)
            except Exception as error:  # noqa: BLE001 - other results must still be settled
                return error
            else:
                return None


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of one listener call."""

    parts: Sequence[Part]

    @property
    def is_counted(self) -> bool:
        """True if an attempt is counted and the messages stay leased."""
        return self.parts[0].outcome == "retry_in_place"

    @property
    def messages(self) -> list[ReceivedMessage]:
        return [message for part in self.parts for message in part.messages]

    def singles(self) -> "list[_Results]":
        """Split the results into one per message."""
        return [
            _Results([Part([m], part.outcome, part.retry_after_ms, part.reason, part.error_type)])
            for part in self.parts
            for m in part.messages
        ]


@dataclass(frozen=True, slots=True)
class _Released:
    messages: Sequence[ReceivedMessage]


_Work = _Results | _Released


def _each_queue(
    messages: Sequence[ReceivedMessage],
    act: Callable[[ProcessQueue, Sequence[ReceivedMessage]], Any],
) -> None:
    """Call ``act`` for the messages of each queue; optimized for a single queue."""
    first = messages[0].queue
    if all(message.queue is first for message in messages):
        act(first, messages)
        return
    by_queue: dict[int, list[ReceivedMessage]] = {}
    for message in messages:
        by_queue.setdefault(id(message.queue), []).append(message)
    for ours in by_queue.values():
        act(ours[0].queue, ours)


def _outcomes(parts: Sequence[Part]) -> pa.Table:
    """Build the table of outcomes, columns of schema.OUTCOME."""
    rows: dict[str, list[Any]] = {
        name: [] for name in ("receipt_handle", "outcome", "retry_after_ms", "reason", "error_type")
    }
    for part in parts:
        n = len(part.messages)
        rows["receipt_handle"] += [message.receipt_handle for message in part.messages]
        rows["outcome"] += [part.outcome] * n
        rows["retry_after_ms"] += [part.retry_after_ms] * n
        rows["reason"] += [speakable(part.reason) or None] * n
        rows["error_type"] += [speakable(part.error_type) or None] * n
    return pa.table(rows, schema=pa.schema([schema.OUTCOME.field(name) for name in rows]))


#: Maximum age of the group's description, because the group may be altered at any time.
KNOWN_MS: Final = 10_000


class Retries:
    """Attempts and backoff of a group, refreshed from the broker on failures; thread-safe."""

    def __init__(
        self,
        describe: Callable[[], Mapping[str, Any]],
        *,
        known: Mapping[str, Any],
        clock: Clock,
        max_attempts: int | None = None,
    ) -> None:
        """Start with a known description.

        Args:
            describe: gets the description of the group from the broker.
            known: the last description.
            clock: measures the age of the description.
            max_attempts: overrides the number of the group.
        """
        self._describe, self._known, self._clock = describe, known, clock
        self._known_at_ms = clock.now_ms()
        self._max_attempts = max_attempts

    @property
    def max_attempts(self) -> int:
        """Maximum deliveries of a message, including the first."""
        return self._max_attempts or int(self._group()["max_attempts"])

    def delay_ms(self, failures: int) -> int:
        """Return the backoff in ms after this number of failures; 0 counts as 1."""
        group = self._group()
        backoff = group["backoff"]
        policy = Exponential(**backoff) if isinstance(backoff, Mapping) else None
        return delay_ms(max(1, failures), backoff_ms=group["backoff_ms"], backoff=policy)

    def _group(self) -> Mapping[str, Any]:
        now_ms = self._clock.now_ms()
        if not 0 <= now_ms - self._known_at_ms < KNOWN_MS:
            self._known_at_ms = now_ms
            try:
                self._known = self._describe()
            except RocketMQError as error:
                log.info("using the last known retries of the group: %s", error)
        return self._known
