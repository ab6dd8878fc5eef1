"""Telling the broker what became of messages: in batches, by one thread, until it has answered."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.verbs import DeliveryVerbs
from rmq_pipeline.errors import (
    BusyError,
    OperatorError,
    ReceiptHandleError,
    RocketMQError,
)
from rmq_pipeline.text import speakable

log = logging.getLogger(__name__)

#: Between two calls to the broker: what is settled meanwhile goes with the second. Nobody waits for
#: that: who would says ``hurry``.
GAP_S: Final = 0.025
#: Before a call is made again that had no answer, or that the broker had no room for.
PAUSE_S: Final = 0.2
#: Before results are told again that were refused for good, as it seems; doubled up to the second.
REFUSED_S: Final = 1.0
REFUSED_MOST_S: Final = 30.0
#: For how long leases are taken that somebody renews, and how often that is done.
LEASE_MS: Final = 30_000
RENEW_S: Final = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """Messages of one call of the listener that had the same outcome."""

    messages: Sequence[ReceivedMessage]
    #: ack, retry, dead_letter, or give_up: the last failure, the group says what becomes of them.
    outcome: str = "ack"
    #: Of a retry; None: the group's backoff.
    retry_after_ms: int | None = None
    reason: str = ""
    error_type: str = ""


class Settling(Protocol):
    """Where results of the listener go."""

    def settle(self, *parts: Part) -> None:
        """What became of the messages of one call: all of it, or none."""
        ...

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Messages that the listener never got are for others."""
        ...

    def hurry(self) -> None:
        """Somebody waits for what the broker gives once it knows of what was settled."""
        ...


class Settler:
    """Settles what was leased; the results of one call always in one call to the broker.

    A receipt that the broker refuses has ended: the message is somebody else's, or comes again. The
    other results of that call then go one by one. What is refused for another reason, a right that
    was taken away for instance, is kept and told again; who closes meanwhile leaves it to others.
    """

    def __init__(
        self,
        verbs: DeliveryVerbs,
        group: str,
        *,
        held: Callable[[], Iterable[ReceivedMessage]] | None = None,
    ) -> None:
        """Begin.

        Args:
            held: messages whose leases are to be renewed; None: they are long enough.
        """
        self._verbs, self._group, self._held = verbs, group, held
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._renewed_at = self._called_at = time.monotonic()
        #: What was refused for another reason than its receipt, and when it is told again.
        self._refused: list[_Results] = []
        self._refused_until = 0.0
        self._refused_s = REFUSED_S
        #: No call is made again after this moment, when it is closed.
        self._give_up_at = float("inf")
        self._closing = threading.Event()
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmq-settler", daemon=True)
        self._thread.start()

    def settle(self, *parts: Part) -> None:
        """Tell the broker, soon."""
        for part in parts:
            _each_queue(part.messages, lambda held, ours: held.remove(ours, unsettled=True))
        self._work.put(_Results(parts))

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Give messages back, soon; their attempt is not counted."""
        if messages:
            self._work.put(_GivenBack(messages))

    def hurry(self) -> None:
        """Wait for no more results to go with those there are."""
        self._hurried.set()

    def close(self, timeout_s: float) -> None:
        """Tell the broker everything, then end; what it has not answered by then is lost to it."""
        self._give_up_at = time.monotonic() + timeout_s
        self._work.put(None)
        self.hurry()
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            work, goes_on = self._next()
            results = [each for each in work if isinstance(each, _Results)]
            if not goes_on or time.monotonic() >= self._refused_until:
                results, self._refused = self._refused + results, []
            if results:
                self._called_at = time.monotonic()
                self._send(results)
            for each in work:
                if isinstance(each, _GivenBack):
                    self._divide(each.messages, self._release, refused=self._goes_on)
            if not goes_on:
                self._close_unsettled()
                return
            if self._held is not None and time.monotonic() - self._renewed_at >= RENEW_S:
                self._renewed_at = time.monotonic()
                self._renew(list(self._held()))

    def _next(self) -> "tuple[list[_Work], bool]":
        """What is to be done now; and whether there may be more."""
        work: list[_Work] = []
        moments = [self._refused_until] if self._refused else []
        if self._held is not None:
            moments.append(self._renewed_at + RENEW_S)
        wait_s = max(0.0, min(moments) - time.monotonic()) if moments else None
        try:
            first = self._work.get(timeout=wait_s)
            if first is None:
                return work, False
            work.append(first)
            gap_s = self._called_at + GAP_S - time.monotonic()
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
            """Each message of the call for itself: its results do not hold as one."""
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
        """Refused, and not for its receipt: it is told again."""
        if not self._refused:
            log.error(
                "group %s cannot settle, and tries again until it is closed; what is closed"
                " unsettled comes again: %s",
                self._group,
                error,
                exc_info=None if isinstance(error, RocketMQError) else error,
            )
        self._refused.append(one)

    def _close_unsettled(self) -> None:
        if self._refused:
            count = sum(len(one.messages) for one in self._refused)
            log.warning("group %s closes: %d unsettled messages come again", self._group, count)
            for one in self._refused:
                _each_queue(one.messages, lambda held, ours: held.settled(len(ours)))

    def _goes_on(self, message: ReceivedMessage, error: Exception) -> None:
        """What is not given back, or not renewed, comes again when its lease ends."""
        if not isinstance(error, ReceiptHandleError):
            log.warning("group %s leaves %r leased: %s", self._group, message, error)

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
            renewed = self._verbs.change_invisible_duration(receipts, LEASE_MS)
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
        """Make a call for all items; for halves of them while the broker refuses some."""
        if not items or (refusal := self._refusal(lambda: call(items))) is None:
            return
        if len(items) == 1:
            refused(items[0], refusal)
            return
        middle = len(items) // 2
        self._divide(items[:middle], call, refused=refused)
        self._divide(items[middle:], call, refused=refused)

    def _refusal(self, call: Callable[[], None]) -> Exception | None:
        """Make a call until it has an answer; why it was refused."""
        silent = False
        while True:
            try:
                call()
            except (BusyError, OperatorError) as error:
                if not silent:
                    log.warning("group %s settles later: %s", self._group, error)
                silent = True
                if time.monotonic() >= self._give_up_at:
                    log.warning("group %s closes unsettled: its messages come again", self._group)
                    return None
                self._closing.wait(PAUSE_S)
            except Exception as error:  # noqa: BLE001 - what others settle must not wait for it
                return error
            else:
                return None


@dataclass(frozen=True, slots=True)
class _Results:
    """What became of the messages of one call."""

    parts: Sequence[Part]

    @property
    def messages(self) -> list[ReceivedMessage]:
        return [message for part in self.parts for message in part.messages]

    def singles(self) -> "list[_Results]":
        """The same, for each message alone."""
        return [
            _Results([Part([m], part.outcome, part.retry_after_ms, part.reason, part.error_type)])
            for part in self.parts
            for m in part.messages
        ]


@dataclass(frozen=True, slots=True)
class _GivenBack:
    messages: Sequence[ReceivedMessage]


_Work = _Results | _GivenBack


def _each_queue(
    messages: Sequence[ReceivedMessage],
    act: Callable[[ProcessQueue, Sequence[ReceivedMessage]], Any],
) -> None:
    """Do something for the messages of each queue; nearly always there is one."""
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
    """The table of schema.OUTCOME."""
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
