"""Options of the data source, named and validated as in Spark's Kafka source."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.connection import ENCRYPTED, Target
from rmq_pipeline.topic import DLQ_PREFIX

EARLIEST: Final = -2
LATEST: Final = -1

#: topic -> queue_id -> number; an offset may also be EARLIEST or LATEST.
PerQueue: TypeAlias = Mapping[str, Mapping[int, int]]

#: More than twice the length of a topic's name.
_PATTERN_CHARACTERS: Final = 300
_WHERE: Final = ("endpoint", "home")
#: Options that Spark adds itself.
_OF_SPARK: Final = ("checkpointLocation", "queryName", "outputMode", "batchId")
_READ: Final = (
    *_WHERE,
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
)
_BATCH: Final = (
    *_READ,
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "pushFilters",
)
_STREAM: Final = (*_READ, "maxOffsetsPerTrigger", "group")
_WRITE: Final = (*_WHERE, "topic", *_OF_SPARK)


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the broker for driver and tasks."""

    endpoint: str | None
    home: str | None

    def connect(self) -> Client:
        """Return a client; the caller closes it."""
        return Client(self.endpoint, home=self.home)


@dataclass(frozen=True, slots=True)
class Bound:
    """Start or end of a read."""

    kind: Literal["earliest", "latest", "offsets", "times"]
    #: Offsets, or times in ms since 1970; a single number is the time for all queues.
    at: "PerQueue | int | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Validated options of a read."""

    address: Address
    #: Empty with a pattern.
    topics: tuple[str, ...]
    #: The regular expression that the whole name of a topic matches; None: ``topics`` names them.
    pattern: str | None = None
    starting: Bound
    ending: Bound
    #: True: expired messages raise an error; False: they are skipped.
    fail_on_data_loss: bool
    min_partitions: int | None
    #: Maximum messages of one task.
    max_records: int | None
    #: Maximum messages of one micro-batch.
    max_offsets: int | None
    #: The consumer group under which a stream commits its progress.
    group: str | None
    #: The source evaluates Spark's filters. Off by default: see FilteringReader.
    push_filters: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Validated options of a write; without a topic, every row names its own."""

    address: Address
    topic: str | None


def for_batch(options: Mapping[str, str]) -> ReadOptions:
    """Return the options of a batch read.

    Raises:
        RequestError: an option is unknown, missing or invalid.
    """
    _check_known(options, _BATCH, of="a batch read")
    starting = _bound(options, "starting", otherwise=Bound("earliest"))
    if starting.kind == "latest":
        raise RequestError(
            "A batch read cannot start at the latest offsets: no message follows them."
        )
    ending = _bound(options, "ending", otherwise=Bound("latest"))
    if ending.kind == "earliest":
        raise RequestError("A batch read cannot end at the earliest offsets.")
    return _read(options, starting=starting, ending=ending)


def for_stream(options: Mapping[str, str]) -> ReadOptions:
    """Return the options of a stream read.

    Raises:
        RequestError: an option is unknown, missing or invalid.
    """
    _check_known(options, _STREAM, of="a stream read")
    starting = _bound(options, "starting", otherwise=Bound("latest"))
    return _read(options, starting=starting, ending=Bound("latest"))


def for_write(options: Mapping[str, str]) -> WriteOptions:
    """Return the options of a batch or stream write.

    Raises:
        RequestError: an option is unknown.
    """
    _check_known(options, _WRITE, of="a write")
    return WriteOptions(_address(options), options.get("topic") or None)


def includes_headers(options: Mapping[str, str]) -> bool:
    """Return True if the read includes the properties.

    Raises:
        RequestError: the option is neither true nor false.
    """
    return _flag(options, "includeHeaders", otherwise=True)


def _read(options: Mapping[str, str], *, starting: Bound, ending: Bound) -> ReadOptions:
    topics, pattern = _subscribed(options)
    for bound in (starting, ending):
        if isinstance(bound.at, Mapping):
            odd = [
                topic
                for topic in sorted(bound.at)
                if not _names(topic, topics=topics, pattern=pattern)
            ]
            if odd:
                option = "subscribe" if pattern is None else "subscribePattern"
                raise RequestError(
                    f"Offsets are set for {', '.join(odd)}, which {option} does not name."
                )
    return ReadOptions(
        address=_address(options),
        topics=topics,
        pattern=pattern,
        starting=starting,
        ending=ending,
        fail_on_data_loss=_flag(options, "failOnDataLoss", otherwise=True),
        min_partitions=_count(options, "minPartitions"),
        max_records=_count(options, "maxRecordsPerPartition"),
        max_offsets=_count(options, "maxOffsetsPerTrigger"),
        group=options.get("group") or None,
        push_filters=_flag(options, "pushFilters", otherwise=False),
    )


def _subscribed(options: Mapping[str, str]) -> tuple[tuple[str, ...], str | None]:
    """Return the topics that the options name, or the pattern of their names."""
    named, pattern = options.get("subscribe"), options.get("subscribePattern")
    if named is not None and pattern is not None:
        raise RequestError("Set either subscribe or subscribePattern, not both.")
    if pattern is not None:
        _check_pattern(pattern)
        return (), pattern
    topics = tuple(dict.fromkeys(name.strip() for name in (named or "").split(",")))
    if not all(topics):
        raise RequestError(
            "The option subscribe must name the topics to read, separated by commas;"
            " or set subscribePattern to a regular expression of their names."
        )
    return topics, None


def _check_pattern(pattern: str) -> None:
    if not pattern or len(pattern) > _PATTERN_CHARACTERS:
        raise RequestError(
            f"subscribePattern must have 1 to {_PATTERN_CHARACTERS} characters, not {len(pattern)}."
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(
            f"subscribePattern must be a regular expression of Python's re, not {pattern!r}:"
            f" {error}."
        ) from error


def matches(pattern: str, topic: str) -> bool:
    """Return True if a pattern matches the whole name of a topic.

    Dead letter topics match only a pattern that begins like their names, so that ``.*`` does not
    read failed messages twice.
    """
    if topic.startswith(DLQ_PREFIX) and not pattern.startswith(DLQ_PREFIX):
        return False
    return re.fullmatch(pattern, topic) is not None


def _names(topic: str, *, topics: tuple[str, ...], pattern: str | None) -> bool:
    return topic in topics if pattern is None else matches(pattern, topic)


def _check_known(options: Mapping[str, str], known: tuple[str, ...], *, of: str) -> None:
    lowered = {name.lower(): name for name in known}
    for name in options:
        if name.lower() not in lowered:
            near = difflib.get_close_matches(name.lower(), lowered, n=1)
            meant = f" Is {lowered[near[0]]} meant?" if near else ""
            raise RequestError(
                f"{of.capitalize()} has no option {name}.{meant} Known are {', '.join(known)}."
            )


def _address(options: Mapping[str, str]) -> Address:
    """Return the given address, or this process's default as absolute: tasks have other folders."""
    endpoint, home = options.get("endpoint"), options.get("home")
    if endpoint and home:
        raise RequestError("Set either endpoint or home, not both.")
    target = Target.find(endpoint, home=home, token=None)
    if target.address is not None and target.encrypted:
        return Address(",".join(ENCRYPTED + each for each in target.addresses()), None)
    return Address(target.address, None if target.home is None else str(Path.absolute(target.home)))


def _bound(options: Mapping[str, str], edge: str, *, otherwise: Bound) -> Bound:
    """Return the most specific bound, as in the Kafka source: a time, times of queues, offsets."""
    if (time := options.get(f"{edge}Timestamp")) is not None:
        return Bound("times", _whole(f"{edge}Timestamp", time, low=0))
    if (times := options.get(f"{edge}OffsetsByTimestamp")) is not None:
        return Bound("times", per_queue(f"{edge}OffsetsByTimestamp", times, low=0))
    said = options.get(f"{edge}Offsets")
    if said is None:
        return otherwise
    if said.lower() == "earliest":
        return Bound("earliest")
    if said.lower() == "latest":
        return Bound("latest")
    return Bound("offsets", per_queue(f"{edge}Offsets", said, low=EARLIEST))


def per_queue(name: str, text: str, *, low: int) -> PerQueue:
    """Return the numbers of queues by topic, from the Kafka source's JSON.

    Raises:
        RequestError: the text is not such JSON.
    """
    try:
        found = json.loads(text)
        return {topic: _numbers(queues, low=low) for topic, queues in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestError(
            f'{name} must be earliest, latest, or JSON like {{"topic": {{"0": 23, "1": -2}}}},'
            f" not {text!r}."
        ) from error


def _numbers(queues: Any, *, low: int) -> dict[int, int]:
    found = {int(queue): number for queue, number in queues.items() if queue != "topic_id"}
    if not all(type(number) is int and number >= low for number in found.values()):
        raise ValueError
    return found


def _count(options: Mapping[str, str], name: str) -> int | None:
    said = options.get(name)
    return None if said is None else _whole(name, said, low=1)


def _whole(name: str, said: str, *, low: int) -> int:
    try:
        number = int(said)
    except ValueError:
        number = low - 1
    if number < low:
        raise RequestError(f"{name} must be a whole number of at least {low}, not {said!r}.")
    return number


def _flag(options: Mapping[str, str], name: str, *, otherwise: bool) -> bool:
    said = options.get(name, str(otherwise)).lower()
    if said not in ("true", "false"):
        raise RequestError(f"{name} must be true or false, not {said!r}.")
    return said == "true"
