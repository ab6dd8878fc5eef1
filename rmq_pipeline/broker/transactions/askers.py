"""Producers and checkers that ask for checks: their topics, and whether they are live."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rmq_pipeline import limits
from rmq_pipeline.broker.state import Window

#: No topic has this id; it stands for all topics.
ALL: Final = -1
#: Above this number of producer groups, or of topics in one, entries that are not live are dropped.
_MANY: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Asked:
    """Time at which a topic was last asked about, and the caller's window."""

    at_ms: int
    window: tuple[str, int] | None

    def lately(self, now_ms: int) -> bool:
        return now_ms - self.at_ms < limits.PRODUCER_LIVE_MS

    def at_it(self, now_ms: int, *, windows: Mapping[str, Window]) -> bool:
        """Return True if the window of the caller is live, as it is while its checker works.

        The next epoch of the name counts as the same: it starts the check job before it asks.
        """
        if self.window is None:
            return False
        name, epoch = self.window
        newest = windows.get(name)
        return newest is not None and newest.expires_at_ms > now_ms and newest.epoch - epoch <= 1


class Askers:
    """Topics that producer groups ask about, and topics that any checker asks about."""

    def __init__(self) -> None:
        #: By producer group, None for callers that take checks of all groups. Then by topic and
        #: window name, None without a window, so that callers of different kinds do not overwrite
        #: each other.
        self._asked: dict[str | None, dict[tuple[int, str | None], _Asked]] = {None: {}}

    def note(
        self,
        producer_group: str | None,
        now_ms: int,
        *,
        topic_ids: Sequence[int] | None,
        window: tuple[str, int] | None,
    ) -> None:
        """Record that a caller asks about these topics for a producer group; None: all."""
        if len(self._asked) >= _MANY:
            live = [name for name in self._asked if name is None or self.claimed(name, now_ms)]
            self._asked = {name: self._asked[name] for name in live}
        asked = self._asked.setdefault(producer_group, {})
        if len(asked) >= _MANY:
            for gone in [each for each, last in asked.items() if not last.lately(now_ms)]:
                del asked[gone]
        about = (ALL,) if topic_ids is None else topic_ids
        name = window[0] if window is not None else None
        asked.update({(topic_id, name): _Asked(now_ms, window) for topic_id in about})

    def claimed(self, producer_group: str, now_ms: int) -> Collection[int]:
        """Return the topics that a live producer of the group asks about; ALL may be among them."""
        asked = self._asked.get(producer_group, {})
        return {topic_id for (topic_id, _), last in asked.items() if last.lately(now_ms)}

    def topics(
        self, producer_group: str, now_ms: int, *, windows: Mapping[str, Window]
    ) -> Collection[int]:
        """Return the topics of live callers that may take checks of this producer group."""
        return {
            topic_id
            for name in (producer_group, None)
            for (topic_id, _), last in self._asked.get(name, {}).items()
            if last.lately(now_ms) or last.at_it(now_ms, windows=windows)
        }
