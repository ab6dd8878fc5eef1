"""Attempts of ReceiveMessage: a repeated attempt returns the same batch."""

from collections import OrderedDict
from typing import Final, NamedTuple

from rmq_pipeline.broker.decide.deliver import Delivery

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
