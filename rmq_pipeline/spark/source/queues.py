"""Offsets of the message queues of topics: as a checkpoint has them, resolved, and in part.

    {"orders": {"topic_id": 7, "0": 120, "1": 98}}

The id tells a topic from a later one of the same name, whose offsets are of other messages.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rmq_pipeline.errors import IllegalOffsetError, RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.source.options import EARLIEST, LATEST, Bound, ReadOptions

log = logging.getLogger(__name__)

_TOPIC_ID: Final = "topic_id"
_GO_ON: Final = "Set failOnDataLoss to false to go on without them."


@dataclass(frozen=True, slots=True)
class Held:
    """What the queues of a topic keep now."""

    topic: str
    topic_id: int
    #: queue_id -> [min_offset, max_offset)
    bounds: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, client: Client, topic: str) -> "Held":
        """Ask the broker.

        Raises:
            TopicNotFoundError: there is none.
        """
        described = client.describe_topic(topic)
        bounds = {
            int(queue["queue_id"]): (int(queue["min_offset"]), int(queue["max_offset"]))
            for queue in described["offsets"]
        }
        return cls(topic, int(described["topic_id"]), bounds)

    def ends(self) -> "Offsets":
        """The offsets of the next messages."""
        return Offsets(self.topic_id, {queue: high for queue, (_, high) in self.bounds.items()})


@dataclass(frozen=True, slots=True)
class Offsets:
    """An offset of each queue of one topic."""

    topic_id: int
    at: dict[int, int]


#: By topic.
Place: TypeAlias = Mapping[str, Offsets]


def to_json(place: Place) -> dict[str, Any]:
    """As a checkpoint has it; equal places give equal texts."""
    return {
        topic: {_TOPIC_ID: found.topic_id, **{str(q): found.at[q] for q in sorted(found.at)}}
        for topic, found in sorted(place.items())
    }


def from_json(said: Mapping[str, Mapping[str, int]]) -> dict[str, Offsets]:
    """What ``to_json`` gave."""
    return {
        topic: Offsets(found[_TOPIC_ID], {int(q): at for q, at in found.items() if q != _TOPIC_ID})
        for topic, found in said.items()
    }


def resolved(client: Client, held: Held, *, bound: Bound, options: ReadOptions) -> Offsets:
    """The offsets that a bound names now.

    Raises:
        RequestError: it does not name every queue, or others.
        IllegalOffsetError: an offset is not kept, and data loss is an error.
    """
    if bound.kind in ("earliest", "latest"):
        edge = 0 if bound.kind == "earliest" else 1
        return Offsets(held.topic_id, {queue: ends[edge] for queue, ends in held.bounds.items()})
    if isinstance(bound.at, int):
        wanted = dict.fromkeys(held.bounds, bound.at)
    else:
        wanted = dict((bound.at or {}).get(held.topic, {}))
    if wanted.keys() != held.bounds.keys():
        raise RequestError(
            f"Topic {held.topic} has the queues {_listed(held.bounds)}: give a number for each,"
            f" not for {_listed(wanted) or 'none'}."
        )
    if bound.kind == "times":
        return Offsets(
            held.topic_id,
            {q: client.offset_at(held.topic, q, at_ms=at) for q, at in wanted.items()},
        )
    found = {q: _kept(held, q, at=at, options=options) for q, at in wanted.items()}
    return Offsets(held.topic_id, found)


def _listed(queues: Mapping[int, Any]) -> str:
    return ", ".join(str(queue) for queue in sorted(queues))


def _kept(held: Held, queue_id: int, *, at: int, options: ReadOptions) -> int:
    low, high = held.bounds[queue_id]
    if at in (EARLIEST, LATEST):
        return low if at == EARLIEST else high
    if at > high and options.fail_on_data_loss:
        raise IllegalOffsetError(
            f"Queue {queue_id} of topic {held.topic} ends before offset {at}, at {high}."
        )
    return begin(held, queue_id, at=min(at, high), options=options)


def begin(held: Held, queue_id: int, *, at: int, options: ReadOptions) -> int:
    """Where reading from an offset on begins: there, or after what has expired.

    Raises:
        IllegalOffsetError: messages have expired, and data loss is an error.
    """
    low, _ = held.bounds[queue_id]
    if at >= low:
        return at
    lost = f"Offsets {at} to {low - 1} of queue {queue_id} of topic {held.topic} have expired."
    if options.fail_on_data_loss:
        raise IllegalOffsetError(f"{lost} {_GO_ON}")
    log.warning("%s", lost)
    return low


def is_same(held: Held, begun: Offsets, *, options: ReadOptions) -> bool:
    """Whether a topic still is the one that offsets are of.

    Raises:
        IllegalOffsetError: it is not, or ends before them, and data loss is an error.
    """
    same = held.topic_id == begun.topic_id
    short = [q for q, at in begun.at.items() if at > held.bounds.get(q, (0, 0))[1]]
    if same and not short:
        return True
    lost = (
        f"Queue {short[0]} of topic {held.topic} ends before what was read of it."
        if same
        else f"Topic {held.topic} was deleted and made again: its offsets begin anew."
    )
    if options.fail_on_data_loss:
        raise IllegalOffsetError(f"{lost} {_GO_ON}")
    log.warning("%s", lost)
    return same


def admitted(start: Place, end: Place, *, limit: int | None) -> dict[str, Offsets]:
    """The way from ``start`` to ``end``, at most ``limit`` messages of it.

    Every queue goes on by its share of what waits; ``start`` has the topics and queues of ``end``.
    """
    waiting = {
        (topic, queue): at - start[topic].at[queue]
        for topic, found in end.items()
        for queue, at in found.at.items()
    }
    total = sum(waiting.values())
    if limit is None or total <= limit:
        return dict(end)
    shares = {key: n * limit // total for key, n in waiting.items()}
    left = limit - sum(shares.values())
    # Those with the most left over go on by one more: whoever waits comes some time.
    order = sorted(waiting, key=lambda key: waiting[key] * limit % total, reverse=True)
    for key in order[:left]:
        shares[key] += 1
    return {
        topic: Offsets(
            found.topic_id,
            {queue: start[topic].at[queue] + shares[topic, queue] for queue in found.at},
        )
        for topic, found in end.items()
    }
