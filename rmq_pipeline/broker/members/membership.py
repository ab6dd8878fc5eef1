"""Who is a member of each consumer group; known while the broker runs, by their heartbeats."""

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmq_pipeline import limits
from rmq_pipeline.broker.members.locking import UnlockMember
from rmq_pipeline.broker.writer import Request
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import BusyError, RequestError
from rmq_pipeline.text import is_text

#: Versions begin anywhere, so that one of an earlier start of the broker is not taken for one of
#: this start.
_VERSION_BITS = 48


@dataclass(slots=True)
class _Member:
    topics: tuple[str, ...]
    #: What it says of itself.
    details: Mapping[str, Any]
    since_ms: int
    seen_ms: int
    #: The thread that its last heartbeat came in.
    heard_in: int
    #: Calls of it that wait now.
    waiting: int = 0
    cut_off_ms: int | None = None

    def gone_at_ms(self, timeout_ms: int) -> int | None:
        """When it is gone if nothing is heard of it; None while it waits for an answer."""
        if self.cut_off_ms is not None:
            return self.cut_off_ms + limits.MEMBER_CUT_OFF_MS
        return None if self.waiting else self.seen_ms + timeout_ms


@dataclass(slots=True)
class _Group:
    condition: threading.Condition = field(default_factory=threading.Condition)
    version: int = field(default_factory=lambda: secrets.randbits(_VERSION_BITS))
    members: dict[str, _Member] = field(default_factory=dict)

    def changed(self) -> None:
        """Wake who waits for that; the condition is held."""
        self.version += 1
        self.condition.notify_all()


class Members:
    """The members of all consumer groups. For any thread."""

    def __init__(self, clock: Clock, *, timeout_ms: int) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._groups: dict[str, _Group] = {}
        self._lock = threading.Lock()
        self._closed = False
        #: What other doors know of consumers of a group, by client id: they are no members, and
        #: only shown beside them.
        self.others: list[Callable[[str], Mapping[str, Mapping[str, Any]]]] = []

    def _group(self, name: str) -> _Group:
        with self._lock:
            return self._groups.setdefault(name, _Group())

    def heard(
        self, group: str, client_id: str, *, topics: tuple[str, ...], details: Mapping[str, Any]
    ) -> None:
        """A heartbeat: it is a member, and has these topics.

        Raises:
            BusyError: the group has as many members as may be.
        """
        found, now_ms = self._group(group), self._clock.now_ms()
        heard_in = threading.get_ident()
        with found.condition:
            member = found.members.get(client_id)
            if member is None:
                if len(found.members) >= limits.GROUP_MEMBERS:
                    raise BusyError(f"Group {group} has {len(found.members)} members.")
                member = _Member(topics, details, now_ms, now_ms, heard_in)
                found.members[client_id] = member
                found.changed()
            elif member.topics != topics:
                member.topics = topics
                found.changed()
            member.details, member.seen_ms, member.cut_off_ms = details, now_ms, None
            member.heard_in = heard_in

    def wait(self, group: str, client_id: str, *, known_version: int, at_ms: int) -> bool:
        """Wait for another version of the group, until ``at_ms``; whether to look again then.

        It ends when the client is no member any more, too, and when some member may be gone.
        """
        found = self._group(group)
        with found.condition:
            member = found.members.get(client_id)
            if member is None or found.version != known_version or self._closed:
                return False
            if self._clock.now_ms() >= at_ms:
                return False
            member.waiting += 1
            try:
                moments = (m.gone_at_ms(self._timeout_ms) for m in found.members.values())
                wake = min([at_ms, *(moment for moment in moments if moment is not None)])
                self._clock.wait_until(found.condition, wake)
            finally:
                member.waiting -= 1
                member.seen_ms = self._clock.now_ms()
        return True

    def cut_off(self, group: str, client_id: str) -> None:
        """The waiting call of this thread has lost its caller, who may be gone.

        It is not, where it has called again meanwhile: a call has its thread to itself.
        """
        found, heard_in = self._group(group), threading.get_ident()
        with found.condition:
            member = found.members.get(client_id)
            if member is None or member.heard_in != heard_in:
                return
            if member.cut_off_ms is None:
                member.cut_off_ms = self._clock.now_ms()
                found.condition.notify_all()  # they have to look earlier than they thought

    def leave(self, group: str, client_id: str) -> bool:
        """A member goes; whether it was one."""
        found = self._group(group)
        with found.condition:
            was_there = found.members.pop(client_id, None) is not None
            if was_there:
                found.changed()
        return was_there

    def was_reset(self, group: str, topic: str) -> None:
        """Somebody has put a group elsewhere in a topic."""
        with self._lock:
            found = self._groups.get(group)
        if found is not None:
            with found.condition:
                if any(topic in member.topics for member in found.members.values()):
                    found.changed()

    def let_go(self, submit: Callable[[Request], Any], *, group: str | None = None) -> None:
        """Have those who are gone be members no more, and their queues unlocked.

        Args:
            group: of this consumer group only.
        """
        with self._lock:
            groups = [(n, g) for n, g in self._groups.items() if group in (None, n)]
        for name, found in groups:
            gone = self._gone(found)
            for client_id, _, gone_at_ms in gone:
                submit(UnlockMember(name, client_id, gone_at_ms))
            # Only now, as who learns of it is to find the queues unlocked; and they are tried
            # again where that failed.
            self._forget(found, gone)

    def _gone(self, found: _Group) -> list[tuple[str, _Member, int]]:
        """Client id, member and moment of those who are gone."""
        with found.condition:
            now_ms = self._clock.now_ms()
            moments = [(i, m, m.gone_at_ms(self._timeout_ms)) for i, m in found.members.items()]
        return [(i, member, at) for i, member, at in moments if at is not None and at <= now_ms]

    def _forget(self, found: _Group, gone: list[tuple[str, _Member, int]]) -> None:
        """They are members no more, unless they have come back."""
        with found.condition:
            here = found.members
            for client_id, member, gone_at_ms in gone:
                is_same = here.get(client_id) is member
                if is_same and member.gone_at_ms(self._timeout_ms) == gone_at_ms:
                    del here[client_id]
                    found.changed()

    def topics_of(self, group: str) -> tuple[int, dict[str, dict[str, list[str]]]]:
        """The version of a group, and the topics of its members by client id."""
        found = self._group(group)
        with found.condition:
            members = sorted(found.members.items())
            return found.version, {i: {"topics": list(m.topics)} for i, m in members}

    def described(self, group: str) -> dict[str, dict[str, Any]]:
        """All that is known of the consumers of a group, by client id."""
        shown: dict[str, dict[str, Any]] = {
            client_id: dict(facts)
            for source in self.others
            for client_id, facts in source(group).items()
        }
        with self._lock:
            found = self._groups.get(group)
        if found is not None:
            with found.condition:
                for client_id, member in found.members.items():
                    shown[client_id] = {
                        "topics": list(member.topics),
                        "joined_at_ms": member.since_ms,
                        "seen_at_ms": member.seen_ms,
                        "details": member.details,
                    }
        return dict(sorted(shown.items()))

    def close(self) -> None:
        """Wake everybody for good."""
        self._closed = True
        with self._lock:
            groups = list(self._groups.values())
        for found in groups:
            with found.condition:
                found.condition.notify_all()


def topics_in(given: object) -> tuple[str, ...]:
    """The topics of a member, each once.

    Raises:
        RequestError: it is something else, or they are too many.
    """
    # A mapping has names, too, but doors see none in it and would ask for no rights on them.
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise RequestError(f"topics is a list of names, not {given!r}.")
    every = list(given)
    if not all(is_text(name) and name for name in every):
        raise RequestError(f"topics is a list of names, not {every!r}.")
    names = tuple(dict.fromkeys(every))
    if len(names) > limits.MEMBER_TOPICS:
        raise RequestError(f"A member has {limits.MEMBER_TOPICS} topics, not {len(names)}.")
    return names


def details_in(given: object) -> Mapping[str, Any]:
    """What a member says of itself, as JSON has it.

    Raises:
        RequestError: it is no mapping, not for JSON, no text, or too long.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"details is a mapping, not {given!r}.")
    try:
        text = json.dumps(dict(given), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"details is nothing for JSON: {error}.") from error
    if not is_text(text):
        raise RequestError(f"details has halves of characters: {given!r}.")
    size = len(text.encode())
    if size > limits.MEMBER_DETAILS_BYTES:
        raise RequestError(f"details has {limits.MEMBER_DETAILS_BYTES} bytes as JSON, not {size}.")
    details: Mapping[str, Any] = json.loads(text)
    return details
