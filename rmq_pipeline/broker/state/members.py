"""Clients of consumer groups in the state: their lite topics, and their queue locks."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.errors import (
    FilterExpressionError,
    IllegalLiteTopicError,
    LiteSubscriptionQuotaError,
    QueueLockedError,
    RequestError,
)
from rmq_pipeline.message import Int64s, hash64
from rmq_pipeline.store.events import Kind
from rmq_pipeline.text import is_text

ACTIONS: Final = ("add", "remove", "replace", "clear")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
#: group_id, topic_id, queue_id.
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Lite topics of one client."""

    names: tuple[str, ...] = ()
    #: Hashes of the names, equal to message_group_hash of their messages.
    hashes: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, names: Iterable[str]) -> "Wanted":
        """Return the sorted names without duplicates."""
        ordered = tuple(sorted(set(names)))
        return cls(ordered, hash64(pa.array(ordered, pa.string())))


_NOTHING: Final = Wanted()


class Subscriptions:
    """Lite topics of all clients, by consumer group and topic."""

    def __init__(self) -> None:
        self._clients: dict[tuple[int, int], dict[str, Wanted]] = {}

    def of(self, group_id: int, topic_id: int, *, client_id: str) -> Wanted:
        """Return the lite topics of a client; empty if it has no subscription."""
        return self._clients.get((group_id, topic_id), {}).get(client_id, _NOTHING)

    def clients(self, group_id: int, topic_id: int) -> dict[str, Wanted]:
        """Return the lite topics of each client that has any."""
        return dict(self._clients.get((group_id, topic_id), {}))

    def put(self, group_id: int, topic_id: int, *, client_id: str, detail: str) -> None:
        """Replace a client's lite topics; ``detail`` is a JSON list of names."""
        names = json.loads(detail)
        clients = self._clients.setdefault((group_id, topic_id), {})
        if names:
            clients[client_id] = Wanted.of(names)
        else:
            clients.pop(client_id, None)
        if not clients:
            del self._clients[group_id, topic_id]

    def forget(self, *, topic_id: int = 0, group_id: int = 0) -> None:
        """Drop the subscriptions of a deleted topic or consumer group."""
        gone = [key for key in self._clients if key[0] == group_id or key[1] == topic_id]
        for key in gone:
            del self._clients[key]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._clients)


def synced(before: Wanted, action: str, *, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a client's lite topics after an action.

    Raises:
        RequestError: the action is unknown, or ``clear`` has names.
        LiteSubscriptionQuotaError: they exceed limits.LITE_TOPICS_PER_CLIENT.
    """
    if action not in ACTIONS:
        raise RequestError(f"Action {action!r} is not one of {', '.join(ACTIONS)}.")
    if action == "clear" and names:
        raise RequestError("Action clear takes no lite topics.")
    after = set(names)
    if action == "add":
        after |= set(before.names)
    elif action == "remove":
        after = set(before.names) - after
    if len(after) > limits.LITE_TOPICS_PER_CLIENT:
        raise LiteSubscriptionQuotaError(
            f"A client may have {limits.LITE_TOPICS_PER_CLIENT} lite topics, not {len(after)}."
        )
    return tuple(sorted(after))


def check_names(names: Any) -> tuple[str, ...]:
    """Check names of lite topics, with the rules of message groups; return them as a tuple.

    Raises:
        IllegalLiteTopicError: one is blank, too long, or has a control character.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise IllegalLiteTopicError(f"lite_topics must be a list of names, not {names!r}.")
    given = tuple(names)
    for name in given:
        if not is_text(name) or not name.strip() or _CONTROL.search(name):
            raise IllegalLiteTopicError(
                f"Lite topic {name!r} is not a text, is blank, or has a control character."
            )
        if len(name.encode()) > limits.MESSAGE_GROUP_BYTES:
            raise IllegalLiteTopicError(f"Lite topic {name!r} is over 63 bytes.")
    return given


def check_client(client_id: Any) -> str:
    """Check a client id for subscriptions, and return it.

    Raises:
        RequestError: it is blank, too long, or not valid Unicode.
    """
    fits = isinstance(client_id, str) and bool(client_id.encode(errors="ignore").strip())
    fits = fits and client_id.encode(errors="replace").decode() == client_id
    if not fits or len(client_id) > limits.CLIENT_ID_LENGTH:
        raise RequestError(
            f"A lite topic needs a client_id of 1 to {limits.CLIENT_ID_LENGTH} characters, not"
            f" {client_id!r}."
        )
    return str(client_id)


def check_receive(client_id: Any, filter: Any) -> None:
    """Check the arguments of a receive from a lite topic.

    Raises:
        RequestError: the client id is missing or invalid.
        FilterExpressionError: it has a filter. A filtered message would be lost for other clients.
    """
    check_client(client_id)
    if filter not in ("", "*"):
        raise FilterExpressionError(
            "A topic of type lite takes no filter: clients subscribe to its lite topics.",
            remedy="Omit the filter.",
        )


@dataclass(frozen=True, slots=True)
class QueueLock:
    """Lock of a queue, valid until ``expires_at_ms``."""

    client_id: str
    expires_at_ms: int
    #: Since when the client holds the lock without a break, and when it last renewed it.
    locked_at_ms: int
    renewed_at_ms: int

    def holds(self, now_ms: int) -> bool:
        """Return True if it has not expired."""
        return self.expires_at_ms > now_ms

    def refusal(self, queue_id: int, *, topic: str, group: str) -> QueueLockedError:
        """Return the error for other clients."""
        error = QueueLockedError(
            f"Queue {queue_id} of topic {topic} is locked for consumer group {group} by client"
            f" {self.client_id} until {self.expires_at_ms} ms since 1970."
        )
        error.queue_id, error.holder = queue_id, self.client_id
        error.expires_at_ms = self.expires_at_ms
        return error


class QueueLocks:
    """Locks of all consumer groups, including expired ones."""

    def __init__(self) -> None:
        self._topics: dict[tuple[int, int], dict[int, QueueLock]] = {}

    def get(self, key: Key) -> QueueLock | None:
        """Return the last lock of a queue, expired or not."""
        return self._topics.get(key[:2], {}).get(key[2])

    def of_others(
        self, group_id: int, topic_id: int, *, client_id: str, now_ms: int
    ) -> Mapping[int, QueueLock]:
        """Return the valid locks of other clients on a topic, by queue_id."""
        found = self._topics.get((group_id, topic_id))
        if not found:
            return {}
        return {
            queue_id: lock
            for queue_id, lock in found.items()
            if lock.client_id != client_id and lock.holds(now_ms)
        }

    def of_group(self, group_id: int) -> Iterator[tuple[Key, QueueLock]]:
        """Yield all locks of a consumer group."""
        for (group, topic), locks in self._topics.items():
            if group == group_id:
                for queue_id, lock in locks.items():
                    yield (group, topic, queue_id), lock

    def put(self, key: Key, lock: QueueLock) -> None:
        """Set the lock of a queue."""
        self._topics.setdefault(key[:2], {})[key[2]] = lock

    def apply(self, events: EventRows) -> None:
        """Apply lock, renewal and unlock events; the last row decides."""
        key = (events.group_id, events.topic_id, events.queue_id)
        if events.kind == Kind.QUEUE_UNLOCKED:
            self._topics.get(key[:2], {}).pop(key[2], None)
            return
        lock = QueueLock(
            events.client_id or "",
            int(events.column("visible_at_ms", np.int64)[-1]),
            int(events.column("locked_at_ms", np.int64)[-1]),
            events.at_ms,
        )
        self.put(key, lock)

    def forget(self, *, topic_id: int = 0, group_id: int = 0) -> None:
        """Drop the locks of a deleted topic or consumer group."""
        for key in [key for key in self._topics if key[0] == group_id or key[1] == topic_id]:
            del self._topics[key]
