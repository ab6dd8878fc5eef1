"""Checking what a caller gave, before anything is asked of the writer."""

from collections.abc import Mapping

from rmq_pipeline import limits
from rmq_pipeline.broker import queries
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.receiving import lite
from rmq_pipeline.broker.receiving.deliver import Receive
from rmq_pipeline.broker.receiving.filtering import sieve
from rmq_pipeline.errors import (
    IllegalOffsetError,
    IllegalTopicError,
    InvisibleDurationError,
    RequestError,
)
from rmq_pipeline.topic import is_hidden


def _whole(value: object, name: str, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} is a whole number from {low} to {high}, not {value!r}.")
    return value


def invisible_ms(duration_ms: object) -> int:
    """An invisible duration in range.

    Raises:
        InvisibleDurationError: it is not 1 ms to 12 h.
    """
    try:
        return _whole(
            duration_ms,
            "An invisible duration",
            low=limits.INVISIBLE_MIN_MS,
            high=limits.INVISIBLE_MAX_MS,
        )
    except RequestError as error:
        raise InvisibleDurationError(error.message) from error


def poll_ms(wait_ms: object) -> int:
    """A time to wait in range."""
    return _whole(wait_ms, "wait_ms", low=0, high=limits.POLL_MAX_MS)


def immunity_ms(duration_ms: object) -> int:
    """How long a half message is not asked about, in range."""
    high = limits.TRANSACTION_IMMUNITY_MAX_MS
    return _whole(duration_ms, "immunity_ms", low=1, high=high)


def check_readable(topic: str) -> None:
    """Refuse a topic whose messages no consumer group may see.

    Raises:
        IllegalTopicError: messages wait there for their time, or for the end of a transaction.
    """
    if is_hidden(topic):
        raise IllegalTopicError(f"Topic {topic} is the system's and not for consumer groups.")


def count(limit: object, *, high: int) -> int:
    """A number of rows in range."""
    return _whole(limit, "limit", low=1, high=high)


def receive(
    engine: Engine,
    topic: str,
    *,
    group: str,
    limit: int,
    invisible_duration_ms: int,
    filter: str,
    filter_type: str,
    client_id: str,
    window: tuple[str, int] | None,
) -> Receive:
    """A receive whose arguments are in range."""
    check_readable(topic)
    found = engine.state.topic(topic)
    if found.topic.type == "lite":
        lite.check_receive(client_id, filter)
    engine.state.group(group)
    return Receive(
        topic=topic,
        group=group,
        limit=_whole(limit, "limit", low=1, high=limits.RECEIVE_ROWS),
        invisible_duration_ms=invisible_ms(invisible_duration_ms),
        sieve=sieve(engine, filter, filter_type=filter_type, limit=limit),
        client_id=client_id,
        window=(window[0], int(window[1])) if window is not None else None,
        delivery=engine.new_delivery(),
    )


def offsets(given: object) -> dict[int, int]:
    """Offsets by queue; a door that speaks JSON gives the queues as text.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"offsets maps a queue_id to an offset, not {given!r}.")
    try:
        queues = [int(queue) for queue in given]
    except (TypeError, ValueError) as error:
        raise RequestError(f"offsets maps a queue_id to an offset: {error}.") from error
    numbers = (_whole(offset, "An offset", low=0, high=2**62) for offset in given.values())
    return dict(zip(queues, numbers, strict=True))


def reset(
    engine: Engine,
    topic: str,
    *,
    to_offset: int | None,
    to_time_ms: int | None,
    to_latest: bool,
    to_earliest: bool,
    queue_id: int | None,
) -> tuple[dict[int, int], bool]:
    """The offset asked for of each queue, and whether it is to be clipped to what is kept.

    Raises:
        RequestError: not exactly one target is given.
    """
    given = [to_offset is not None, to_time_ms is not None, to_latest, to_earliest]
    if sum(given) != 1:
        raise RequestError("Give one of to_offset, to_time_ms, to_latest, to_earliest.")
    _, bounds = engine.submit(queries.Offsets(topic))
    if queue_id is not None and not 0 <= queue_id < len(bounds):
        raise IllegalOffsetError(f"Topic {topic} has no queue {queue_id}.")
    chosen = range(len(bounds)) if queue_id is None else [queue_id]
    if to_offset is not None:
        _whole(to_offset, "to_offset", low=0, high=2**62)
        return dict.fromkeys(chosen, to_offset), False
    if to_time_ms is not None:
        return {
            q: queries.offset_at(engine, topic, queue_id=q, at_ms=to_time_ms) for q in chosen
        }, True
    return {q: bounds[q][1] if to_latest else bounds[q][0] for q in chosen}, True
