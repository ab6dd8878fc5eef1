"""Flow control: the messages that a consumer may hold of each queue (semantics §6.6)."""

from dataclasses import dataclass, fields
from typing import Final

from rmq_pipeline import limits
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.errors import RequestError

#: RocketMQ's value of an unset threshold.
UNSET: Final = -1
#: Factor on the message threshold while workers starve, so that pulls reach other keys.
STUCK_FACTOR: Final = 10
#: Factor on the size of a pull while workers starve: fewer, larger pulls for keys without messages.
STARVING_PULLS: Final = 4
#: Size of the first pull of a topic, before message sizes are known.
FIRST_PULL: Final = 128


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits on held messages, per queue and optionally per topic.

    -1 means the default, as in RocketMQ.
    """

    messages: int = 1000
    bytes: int = 100 * limits.MIB
    #: Distance from the first to the last held offset; used by order "concurrently" only.
    span: int = 2000
    #: For all owned queues of a topic together; each queue gets an equal share.
    topic_messages: int | None = None
    topic_bytes: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value == UNSET:
                object.__setattr__(self, each.name, each.default)
            elif value is not None and value < 1:
                raise RequestError(
                    f"Threshold {each.name} is at least 1, not {value!r}.",
                    remedy=f"Give 1 or more, or {UNSET} for the default.",
                )

    def of_queue(self, owned: int) -> "Thresholds":
        """Return the limits of one queue if ``owned`` queues of its topic are owned."""
        share = max(1, owned)
        return Thresholds(
            self.messages if self.topic_messages is None else max(1, self.topic_messages // share),
            self.bytes if self.topic_bytes is None else max(1, self.topic_bytes // share),
            self.span,
        )


def room(
    held: ProcessQueue, thresholds: Thresholds, *, spans: bool, starving: bool, pull: int
) -> int:
    """Return how many messages may be pulled from a queue now; 0: none.

    To avoid tiny pulls, half of the message threshold or half a pull must be free.

    Args:
        held: the messages that are held.
        thresholds: the limits of this queue.
        spans: True if the span limit applies.
        starving: True if workers idle because the held messages are stuck.
        pull: the maximum size of a pull.
    """
    most = thresholds.messages * (STUCK_FACTOR if starving else 1)
    free = most - held.count
    if free < max(1, min(pull, thresholds.messages) // 2) or held.bytes >= thresholds.bytes:
        return 0
    if spans and held.span > thresholds.span:
        return 0
    return min(free, pull * STARVING_PULLS if starving else pull)


class Sizes:
    """Recent message sizes of a topic, to limit a pull to the messages that fit."""

    def __init__(self) -> None:
        self._bytes_each: float | None = None

    def saw(self, messages: int, total_bytes: int) -> None:
        """Record the result of a pull."""
        if messages:
            each = total_bytes / messages
            known = each if self._bytes_each is None else self._bytes_each
            # The estimate grows at once and shrinks gradually.
            self._bytes_each = max(each, (known + each) / 2)

    def fit(self, free_bytes: int) -> int:
        """Return how many messages fit into the free bytes; at least 1."""
        if self._bytes_each is None:
            return FIRST_PULL
        return max(1, int(free_bytes // max(1.0, self._bytes_each)))
