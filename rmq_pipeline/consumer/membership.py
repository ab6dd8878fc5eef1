"""Being a member of a consumer group: a heartbeat that waits at the broker for what changes."""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rmq_pipeline.consumer.verbs import MembershipVerbs
from rmq_pipeline.errors import BusyError, RocketMQError

log = logging.getLogger(__name__)

#: How long a heartbeat waits at the broker: what a member reports of itself is as old at most.
BEAT_MS: Final = 5_000
#: After an error, before the next heartbeat.
_PAUSE_S: Final = 1.0
#: Between two heartbeats, however often the group changes.
_GAP_S: Final = 0.05


def new_client_id(room: str = "") -> str:
    """A client id that nobody else has: ``host@pid#number``, or ``room@host#pid#number``."""
    host, pid, number = socket.gethostname(), os.getpid(), secrets.token_hex(4)
    return f"{room}@{host}#{pid}#{number}" if room else f"{host}@{pid}#{number}"


def steady_client_id() -> str:
    """The same each time on this machine: who keeps offsets here finds them again."""
    return f"{socket.gethostname()}@DEFAULT"


@dataclass(frozen=True, slots=True)
class Members:
    """What the last heartbeat told of a group."""

    #: Client id -> the topics it has subscribed to.
    topics: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: (topic, queue_id) -> how often the group was put elsewhere there since the broker began.
    resets: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def of(self, topic: str) -> list[str]:
        """The members that have subscribed to a topic, sorted."""
        return sorted(client_id for client_id, topics in self.topics.items() if topic in topics)

    @classmethod
    def told(cls, answer: Mapping[str, Any]) -> "Members":
        """The answer of a heartbeat; numbers may have become text on the way."""
        return cls(
            {client_id: frozenset(each["topics"]) for client_id, each in answer["members"].items()},
            {
                (topic, int(queue_id)): int(count)
                for topic, queues in answer.get("resets", {}).items()
                for queue_id, count in queues.items()
            },
        )


class Membership:
    """A thread that keeps this client a member, and tells when the group has changed.

    While no broker answers it keeps what it knew: nobody else learns of a change then, either.
    """

    def __init__(
        self,
        verbs: MembershipVerbs,
        *,
        group: str,
        client_id: str,
        topics: Callable[[], list[str]],
        details: Callable[[], Mapping[str, Any]],
        changed: Callable[[], None],
    ) -> None:
        """Say who it is; ``join`` makes it a member.

        Args:
            topics: subscribed to, asked before every heartbeat; so are details.
            changed: called from the thread when members, their topics or resets are others.
        """
        self._verbs = verbs
        self._group, self._client_id = group, client_id
        self._topics, self._details, self._changed = topics, details, changed
        self._version = -1
        #: Held to keep an answer: heartbeats of two threads may come back at once.
        self._answering = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.members = Members()

    def join(self) -> None:
        """Be a member when this returns.

        Raises:
            ConsumerGroupNotFoundError: create the group first.
            BrokerUnavailableError: no broker answers.
        """
        self._beat(wait_ms=0)
        self._thread = threading.Thread(target=self._run, name="rmq-heartbeat", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Tell at once that the topics are others, and learn who is there."""
        self._beat(wait_ms=0)

    def leave(self) -> None:
        """Be no member any more; the others learn of it at once."""
        if self._closed.is_set():
            return
        self._closed.set()
        # It ends the heartbeat that waits; one that was about to says goodbye itself.
        if self._say_goodbye() and self._thread is not None:
            self._thread.join()

    def _say_goodbye(self) -> bool:
        try:
            self._verbs.leave(self._group, self._client_id)
        except RocketMQError as error:
            log.info("group %s learns later that %s left: %s", self._group, self._client_id, error)
            return False
        return True

    def _run(self) -> None:
        silent = False
        while not self._closed.wait(_GAP_S):
            try:
                self._beat(wait_ms=BEAT_MS)
                silent = False
            except RocketMQError as error:
                if not silent and not self._closed.is_set():
                    level = logging.INFO if isinstance(error, BusyError) else logging.WARNING
                    log.log(level, "no heartbeat for group %s: %s", self._group, error)
                silent = True
                self._closed.wait(_PAUSE_S)
            except Exception:
                # What a member says of itself comes from others; the group must not lose it for it.
                log.exception("A heartbeat for group %s has failed.", self._group)
                self._closed.wait(_PAUSE_S)

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
            if self._closed.is_set():  # it may have made a member of one that was gone
                self._say_goodbye()
        members = Members.told(answer)
        with self._answering:
            # It says nothing of the resets of topics that came meanwhile: the next one does.
            if topics != self._topics():
                return
            self._version = answer["version"]
            # A broker that began anew counts versions anew: what they say is compared, not they.
            if members == self.members:
                return
            self.members = members
        self._changed()
