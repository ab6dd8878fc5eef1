"""Consumers of each group, in memory: members by their heartbeats, and the filter that all share.

A message that a receive's filter drops is done for the group. Another member with another filter
never gets it, and the lag does not show it.
"""

import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.members import Begun, Place, UnlockMember
from rmq_pipeline.broker.decide.request import Request
from rmq_pipeline.broker.work.waiting import look_at_ms
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import BusyError, MixedFiltersError, RequestError
from rmq_pipeline.filter.expression import TAG, TagFilter, compile_filter
from rmq_pipeline.text import is_text

#: Versions start at a random number, so that a version of an earlier broker run does not match.
_VERSION_BITS = 48
log = logging.getLogger(__name__)
Policy: TypeAlias = Literal["warn", "refuse"]
#: Consumer group and topic.
Key: TypeAlias = tuple[str, str]
#: Least time between two log lines about mixed filters.
_TELL_MS: Final = 600_000


@dataclass(slots=True)
class _Member:
    topics: tuple[str, ...]
    #: Details that the member reports.
    details: Mapping[str, Any]
    since_ms: int
    seen_ms: int
    #: Thread of its last heartbeat that could wait.
    heard_in: int
    #: Number of its calls that wait now.
    waiting: int = 0
    cut_off_ms: int | None = None

    def gone_at_ms(self, timeout_ms: int) -> int | None:
        """Return when the member is gone without another heartbeat.

        The result is None while one of its calls waits.
        """
        if self.cut_off_ms is not None:
            return self.cut_off_ms + limits.MEMBER_CUT_OFF_MS
        return None if self.waiting else self.seen_ms + timeout_ms


@dataclass(slots=True)
class _Group:
    condition: threading.Condition = field(default_factory=threading.Condition)
    version: int = field(default_factory=lambda: secrets.randbits(_VERSION_BITS))
    members: dict[str, _Member] = field(default_factory=dict)
    #: Messages that members may have died over; the oldest are dropped.
    suspects: dict[Place, None] = field(default_factory=dict)

    def changed(self) -> None:
        """Wake the calls that wait for a change. The caller holds the condition."""
        self.version += 1
        self.condition.notify_all()


class Members:
    """Members of all consumer groups; safe for all threads."""

    def __init__(self, clock: Clock, *, timeout_ms: int) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._groups: dict[str, _Group] = {}
        self._lock = threading.Lock()
        self._closed = False
        #: Sources of other consumers of a group, by client id, from other endpoints. They are no
        #: members and are only shown with them.
        self.others: list[Callable[[str], Mapping[str, Mapping[str, Any]]]] = []

    def _group(self, name: str) -> _Group:
        with self._lock:
            return self._groups.setdefault(name, _Group())

    def heard(
        self,
        group: str,
        client_id: str,
        *,
        topics: tuple[str, ...],
        details: Mapping[str, Any],
        waits: bool = True,
    ) -> None:
        """Record a heartbeat: the client is a member with these topics.

        Args:
            waits: True for a call that waits; a call that does not may run in parallel to it.

        Raises:
            BusyError: the group has limits.GROUP_MEMBERS members.
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
            if waits:
                member.heard_in = heard_in

    def wait(self, group: str, client_id: str, *, known_version: int, at_ms: int) -> bool:
        """Wait for another version of the group, until ``at_ms``; return True to look again.

        The wait also ends when a member may be gone. Return False without a wait if the version
        differs already, the time is over, or the client is no member.
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
                self._clock.wait_until(found.condition, look_at_ms(self._clock, wake))
            finally:
                member.waiting -= 1
                member.seen_ms = self._clock.now_ms()
        return True

    def cut_off(self, group: str, client_id: str) -> None:
        """Record that the waiting call of this thread has lost its caller, which may be gone.

        A caller that has called again meanwhile is not gone. A waiting call has its thread to
        itself, so the thread of the last heartbeat tells.
        """
        found, heard_in = self._group(group), threading.get_ident()
        with found.condition:
            member = found.members.get(client_id)
            if member is None or member.heard_in != heard_in:
                return
            if member.cut_off_ms is None:
                member.cut_off_ms = self._clock.now_ms()
                found.condition.notify_all()  # they must wake earlier than planned

    def leave(self, group: str, client_id: str) -> bool:
        """Remove a member; return False if it was none."""
        found = self._group(group)
        with found.condition:
            was_there = found.members.pop(client_id, None) is not None
            if was_there:
                found.changed()
        return was_there

    def was_deleted(self, group: str) -> None:
        """Wake the members of a deleted group."""
        with self._lock:
            found = self._groups.get(group)
        if found is not None:
            with found.condition:
                found.changed()

    def was_reset(self, group: str, topic: str) -> None:
        """Wake the members of a group whose offset in a topic was reset."""
        with self._lock:
            found = self._groups.get(group)
        if found is not None:
            with found.condition:
                if any(topic in member.topics for member in found.members.values()):
                    found.changed()

    def let_go(self, submit: Callable[[Request], Any], *, group: str | None = None) -> None:
        """Remove the members that are gone, and unlock their queues.

        Args:
            group: only this consumer group; None: all.
        """
        if self._closed:  # members cannot call any more, so none of them is gone
            return
        with self._lock:
            groups = [(n, g) for n, g in self._groups.items() if group in (None, n)]
        for name, found in groups:
            gone = self._gone(found)
            for client_id, member, gone_at_ms in gone:
                self._unlock(
                    submit, name, client_id=client_id, member=member, gone_at_ms=gone_at_ms
                )
            # After unlocking: a member that sees the change must find the queues unlocked. If
            # unlocking fails, the next call retries it.
            self._forget(found, gone)

    def replaced(
        self,
        submit: Callable[[Request], Any],
        *,
        group: str,
        client_id: str,
        details: Mapping[str, Any],
    ) -> None:
        """Unlock the queues of a member that another process has replaced."""
        found, now_ms = self._group(group), self._clock.now_ms()
        with found.condition:
            member = found.members.get(client_id)
        before = None if member is None else member.details.get("instance")
        if member is not None and before is not None and before != details.get("instance", before):
            self._unlock(submit, group, client_id=client_id, member=member, gone_at_ms=now_ms)

    def _unlock(
        self,
        submit: Callable[[Request], Any],
        group: str,
        *,
        client_id: str,
        member: _Member,
        gone_at_ms: int,
    ) -> None:
        """Unlock the queues of a dead member; messages it may have died over become suspects."""
        found = self._group(group)
        begun = Begun.of(member.details, frozenset(found.suspects))
        counted = submit(UnlockMember(group, client_id, gone_at_ms, begun))
        with found.condition:
            for place in counted or ():
                found.suspects.pop(place, None)
                found.suspects[place] = None
            for place in list(found.suspects)[: -limits.GROUP_SUSPECTS]:
                del found.suspects[place]

    def suspects_of(self, group: str, topics: Iterable[str]) -> list[Place]:
        """Return messages of these topics that members of the group may have died over."""
        wanted, found = set(topics), self._group(group)
        with found.condition:
            return [place for place in found.suspects if place[0] in wanted]

    def _gone(self, found: _Group) -> list[tuple[str, _Member, int]]:
        """Return client id, member and time of the members that are gone."""
        with found.condition:
            now_ms = self._clock.now_ms()
            moments = [(i, m, m.gone_at_ms(self._timeout_ms)) for i, m in found.members.items()]
        return [(i, member, at) for i, member, at in moments if at is not None and at <= now_ms]

    def _forget(self, found: _Group, gone: list[tuple[str, _Member, int]]) -> None:
        """Remove these members, unless they are back."""
        with found.condition:
            here = found.members
            for client_id, member, gone_at_ms in gone:
                is_same = here.get(client_id) is member
                if is_same and member.gone_at_ms(self._timeout_ms) == gone_at_ms:
                    del here[client_id]
                    found.changed()

    def topics_of(self, group: str) -> tuple[int, dict[str, dict[str, list[str]]]]:
        """Return the version of a group, and the topics of its members by client id."""
        found = self._group(group)
        with found.condition:
            members = sorted(found.members.items())
            return found.version, {i: {"topics": list(m.topics)} for i, m in members}

    def described(self, group: str) -> dict[str, dict[str, Any]]:
        """Return all known facts about the consumers of a group, by client id."""
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

    def counts(self) -> dict[str, int]:
        """Return the number of members of each group that has some."""
        with self._lock:
            groups = list(self._groups.items())
        return {name: n for name, found in groups if (n := len(found.members))}

    def close(self) -> None:
        """Wake all waiting calls and let no later call wait."""
        self._closed = True
        with self._lock:
            groups = list(self._groups.values())
        for found in groups:
            with found.condition:
                found.condition.notify_all()


def topics_in(given: object) -> tuple[str, ...]:
    """Check the topics of a member; return them without duplicates.

    Raises:
        RequestError: it is not a list of names, or has more than limits.MEMBER_TOPICS.
    """
    # A mapping would pass as a list of names, but endpoints find no topics in it and would check no
    # rights.
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise RequestError(f"topics must be a list of names, not {given!r}.")
    every = list(given)
    if not all(is_text(name) and name for name in every):
        raise RequestError(f"topics must be a list of names, not {every!r}.")
    names = tuple(dict.fromkeys(every))
    if len(names) > limits.MEMBER_TOPICS:
        raise RequestError(f"A member may have {limits.MEMBER_TOPICS} topics, not {len(names)}.")
    return names


def details_in(given: object) -> Mapping[str, Any]:
    """Check a member's details, and return them as JSON does.

    Raises:
        RequestError: it is not a mapping, not serializable as JSON, not valid Unicode, or too long.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"details must be a mapping, not {given!r}.")
    try:
        text = json.dumps(dict(given), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"details cannot be written as JSON: {error}.") from error
    if not is_text(text):
        raise RequestError(f"details has unpaired surrogates: {given!r}.")
    size = len(text.encode())
    if size > limits.MEMBER_DETAILS_BYTES:
        raise RequestError(
            f"details may have {limits.MEMBER_DETAILS_BYTES} bytes as JSON, not {size}."
        )
    details: Mapping[str, Any] = json.loads(text)
    return details


@dataclass(slots=True)
class _Seen:
    """Filter that a client used last."""

    given: tuple[str, str]
    #: Normal form: equal for filters that are easily shown to select the same messages.
    filter: str
    at_ms: int


class Filters:
    """Filters of all groups' receives since the broker started; safe for all threads."""

    def __init__(self, clock: Clock, *, live_ms: int, policy: Policy) -> None:
        """Start without any filter.

        Args:
            live_ms: a client that has not received for this long no longer counts.
            policy: refuse a receive with a different filter, or log a warning.
        """
        self._clock, self._live_ms, self._policy = clock, live_ms, policy
        self._lock = threading.Lock()
        self._seen: dict[Key, dict[str, _Seen]] = {}
        self._told_ms: dict[Key, int] = {}
        #: Type and text of the filters used last, for groups without live clients.
        self._last: dict[Key, set[tuple[str, str]]] = {}
        #: Groups and topics that had several filters at the last look.
        self._several: set[Key] = set()

    def used(self, key: Key, who: str, *, filter: str, filter_type: str) -> None:
        """Record the filter of a receive.

        Raises:
            MixedFiltersError: other clients of the group use another filter, and the policy is
                "refuse".
        """
        now_ms, given = self._clock.now_ms(), (filter_type, filter)
        clients = self._seen.get(key)
        known = clients.get(who) if clients is not None else None
        if known is not None and known.given == given and key not in self._several:
            known.at_ms = now_ms  # the usual case: costs the same for any number of clients
            return
        if known is None or known.given != given:
            known = _Seen(given, normal_form(filter, filter_type), now_ms)
        with self._lock:
            clients = self._seen.setdefault(key, {})
            before = clients.pop(who, None)
            others = self._filters(key, now_ms)
            if others - {known.filter} and self._policy == "refuse":
                if before is not None:
                    clients[who] = before
                raise MixedFiltersError(
                    f"Group {key[0]} receives topic {key[1]} with {_shown(others)}, and"
                    f" {who or 'this receive'} with {known.filter}."
                )
            known.at_ms = now_ms
            clients[who] = known
            if len(clients) > limits.GROUP_MEMBERS:
                del clients[next(iter(clients))]
            if others - {known.filter}:
                self._several.add(key)
            else:
                self._several.discard(key)
        if others - {known.filter}:
            self._tell(key, others | {known.filter}, now_ms=now_ms)

    def mixed(self, group: str) -> dict[str, list[str]]:
        """Return the filters of a group's members, by topic, where there is more than one."""
        now_ms = self._clock.now_ms()
        with self._lock:
            found = {key[1]: self._filters(key, now_ms) for key in self._seen if key[0] == group}
        return {topic: sorted(filters) for topic, filters in found.items() if len(filters) > 1}

    def of_group(self, group: str) -> dict[str, dict[str, list[str]]]:
        """Return the clients of each filter, by topic; a receive without a client id is ``-``."""
        now_ms = self._clock.now_ms()
        shown: dict[str, dict[str, list[str]]] = {}
        with self._lock:
            for key, clients in self._seen.items():
                for who, seen in clients.items():
                    if key[0] == group and now_ms - seen.at_ms < self._live_ms:
                        shown.setdefault(key[1], {}).setdefault(seen.filter, []).append(who or "-")
        return shown

    def last(self, group: str, topic: str) -> set[tuple[str, str]]:
        """Return type and text of the filters in use, or else of those used last.

        Empty if the group has not received from the topic since the broker started.
        """
        key = group, topic
        with self._lock:
            self._filters(key, self._clock.now_ms())
            if clients := self._seen.get(key):
                return {seen.given for seen in clients.values()}
            return set(self._last.get(key, ()))

    def forget(self, group: str) -> None:
        """Forget the filters of a group that was deleted."""
        with self._lock:
            for known in (self._seen, self._last, self._told_ms):
                for key in [key for key in known if key[0] == group]:
                    del known[key]
            self._several = {key for key in self._several if key[0] != group}

    def _filters(self, key: Key, now_ms: int) -> set[str]:
        """Return the filters of live clients, and drop the others. The caller holds the lock."""
        clients = self._seen.get(key, {})
        gone = [w for w, seen in clients.items() if now_ms - seen.at_ms >= self._live_ms]
        if gone and len(gone) == len(clients):
            since_ms = max(seen.at_ms for seen in clients.values()) - self._live_ms
            self._last[key] = {s.given for s in clients.values() if s.at_ms > since_ms}
        for who in gone:
            del clients[who]
        return {seen.filter for seen in clients.values()}

    def _tell(self, key: Key, filters: set[str], *, now_ms: int) -> None:
        if now_ms - self._told_ms.get(key, -_TELL_MS) >= _TELL_MS:
            self._told_ms[key] = now_ms
            log.warning(
                "group %s receives topic %s with several filters (%s): a message that one of them"
                " skips reaches no consumer; use one filter, or a group for each filter",
                *key,
                _shown(filters),
            )


def normal_form(filter: str, filter_type: str) -> str:
    """Return a filter as text that is the same for tags in another order."""
    compiled = compile_filter(filter, filter_type)
    if isinstance(compiled, TagFilter):
        return "*" if compiled.tags is None else " || ".join(sorted(compiled.tags))
    return " ".join(filter.split()) if filter_type != TAG else filter


def _shown(filters: set[str]) -> str:
    return ", ".join(repr(each) for each in sorted(filters))
