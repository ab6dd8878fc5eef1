"""Checks of a call's arguments, before the writer gets a request."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.decide import group_offsets
from rmq_pipeline.broker.decide.deliver import Receive
from rmq_pipeline.broker.state import members
from rmq_pipeline.broker.work import queries
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.filtering import row_filter
from rmq_pipeline.errors import (
    FilterExpressionError,
    IllegalQueueError,
    IllegalTopicError,
    InvisibleDurationError,
    RequestError,
    RocketMQError,
)
from rmq_pipeline.message import hash64
from rmq_pipeline.text import is_text
from rmq_pipeline.topic import is_hidden


def _whole(value: object, name: str, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}, not {value!r}.")
    return value


def invisible_ms(duration_ms: object) -> int:
    """Return a checked invisible duration.

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


def time_ms(at_ms: object, name: str) -> int:
    """Return a checked time in ms since 1970; RocketMQ takes a negative time as the queue's end.

    Raises:
        RequestError: it is negative, after the year 9999, or not an integer.
    """
    whole = -1 if isinstance(at_ms, bool) or not isinstance(at_ms, int) else at_ms
    if not 0 <= whole <= limits.TIME_MAX_MS:
        raise RequestError(
            f"{name} must be a time in ms since 1970, from 0 to {limits.TIME_MAX_MS} (the year"
            f" 9999), not {at_ms!r}.",
            remedy="Check how the time was computed. The end of a queue has a name of its own.",
        )
    return whole


def poll_ms(wait_ms: object) -> int:
    """Return a checked wait time in ms."""
    return _whole(wait_ms, "wait_ms", low=0, high=limits.POLL_MAX_MS)


def query_s(timeout_s: object) -> float:
    """Return a checked time limit of a query in seconds."""
    high = limits.QUERY_TIMEOUT_MAX_S
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise RequestError(f"timeout_s must be a number of seconds, not {timeout_s!r}.")
    if not 0 <= timeout_s <= high:
        raise RequestError(f"timeout_s must be a number from 0 to {high}, not {timeout_s!r}.")
    return timeout_s


def immunity_ms(duration_ms: object) -> int:
    """Return a checked time before the first check of a half message, in ms."""
    high = limits.TRANSACTION_IMMUNITY_MAX_MS
    return _whole(duration_ms, "immunity_ms", low=1, high=high)


def check_readable(topic: str) -> None:
    """Refuse a topic whose messages no consumer group may receive.

    Raises:
        IllegalTopicError: it holds scheduled or half messages.
    """
    if is_hidden(topic):
        raise IllegalTopicError(f"Topic {topic} is a system topic; consumer groups cannot read it.")


def count(limit: object, *, high: int) -> int:
    """Return a checked number of rows, 1 to ``high``."""
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
    queue_ids: Sequence[int] | None = None,
    attempt_id: str = "",
) -> Receive:
    """Return a receive with checked arguments, and record its filter."""
    check_readable(topic)
    found = engine.state.topic(topic)
    if found.topic.type == "lite":
        members.check_receive(client_id, filter)
    engine.state.group(group)
    asked = Receive(
        topic=topic,
        group=group,
        limit=_whole(limit, "limit", low=1, high=limits.RECEIVE_ROWS),
        invisible_duration_ms=invisible_ms(invisible_duration_ms),
        row_filter=row_filter(engine, expression(filter), filter_type=filter_type, limit=limit),
        client_id=text(client_id, "client_id"),
        window=held(window),
        delivery=engine.new_delivery(),
        queue_ids=None if queue_ids is None else frozenset(queues(queue_ids)),
        attempt_id_hash=attempt_id_hash(attempt_id, client_id, window=window),
    )
    # The runs of one window follow each other: they count as one consumer.
    who = asked.client_id if asked.window is None else asked.window[0]
    engine.filters.used((group, topic), who, filter=filter, filter_type=filter_type)
    return asked


def attempt_id_hash(attempt_id: object, client_id: str, *, window: object) -> int:
    """Return the hash of a client's attempt id, above 0; 0 without an attempt_id.

    Raises:
        RequestError: the id is not a text, or a window is given too.
    """
    attempt_id = text(attempt_id, "attempt_id")
    if attempt_id and window is not None:
        raise RequestError("A receive takes either an attempt_id or a window, not both.")
    if not attempt_id:
        return 0
    return 1 + abs(int(hash64(pa.array([f"{client_id}\n{attempt_id}"]))[0]) >> 1)


def queues(given: object) -> tuple[int, ...]:
    """Return checked queue ids without duplicates.

    Raises:
        RequestError: it is not a list of queue ids.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"queue_ids must be a list of numbers, not {given!r}.")
    return tuple(
        dict.fromkeys(_whole(one, "A queue_id", low=0, high=limits.QUEUES - 1) for one in given)
    )


def client(client_id: object) -> str:
    """Return a checked client id that identifies a client.

    Raises:
        RequestError: it is blank or too long.
    """
    known_by = text(client_id, "A client_id")
    if not known_by.strip() or len(known_by) > limits.CLIENT_ID_LENGTH:
        refusal = (
            f"A client_id must have 1 to {limits.CLIENT_ID_LENGTH} characters, not {client_id!r}."
        )
        raise RequestError(refusal)
    return known_by


def text(value: object, name: str, *, error: type[RocketMQError] = RequestError) -> str:
    """Return a text that can be stored.

    Raises:
        ``error``: it is not a text, or not valid Unicode.
    """
    if not isinstance(value, str):
        raise error(f"{name} must be a text, not {value!r}.")
    if not is_text(value):
        raise error(f"{name} has unpaired surrogates: {value!r}.")
    return value


def text_or_none(value: object, name: str) -> str | None:
    """Return a text that can be stored, or None."""
    return None if value is None else text(value, name)


def texts(values: Iterable[str], name: str) -> tuple[str, ...]:
    """Return texts that can be stored.

    Raises:
        RequestError: it is not a list, or a value is not a text or not valid Unicode.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list of texts, not {values!r}.")
    return tuple(text(value, f"One of {name}") for value in values)


def expression(given: str) -> str:
    """Return a filter as text; compiling it finds other faults.

    Raises:
        FilterExpressionError: it is not a text, or not valid Unicode.
    """
    return text(given, "filter", error=FilterExpressionError)


def held(window: tuple[str, int] | None) -> tuple[str, int] | None:
    """Return the name and epoch of a window.

    Raises:
        RequestError: it is not a pair of both.
    """
    if window is None:
        return None
    try:
        name, epoch = window
        return text(name, "A window's name"), int(epoch)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"window must be a name and an epoch, not {window!r}.") from error


def max_bytes(size: object) -> int:
    """Return a checked number of bytes."""
    return _whole(size, "max_bytes", low=1, high=limits.BATCH_BYTES)


def lock_ms(duration_ms: object) -> int:
    """Return a checked duration of queue locks in ms."""
    return _whole(duration_ms, "duration_ms", low=1, high=limits.QUEUE_LOCK_MAX_MS)


def offsets(given: object) -> dict[int, int]:
    """Return offsets by queue id; an endpoint that uses JSON passes the queue ids as text.

    Raises:
        RequestError: it is not such a mapping.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"offsets must map a queue_id to an offset, not {given!r}.")
    numbers = (_whole(offset, "An offset", low=0, high=2**62) for offset in given.values())
    return dict(zip(_queues_of(given), numbers, strict=True))


def changes(given: object) -> dict[int, tuple[int, int]]:
    """Return by queue id the expected offset, -1 for any, and the new one.

    Raises:
        RequestError: it is not such a mapping.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"offsets must map a queue_id to two offsets, not {given!r}.")
    pairs = []
    for pair in given.values():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RequestError(f"offsets must map a queue_id to (from, to), not to {pair!r}.")
        before = _whole(pair[0], "An offset to go from", low=-1, high=2**62)
        pairs.append((before, _whole(pair[1], "An offset", low=0, high=2**62)))
    return dict(zip(_queues_of(given), pairs, strict=True))


def _queues_of(given: Mapping[Any, Any]) -> list[int]:
    try:
        return [int(queue) for queue in given]
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"offsets must map a queue_id to an offset: {error}.") from error


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
    """Return the target offset of each queue, and True if it must be clipped to stored offsets.

    Raises:
        RequestError: not exactly one target is given.
    """
    given = [to_offset is not None, to_time_ms is not None, to_latest, to_earliest]
    if sum(given) != 1:
        raise RequestError("Give one of to_offset, to_time_ms, to_latest, to_earliest.")
    check_readable(topic)
    _, bounds = engine.submit(group_offsets.Offsets(topic))
    if queue_id is not None and not 0 <= queue_id < len(bounds):
        raise IllegalQueueError(f"Topic {topic} has no queue {queue_id}.")
    chosen = range(len(bounds)) if queue_id is None else [queue_id]
    if to_offset is not None:
        _whole(to_offset, "to_offset", low=0, high=2**62)
        return dict.fromkeys(chosen, to_offset), False
    if to_time_ms is not None:
        at_ms = time_ms(to_time_ms, "to_time_ms")
        return {q: queries.offset_at(engine, topic, queue_id=q, at_ms=at_ms) for q in chosen}, True
    return {q: bounds[q][1] if to_latest else bounds[q][0] for q in chosen}, True
