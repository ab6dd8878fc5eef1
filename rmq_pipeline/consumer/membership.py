"""Membership in a consumer group: a heartbeat that waits at the broker for changes; suspects.

Suspects are messages that may have crashed a member. After a crash the broker counts an attempt of
each message that the listener may have had. To spare the harmless ones, the listener gets one
suspect at a time, after the broker knows which one.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.errors import BusyError, RocketMQError
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Wait of a heartbeat at the broker, which is also the maximum age of a member's report.
BEAT_MS: Final = 5_000
#: Pause after an error.
_PAUSE_S: Final = 1.0
#: Place of a message: topic, queue_id, queue_offset.
Place = tuple[str, int, int]


def new_client_id(room: str = "") -> str:
    """Return a unique client id: ``host@pid#number``, or ``room@host#pid#number``."""
    host, pid, number = socket.gethostname(), os.getpid(), secrets.token_hex(4)
    return f"{room}@{host}#{pid}#{number}" if room else f"{host}@{pid}#{number}"


def steady_client_id() -> str:
    """Return a client id that is the same in every process of this machine.

    A broadcasting consumer needs it to find its offset file again.
    """
    return f"{socket.gethostname()}@DEFAULT"


@dataclass(frozen=True, slots=True)
class Members:
    """State of a group, as of the last heartbeat."""

    #: Client id -> topics that the client has subscribed to.
    topics: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: (topic, queue_id) -> number of resets of the group since the start of the broker.
    resets: Mapping[tuple[str, int], int] = field(default_factory=dict)
    #: Messages that may have crashed a member.
    suspects: frozenset[Place] = frozenset()

    def of(self, topic: str) -> list[str]:
        """Return the members that have subscribed to a topic, sorted."""
        return sorted(client_id for client_id, topics in self.topics.items() if topic in topics)

    @classmethod
    def told(cls, answer: Mapping[str, Any]) -> "Members":
        """Parse the reply of a heartbeat; JSON may have turned numeric keys into strings."""
        return cls(
            {client_id: frozenset(each["topics"]) for client_id, each in answer["members"].items()},
            {
                (topic, int(queue_id)): int(count)
                for topic, queues in answer.get("resets", {}).items()
                for queue_id, count in queues.items()
            },
            frozenset((topic, int(q), int(o)) for topic, q, o in answer.get("suspects", ())),
        )


class Membership:
    """Thread that keeps this client a member and reports changes of the group.

    While no broker answers, the last known state remains: no other member gets changes either.
    """

    def __init__(
        self,
        verbs: Verbs,
        *,
        group: str,
        client_id: str,
        topics: Callable[[], list[str]],
        details: Callable[[], Mapping[str, Any]],
        changed: Callable[[], None],
        gap_s: float = Pace().beat_gap_s,
    ) -> None:
        """Prepare the membership; ``join`` starts it.

        Args:
            topics: returns the subscribed topics; called before every heartbeat.
            details: returns the report of this member; called before every heartbeat.
            changed: called from the thread after members, topics, resets or suspects changed.
            gap_s: minimum interval between two heartbeats, even if the group changes often.
        """
        self._verbs, self._gap_s = verbs, gap_s
        self._group, self._client_id = group, client_id
        self._topics, self._details, self._changed = topics, details, changed
        self._version = -1
        #: Mixed filters of topics in the last warning.
        self._warned: Mapping[str, Any] = {}
        #: Held while a reply is stored: heartbeats of two threads may return at once.
        self._answering = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.members = Members()

    def join(self) -> None:
        """Join the group, then send heartbeats in the background.

        Raises:
            ConsumerGroupNotFoundError: the group does not exist.
            BrokerUnavailableError: no broker answers.
        """
        self._beat(wait_ms=0)
        self._thread = threading.Thread(target=self._run, name="rmq-heartbeat", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Send a heartbeat at once, after topics or details changed."""
        self._beat(wait_ms=0)

    def leave(self) -> None:
        """Leave the group; the broker notifies the other members at once."""
        if self._closed.is_set():
            return
        self._closed.set()
        # Leaving ends a waiting heartbeat. A heartbeat that starts later leaves again itself.
        if self._say_goodbye() and self._thread is not None:
            self._thread.join()

    def _say_goodbye(self) -> bool:
        try:
            self._verbs.leave(self._group, self._client_id)
        except RocketMQError as error:
            log.info("client %s could not leave group %s: %s", self._client_id, self._group, error)
            return False
        return True

    def _run(self) -> None:
        silent = False
        # No pause: the broker detects the death of a process by its waiting call.
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            began = time.monotonic()
            try:
                self._beat(wait_ms=BEAT_MS)
                silent = False
                pause_s = max(0.0, began + self._gap_s - time.monotonic())
            except RocketMQError as error:
                if not silent and not self._closed.is_set():
                    level = logging.INFO if isinstance(error, BusyError) else logging.WARNING
                    log.log(level, "cannot send heartbeats for group %s: %s", self._group, error)
                silent = True
                pause_s = _PAUSE_S
            except Exception:
                # The details come from user code; its errors must not cost the membership.
                log.exception("a heartbeat for group %s failed", self._group)
                pause_s = _PAUSE_S

    def _warn(self, mixed: Mapping[str, Any]) -> None:
        """Log that members use different filters, once per change."""
        if mixed and mixed != self._warned:
            log.warning(
                "members of group %s receive with different filters, and lose messages: %s."
                " Use one filter in all members, or one consumer group per filter.",
                self._group,
                "; ".join(f"{topic}: {', '.join(map(repr, mixed[topic]))}" for topic in mixed),
            )
        self._warned = mixed

    def _beat(self, *, wait_ms: int) -> None:
        topics = self._topics()
        try:
            answer = self._verbs.heartbeat(
                self._group,
                self._client_id,
                topics=topics,
                details=self._details(),
                known_version=self._version,
                wait_ms=wait_ms,
            )
        finally:
            if self._closed.is_set():  # the heartbeat may have made a left member join again
                self._say_goodbye()
        self._warn(answer.get("mixed_filters") or {})
        members = Members.told(answer)
        with self._answering:
            # The reply lacks the resets of topics added meanwhile; the next one has them.
            if topics != self._topics():
                return
            self._version = answer["version"]
            # A restarted broker counts versions from 0, so compare contents, not versions.
            if members == self.members:
                return
            self.members = members
        self._changed()


class Suspects:
    """Gate that passes one suspect at a time to the listener; thread-safe."""

    def __init__(self, known: Callable[[], frozenset[Place]], *, tell: Callable[[], None]) -> None:
        """Use the broker's list of suspects.

        Args:
            known: returns the suspects that the broker reported; called before every call.
            tell: reports ``trying`` to the broker; returns once the broker has it.
        """
        self._known, self._tell = known, tell
        self._lock = threading.Lock()
        self._survived: set[Place] = set()
        self._trying: Place | None = None

    @property
    def trying(self) -> list[Place]:
        """Suspect that the listener has now, as a list of 0 or 1."""
        trying = self._trying
        return [] if trying is None else [trying]

    @property
    def any(self) -> bool:
        """True if the group has suspects."""
        return bool(self._known())

    def includes(self, message: ReceivedMessage) -> bool:
        """Return True for a suspect that the listener of this process has not survived yet."""
        known = self._known()
        return bool(known) and self._is_one(_place(message), known)

    def begin(self, messages: Sequence[ReceivedMessage]) -> bool:
        """Return True if the listener may get the messages now; then call ``end`` afterwards."""
        known = self._known()
        if not known or not self._is_one(place := _place(messages[0]), known):
            return True
        with self._lock:
            if self._trying is not None:
                return False
            self._trying = place
        try:
            self._tell()
        except RocketMQError as error:
            log.info("could not report the suspect %r: %s", messages[0], error)
        return True

    def end(self, messages: Sequence[ReceivedMessage]) -> None:
        """Note that the listener has survived the messages."""
        trying = self._trying
        if trying is not None and trying == _place(messages[0]):
            with self._lock:
                self._survived.add(trying)
                self._survived &= self._known()
                self._trying = None

    def _is_one(self, place: Place, known: frozenset[Place]) -> bool:
        return place in known and place not in self._survived


def _place(message: ReceivedMessage) -> Place:
    return message.topic, message.queue_id, message.queue_offset
