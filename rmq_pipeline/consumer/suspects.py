"""Suspects: messages that may have crashed a member of the group, tried one at a time.

After a crash the broker counts an attempt of each message that the listener may have had. To spare
the harmless ones, the listener gets one suspect at a time, after the broker knows which one.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.errors import RocketMQError

log = logging.getLogger(__name__)

#: topic, queue_id, queue_offset.
Place = tuple[str, int, int]


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
