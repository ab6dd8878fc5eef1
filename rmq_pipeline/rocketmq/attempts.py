"""Attempts of receives: one that is repeated is given what it was given before."""

from collections import OrderedDict
from typing import Final, NamedTuple

from rmq_pipeline.broker.receiving.deliver import Delivery

#: Receivers whose last attempt is remembered; a client has one for each queue it reads.
KEPT: Final = 4096


class Receiver(NamedTuple):
    """Who makes attempts one after the other."""

    client_id: str
    group: str
    topic: str
    queue_id: int


class Attempts:
    """The last attempt of every receiver that was given something, and the calls under way.

    An answer may be lost on its way: a client then repeats the attempt by its id, and would
    otherwise wait for the messages, or the message groups, that it has itself. The call before may
    not know yet that its client has let it go: what it leases from then on is given back.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._last: OrderedDict[Receiver, tuple[str, Delivery]] = OrderedDict()
        self._running: dict[tuple[Receiver, str], Attempt] = {}

    def begin(self, receiver: Receiver, attempt_id: str) -> "Attempt":
        """A call begins; an earlier one of the same attempt is over."""
        attempt = Attempt(self, receiver, attempt_id=attempt_id)
        if attempt_id:
            self._running[receiver, attempt_id] = attempt
        return attempt

    def is_current(self, attempt: "Attempt") -> bool:
        """Whether no later call makes this attempt; of attempts without an id every one is."""
        running = self._running.get((attempt.receiver, attempt.attempt_id))
        return not attempt.attempt_id or running is attempt

    def end(self, attempt: "Attempt") -> None:
        """A call has ended."""
        if attempt.attempt_id and self.is_current(attempt):
            del self._running[attempt.receiver, attempt.attempt_id]

    def remember(self, attempt: "Attempt", delivery: Delivery) -> None:
        """An attempt leased messages; the receiver's earlier ones are over."""
        if not attempt.attempt_id:
            return
        self._last[attempt.receiver] = attempt.attempt_id, delivery
        self._last.move_to_end(attempt.receiver)
        if len(self._last) > self._kept:
            self._last.popitem(last=False)

    def forget(self, attempt: "Attempt") -> None:
        """What an attempt leased was given back, or is settled."""
        if self.before(attempt) is not None:
            del self._last[attempt.receiver]

    def before(self, attempt: "Attempt") -> Delivery | None:
        """What this very attempt leased before."""
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
        """Whether its client still waits for this call, as far as is known."""
        return self._attempts.is_current(self)

    def before(self) -> Delivery | None:
        """What an earlier call of it was given."""
        return self._attempts.before(self)

    def leased(self, delivery: Delivery) -> None:
        """Messages were leased; a later call of it is given them again."""
        self._attempts.remember(self, delivery)

    def given_back(self) -> None:
        """They are not to be given again."""
        self._attempts.forget(self)

    def end(self) -> None:
        """The call has ended."""
        self._attempts.end(self)
