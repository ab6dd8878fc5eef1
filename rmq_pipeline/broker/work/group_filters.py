"""Filters of the consumers of a group, which must be equal for all of them.

A message that a receive's filter drops is done for the group. Another member with another filter
never gets it, and the lag does not show it.
"""

import logging
import threading
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from rmq_pipeline import limits
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import MixedFiltersError
from rmq_pipeline.filter.expression import TAG, TagFilter, compile_filter

log = logging.getLogger(__name__)

Policy: TypeAlias = Literal["warn", "refuse"]
#: Consumer group and topic.
Key: TypeAlias = tuple[str, str]
#: Least time between two log lines about mixed filters.
_TELL_MS: Final = 600_000


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
