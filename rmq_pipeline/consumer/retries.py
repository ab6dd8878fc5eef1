"""Attempts and backoff of a consumer group."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.group import Exponential, delay_ms

log = logging.getLogger(__name__)

#: Maximum age of the group's description, because the group may be altered at any time.
KNOWN_MS: Final = 10_000


class Retries:
    """Attempts and backoff of a group, refreshed from the broker on failures; thread-safe."""

    def __init__(
        self,
        describe: Callable[[], Mapping[str, Any]],
        *,
        known: Mapping[str, Any],
        clock: Clock,
        max_attempts: int | None = None,
    ) -> None:
        """Start with a known description.

        Args:
            describe: gets the description of the group from the broker.
            known: the last description.
            clock: measures the age of the description.
            max_attempts: overrides the number of the group.
        """
        self._describe, self._known, self._clock = describe, known, clock
        self._known_at_ms = clock.now_ms()
        self._max_attempts = max_attempts

    @property
    def max_attempts(self) -> int:
        """Maximum deliveries of a message, including the first."""
        return self._max_attempts or int(self._group()["max_attempts"])

    def delay_ms(self, failures: int) -> int:
        """Return the backoff in ms after this number of failures; 0 counts as 1."""
        group = self._group()
        backoff = group["backoff"]
        policy = Exponential(**backoff) if isinstance(backoff, Mapping) else None
        return delay_ms(max(1, failures), backoff_ms=group["backoff_ms"], backoff=policy)

    def _group(self) -> Mapping[str, Any]:
        now_ms = self._clock.now_ms()
        if not 0 <= now_ms - self._known_at_ms < KNOWN_MS:
            self._known_at_ms = now_ms
            try:
                self._known = self._describe()
            except RocketMQError as error:
                log.info("using the last known retries of the group: %s", error)
        return self._known
