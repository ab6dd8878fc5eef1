"""Offsets of message queues: their JSON in a checkpoint, bounds, and limits of a micro-batch.

    {"orders": {"topic_id": 7, "0": 120, "1": 98}}

The topic_id distinguishes a topic from a later one with the same name, whose offsets belong to
other messages.
"""

import difflib
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rmq_pipeline.errors import (
    ForbiddenError,
    IllegalOffsetError,
    RequestError,
    RocketMQError,
    TopicNotFoundError,
)
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.source.options import EARLIEST, LATEST, Bound, ReadOptions, matches

log = logging.getLogger(__name__)

_TOPIC_ID: Final = "topic_id"
_GO_ON: Final = "Set failOnDataLoss to false to continue without them."


@dataclass(frozen=True, slots=True)
class TopicBounds:
    """Offsets that the queues of a topic retain now."""

    topic: str
    topic_id: int
    #: queue_id -> [min_offset, max_offset)
    bounds: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, client: Client, topic: str) -> "TopicBounds":
        """Return the present bounds from the broker.

        Raises:
            TopicNotFoundError: the topic does not exist.
        """
        described = client.describe_topic(topic)
        bounds = {
            int(queue["queue_id"]): (int(queue["min_offset"]), int(queue["max_offset"]))
            for queue in described["offsets"]
        }
        return cls(topic, int(described["topic_id"]), bounds)

    def ends(self) -> "Offsets":
        """Return the offsets of the next messages."""
        return Offsets(self.topic_id, {queue: high for queue, (_, high) in self.bounds.items()})


def subscribed(client: Client, options: ReadOptions) -> dict[str, TopicBounds]:
    """Return the bounds of the topics that a read names now, by topic.

    Raises:
        TopicNotFoundError: a topic that ``subscribe`` names does not exist.
        ForbiddenError: the user may not read a topic that the pattern matches.
    """
    if options.pattern is None:
        return {topic: known(client, topic) for topic in options.topics}
    found = {}
    for topic in client.list_topics()["name"].to_pylist():
        if matches(options.pattern, topic):
            with suppress(TopicNotFoundError):  # it was deleted meanwhile
                found[topic] = _matched(client, topic, pattern=options.pattern)
    return found


def _matched(client: Client, topic: str, *, pattern: str) -> TopicBounds:
    """Return the bounds of a topic that a pattern matches."""
    try:
        return TopicBounds.of(client, topic)
    except ForbiddenError as error:
        raise ForbiddenError(
            f"Topic {topic} matches the subscribePattern {pattern!r}: {error.message}",
            remedy="Narrow the pattern, or let an administrator grant the rights:"
            f" `rmq acl allow USER topic:{topic} --actions get,sub`.",
        ) from error


def known(client: Client, topic: str) -> TopicBounds:
    """Return the bounds of a topic that an option names.

    Raises:
        TopicNotFoundError: the topic does not exist; the error names similar topics.
    """
    try:
        return TopicBounds.of(client, topic)
    except TopicNotFoundError as error:
        raise TopicNotFoundError(
            f"There is no topic {topic}.",
            remedy=f"{_similar(client, topic)}Create it with `rmq topic create {topic}`, or correct"
            " the option that names it.",
        ) from error


def _similar(client: Client, topic: str) -> str:
    try:
        names = client.list_topics()["name"].to_pylist()
    except RocketMQError:  # to list topics takes a right that reading one does not
        return ""
    near = difflib.get_close_matches(topic, names, n=3)
    return f"Is {' or '.join(near)} meant? " if near else ""


def check_some(held: Mapping[str, TopicBounds], options: ReadOptions) -> None:
    """Refuse a pattern that no topic matches when a read begins.

    Raises:
        TopicNotFoundError: there is none.
    """
    if not held:
        raise TopicNotFoundError(
            f"No topic matches the subscribePattern {options.pattern!r}.",
            remedy="It must match the whole name; `rmq topic list` shows the names. Correct it, or"
            " create the topic first.",
        )


@dataclass(frozen=True, slots=True)
class Offsets:
    """An offset for each queue of one topic."""

    topic_id: int
    at: dict[int, int]


#: Offsets by topic.
OffsetsByTopic: TypeAlias = Mapping[str, Offsets]


def to_json(place: OffsetsByTopic) -> dict[str, Any]:
    """Return the offsets as JSON for a checkpoint; equal offsets give equal texts."""
    return {
        topic: {_TOPIC_ID: found.topic_id, **{str(q): found.at[q] for q in sorted(found.at)}}
        for topic, found in sorted(place.items())
    }


def from_json(said: Mapping[str, Mapping[str, int]]) -> dict[str, Offsets]:
    """Return the offsets from the result of ``to_json``."""
    return {
        topic: Offsets(found[_TOPIC_ID], {int(q): at for q, at in found.items() if q != _TOPIC_ID})
        for topic, found in said.items()
    }


def resolve(client: Client, held: TopicBounds, *, bound: Bound, options: ReadOptions) -> Offsets:
    """Return the offsets that a bound means now.

    Raises:
        RequestError: the bound misses a queue, or names an unknown one.
        IllegalOffsetError: an offset is not retained, and fail_on_data_loss is set.
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
            f"Topic {held.topic} has the queues {_listed(held.bounds)}: pass a number for each,"
            f" not for {_listed(wanted) or 'none'}."
        )
    if bound.kind == "times":
        return Offsets(
            held.topic_id,
            {q: client.offset_at(held.topic, q, at_ms=at) for q, at in wanted.items()},
        )
    found = {q: _retained(held, q, at=at, options=options) for q, at in wanted.items()}
    return Offsets(held.topic_id, found)


def _listed(queues: Mapping[int, Any]) -> str:
    return ", ".join(str(queue) for queue in sorted(queues))


def _retained(held: TopicBounds, queue_id: int, *, at: int, options: ReadOptions) -> int:
    low, high = held.bounds[queue_id]
    if at in (EARLIEST, LATEST):
        return low if at == EARLIEST else high
    if at > high and options.fail_on_data_loss:
        raise IllegalOffsetError(
            f"Queue {queue_id} of topic {held.topic} ends at offset {high}, before {at}."
        )
    return begin(held, queue_id, at=min(at, high), options=options)


def begin(held: TopicBounds, queue_id: int, *, at: int, options: ReadOptions) -> int:
    """Return the offset at which reading begins: ``at``, or the first that has not expired.

    Raises:
        IllegalOffsetError: messages have expired, and fail_on_data_loss is set.
    """
    low, _ = held.bounds[queue_id]
    if at >= low:
        return at
    lost = f"Offsets {at} to {low - 1} of queue {queue_id} of topic {held.topic} have expired."
    if options.fail_on_data_loss:
        raise IllegalOffsetError(f"{lost} {_GO_ON}")
    log.warning("%s", lost)
    return low


def check_deleted(
    held: Mapping[str, TopicBounds], begun: "OffsetsByTopic", *, options: ReadOptions
) -> None:
    """Look for topics of a checkpoint that the pattern matches and that no longer exist.

    Raises:
        IllegalOffsetError: there is one, and fail_on_data_loss is set.
    """
    if options.pattern is None:
        return
    gone = [topic for topic in begun if topic not in held and matches(options.pattern, topic)]
    if not gone:
        return
    lost = f"Topic {gone[0]} of the checkpoint was deleted."
    if options.fail_on_data_loss:
        raise IllegalOffsetError(f"{lost} {_GO_ON}")
    log.warning("%s", lost)


def is_same(held: TopicBounds, begun: Offsets, *, options: ReadOptions) -> bool:
    """Return True if offsets belong to the present topic of that name.

    Raises:
        IllegalOffsetError: the topic is another one, or ends before them, and fail_on_data_loss
            is set.
    """
    same = held.topic_id == begun.topic_id
    short = [q for q, at in begun.at.items() if at > held.bounds.get(q, (0, 0))[1]]
    if same and not short:
        return True
    lost = (
        f"Queue {short[0]} of topic {held.topic} ends before the offsets of the checkpoint."
        if same
        else f"Topic {held.topic} was deleted and created again: its offsets restart at 0."
    )
    if options.fail_on_data_loss:
        raise IllegalOffsetError(f"{lost} {_GO_ON}")
    log.warning("%s", lost)
    return same


def limited(start: OffsetsByTopic, end: OffsetsByTopic, *, limit: int | None) -> dict[str, Offsets]:
    """Return the end of a micro-batch of at most ``limit`` messages.

    Each queue advances in proportion to its waiting messages. ``start`` has all topics and queues
    of ``end``.
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
    # The largest remainders get one message more, so that no queue starves.
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
