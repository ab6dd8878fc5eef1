"""How much of a queue a consumer holds before it pulls no more (semantics §6.6)."""

from dataclasses import dataclass
from typing import Final

from rmq_pipeline import limits
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.errors import RequestError

#: How much more of a stuck queue is held where other keys of it may go on.
STUCK_FACTOR: Final = 10
#: How much more one pull brings then: keys that have run out come back with more, and less often.
STARVING_PULLS: Final = 4
#: Messages of the first pull, whose sizes nobody knows yet.
FIRST_PULL: Final = 128


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The most that is held; by queue, and by topic where that is given."""

    messages: int = 1000
    bytes: int = 100 * limits.MIB
    #: Between the first and the last offset held; concurrently only.
    span: int = 2000
    #: Of all queues of a topic that this client owns, in equal shares.
    topic_messages: int | None = None
    topic_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("messages", "bytes", "span", "topic_messages", "topic_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"Threshold {name} is at least 1, not {value!r}.")

    def of_queue(self, owned: int) -> "Thresholds":
        """What one queue may have, of ``owned`` ones of its topic."""
        share = max(1, owned)
        return Thresholds(
            self.messages if self.topic_messages is None else max(1, self.topic_messages // share),
            self.bytes if self.topic_bytes is None else max(1, self.topic_bytes // share),
            self.span,
        )


def room(
    held: ProcessQueue, thresholds: Thresholds, *, spans: bool, starving: bool, pull: int
) -> int:
    """How many messages may be pulled of a queue now; 0: it is held back.

    Pulls are not made for a few messages: at least half of what may be held must be free, or half
    a pull.

    Args:
        thresholds: of this queue.
        spans: whether the span counts.
        starving: workers have nothing to do, as what is held is stuck.
        pull: the most of one pull.
    """
    most = thresholds.messages * (STUCK_FACTOR if starving else 1)
    free = most - held.count
    if free < max(1, min(pull, thresholds.messages) // 2) or held.bytes >= thresholds.bytes:
        return 0
    if spans and held.span > thresholds.span:
        return 0
    return min(free, pull * STARVING_PULLS if starving else pull)


class Sizes:
    """How large messages of a topic have been lately: a pull asks for no more than fits."""

    def __init__(self) -> None:
        self._bytes_each: float | None = None

    def saw(self, messages: int, total_bytes: int) -> None:
        """A pull brought so much."""
        if messages:
            each = total_bytes / messages
            known = each if self._bytes_each is None else self._bytes_each
            # Larger ones count at once, smaller ones by and by.
            self._bytes_each = max(each, (known + each) / 2)

    def fit(self, free_bytes: int) -> int:
        """How many will fit; one always does."""
        if self._bytes_each is None:
            return FIRST_PULL
        return max(1, int(free_bytes // max(1.0, self._bytes_each)))
