"""Route table: the file that says which broker has which topics, and where that broker is."""

import logging
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, get_args

from rmq_pipeline import limits
from rmq_pipeline.access.source import is_address, split_address
from rmq_pipeline.errors import IllegalTopicError, RequestError
from rmq_pipeline.settings import BROKER_NAME, Settings
from rmq_pipeline.text import is_text
from rmq_pipeline.topic import Topic, TopicType, check_known

log = logging.getLogger(__name__)

#: Keys of a broker, and of a topic.
_ADDRESSES: Final = ("grpc", "grpc_tls", "flight")
_OF_TOPIC: Final = ("type", "queues")
#: Python's simple consumers of lite topics read the first queue of a route only, and clients
#: announce their lite topics to the address that they dial, not to the brokers of the route.
_ONE_BROKER: Final = "lite"


@dataclass(frozen=True, slots=True)
class RoutedBroker:
    """A broker and its addresses, as clients reach them; several: the broker and its standbys."""

    name: str
    grpc: tuple[str, ...]
    grpc_tls: tuple[str, ...] = ()
    flight: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoutedTopic:
    """A topic, and the number of its queues at each of its brokers."""

    name: str
    #: One of TopicType.
    type: str
    queues: Mapping[str, int]

    def places(self) -> list[tuple[str, int]]:
        """Return the broker and the id of each queue, in the order of the route.

        Clients hash message groups over this order, so it is the same at every broker. Neighbours
        are queues of different brokers, because a client repeats a failed send at the next queue.
        """
        places = ((id_, name) for name, count in self.queues.items() for id_ in range(count))
        return [(name, id_) for id_, name in sorted(places)]


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Brokers and topics by name."""

    brokers: Mapping[str, RoutedBroker]
    topics: Mapping[str, RoutedTopic]

    @classmethod
    def parse(cls, text: str, *, broker_name: str) -> Self:
        """Return the table of a TOML text.

        Args:
            broker_name: the broker that reads the table.

        Raises:
            RequestError: names the fault and its remedy, but not the file.
        """
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"It is not valid TOML: {error}.",
                remedy="Correct the place; name each broker, topic and key once.",
            ) from error
        _check_keys(content, ("brokers", "topics"), of="The table")
        brokers = _brokers(_table(content, "brokers", of="The table"))
        if broker_name not in brokers:
            raise RequestError(
                f"This broker's name is {broker_name}; the brokers are {', '.join(brokers)}.",
                remedy="Set broker_name to the name of this broker, or add it to the table.",
            )
        topics = _table(content, "topics", of="The table")
        return cls(
            brokers, {name: _topic(name, told, brokers=brokers) for name, told in topics.items()}
        )

    def differences(
        self, broker_name: str, find: Callable[[str], Topic | None]
    ) -> Iterator[tuple[str, str]]:
        """Yield topics of a broker that are not as the table says, and what differs.

        Args:
            find: returns the broker's own topic; None if there is none.
        """
        for routed in self.topics.values():
            queues = routed.queues.get(broker_name)
            if queues is None:
                continue
            topic = find(routed.name)
            if topic is None:
                yield routed.name, "is not created at this broker"
            elif topic.type != routed.type:
                yield routed.name, f"has type {topic.type} here, {routed.type} in the route table"
            elif topic.queues != queues:
                yield routed.name, f"has {topic.queues} queues here, {queues} in the route table"


def _brokers(content: Mapping[str, Any]) -> dict[str, RoutedBroker]:
    if not 1 <= len(content) <= limits.ROUTE_BROKERS:
        raise RequestError(
            f"It has {len(content)} brokers; 1 to {limits.ROUTE_BROKERS} are possible.",
            remedy='Name each broker in a line below [brokers]: a = {grpc = "HOST:PORT"}.',
        )
    brokers = {name: _broker(name, told) for name, told in content.items()}
    _check_distinct(brokers.values())
    plain = [each.name for each in brokers.values() if not each.grpc_tls]
    if 0 < len(plain) < len(brokers):
        raise RequestError(
            f"Broker {plain[0]} has no grpc_tls, and other brokers have one.",
            remedy="Give all brokers grpc_tls, or none: a client encrypts all or nothing.",
        )
    return brokers


def _broker(name: str, content: Any) -> RoutedBroker:
    if not BROKER_NAME.fullmatch(name):
        raise RequestError(
            f"Broker name {name!r} has characters that are not allowed, or too many.",
            remedy="Use 1 to 127 of the characters A-Z a-z 0-9 _ - .",
        )
    of = f"Broker {name}"
    if not isinstance(content, dict):
        raise RequestError(
            f"{of} is {content!r}.", remedy=f'Write {name} = {{grpc = "HOST:PORT"}}.'
        )
    _check_keys(content, _ADDRESSES, of=of)
    if "grpc" not in content:
        raise RequestError(f"{of} has no grpc.", remedy='Add grpc = "HOST:PORT".')
    return RoutedBroker(
        name, **{key: _addresses(told, f"{key} of broker {name}") for key, told in content.items()}
    )


def _addresses(told: Any, of: str) -> tuple[str, ...]:
    """Return the addresses of a list with commas: one, or those of a broker and its standbys."""
    remedy = "Write HOST:PORT, as clients reach it; commas separate a broker and its standbys."
    if not isinstance(told, str):
        raise RequestError(f"{of} is {told!r}, not text.", remedy=remedy)
    addresses = tuple(each.strip() for each in told.split(","))
    hosts = []
    for address in addresses:
        try:
            host, port = split_address(address)
        except RequestError as error:
            raise RequestError(f"{of} is {address!r}, not HOST:PORT.", remedy=remedy) from error
        if not port or not is_text(host) or any(each.isspace() or each == "/" for each in host):
            raise RequestError(f"{of} is {address!r}, not HOST:PORT.", remedy=remedy)
        hosts.append(host)
    families = {(is_address(host), ":" in host) for host in hosts}
    if len(hosts) > 1 and (len(families) > 1 or not is_address(hosts[0])):
        raise RequestError(
            f"{of} has several addresses, of which one is a name or of another family.",
            remedy="Use IPv4 or IPv6 addresses only, or one name: RocketMQ's clients take no more.",
        )
    return addresses


def _check_distinct(brokers: Any) -> None:
    owners: dict[str, str] = {}
    for broker in brokers:
        for address in (*broker.grpc, *broker.grpc_tls, *broker.flight):
            other = owners.setdefault(address, broker.name)
            if other != broker.name:
                raise RequestError(
                    f"Brokers {other} and {broker.name} have the same address {address}.",
                    remedy="Give each broker its own addresses.",
                )


def _topic(name: str, content: Any, *, brokers: Mapping[str, RoutedBroker]) -> RoutedTopic:
    of = f"Topic {name}"
    try:
        check_known(name)
    except IllegalTopicError as error:
        raise RequestError(error.message, remedy=error.remedy) from error
    if not isinstance(content, dict):
        raise RequestError(f"{of} is {content!r}.", remedy=f"Begin it with a line [topics.{name}].")
    _check_keys(content, _OF_TOPIC, of=of)
    kind: Any = content.get("type")
    if kind not in get_args(TopicType):
        raise RequestError(
            f"{of} has type {kind!r}.", remedy=f"Use one of {', '.join(get_args(TopicType))}."
        )
    queues = _table(content, "queues", of=of)
    _check_queues(queues, brokers, of=of)
    if kind == _ONE_BROKER and len(queues) > 1:
        raise RequestError(
            f"{of} has type lite and {len(queues)} brokers.",
            remedy="Give a lite topic one broker, and let its clients dial that one.",
        )
    return RoutedTopic(name, kind, queues)


def _check_queues(
    queues: Mapping[str, Any], brokers: Mapping[str, RoutedBroker], *, of: str
) -> None:
    if not queues:
        raise RequestError(
            f"{of} is at no broker.",
            remedy="Name its brokers and the number of its queues there: queues = {a = 4, b = 4}.",
        )
    for name, count in queues.items():
        if name not in brokers:
            raise RequestError(
                f"{of} is at broker {name}, which the table does not have.",
                remedy=f"Use one of {', '.join(brokers)}, or add {name} below [brokers].",
            )
        whole = isinstance(count, int) and not isinstance(count, bool)
        if not whole or not 1 <= count <= limits.QUEUES:
            raise RequestError(
                f"{of} has {count!r} queues at broker {name}.",
                remedy=f"Use a number from 1 to {limits.QUEUES}.",
            )
    if (total := sum(queues.values())) > limits.ROUTE_QUEUES:
        raise RequestError(
            f"{of} has {total} queues; a route has {limits.ROUTE_QUEUES} at most.",
            remedy="Lower the numbers in proportion: they need not be those of the brokers.",
        )


def _table(content: Mapping[str, Any], key: str, *, of: str) -> dict[str, Any]:
    found = content.get(key, {})
    if not isinstance(found, dict):
        raise RequestError(
            f"{of} has {key} = {found!r}, which is no table.", remedy="See docs/routes.md."
        )
    return found


def _check_keys(content: Mapping[str, Any], known: tuple[str, ...], *, of: str) -> None:
    unknown = [key for key in content if key not in known]
    if unknown:
        raise RequestError(
            f"{of} has the unknown key {unknown[0]}.", remedy=f"The keys are {', '.join(known)}."
        )


class RouteFile:
    """The file of the route table, which is read again when it changes. Safe for all threads."""

    def __init__(self, path: Path, *, broker_name: str) -> None:
        """Read the file.

        Raises:
            RequestError: the file cannot be read, or has a fault.
        """
        self.path = path
        self.broker_name = broker_name
        self._lock = threading.Lock()
        #: Modification time, size and inode of the file that was read last; None: it was missing.
        self._stamp = _stamp(path)
        self.table = _read(path, broker_name)
        #: Fault of a later file; the table before it stays in force.
        self.fault: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """Return the file that the settings name; None if they name none.

        Raises:
            RequestError: the file cannot be read, or has a fault.
        """
        if settings.route_table is None:
            return None
        return cls(Path(settings.route_table), broker_name=settings.broker_name)

    def refresh(self) -> None:
        """Read the file again if it has changed; a file with a fault changes nothing."""
        with self._lock:
            stamp = _stamp(self.path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self.table = _read(self.path, self.broker_name)
            except RequestError as error:
                self.fault = str(error)
                log.warning("the route table stays as it was: %s", error)
            else:
                self.fault = None
                log.info("read the route table again: %s", self.path)

    def report(self, find: Callable[[str], Topic | None]) -> dict[str, Any]:
        """Return the state of the table for ``rmq status``; ``find`` as in ``differences``."""
        self.refresh()
        return {
            "file": str(self.path),
            "broker": self.broker_name,
            "brokers": {name: list(each.grpc) for name, each in self.table.brokers.items()},
            "topics": len(self.table.topics),
            "fault": self.fault,
            "differences": [
                f"Topic {name} {what}."
                for name, what in self.table.differences(self.broker_name, find)
            ],
        }


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path, broker_name: str) -> RouteTable:
    """Return the table of a file.

    Raises:
        RequestError: the file cannot be read, or has a fault.
    """
    try:
        with path.open("rb") as file:
            content = file.read(limits.ROUTE_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError(
            f"The route table {path} cannot be read: {error.strerror}.",
            remedy="Write the file, or give the setting route_table another one (default: none).",
        ) from error
    if len(content) > limits.ROUTE_FILE_BYTES:
        raise RequestError(
            f"The route table {path} has more than {limits.ROUTE_FILE_BYTES} bytes.",
            remedy="Name fewer topics.",
        )
    try:
        return RouteTable.parse(content.decode(), broker_name=broker_name)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The route table {path} is not UTF-8: {error.reason} at byte {error.start}.",
            remedy="Save the file as UTF-8.",
        ) from error
    except RequestError as error:
        raise RequestError(
            f"The route table {path} has a fault. {error.message}", remedy=error.remedy
        ) from error
