"""Who asks for checks, about which topics, and whether they are there still."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rmq_pipeline import limits
from rmq_pipeline.broker.state import Window

#: No topic has this id: whoever asks about all of them.
ALL: Final = -1
#: Producer groups of which those that are gone are forgotten, and topics of each.
_MANY: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Asked:
    """A topic was asked about: when, and in the name of which window."""

    at_ms: int
    window: tuple[str, int] | None

    def lately(self, now_ms: int) -> bool:
        return now_ms - self.at_ms < limits.PRODUCER_LIVE_MS

    def at_it(self, now_ms: int, *, windows: Mapping[str, Window]) -> bool:
        """Whether the window that asked is live, which is so while its checker works.

        The next one of its name counts as the same: it sweeps before it has asked.
        """
        if self.window is None:
            return False
        name, epoch = self.window
        newest = windows.get(name)
        return newest is not None and newest.expires_at_ms > now_ms and newest.epoch - epoch <= 1


class Askers:
    """The topics that producer groups ask about, and those that anybody does."""

    def __init__(self) -> None:
        #: By producer group, None for who asks for the checks of any; then by topic, and by the
        #: name of the window, None for who has none: nobody takes the place of another kind.
        self._asked: dict[str | None, dict[tuple[int, str | None], _Asked]] = {None: {}}

    def note(
        self,
        producer_group: str | None,
        now_ms: int,
        *,
        topic_ids: Sequence[int] | None,
        window: tuple[str, int] | None,
    ) -> None:
        """A producer of this group, or anybody, is there and asks about these topics."""
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
        """The topics about which a live producer of the group asks, ALL among them."""
        asked = self._asked.get(producer_group, {})
        return {topic_id for (topic_id, _), last in asked.items() if last.lately(now_ms)}

    def topics(
        self, producer_group: str, now_ms: int, *, windows: Mapping[str, Window]
    ) -> Collection[int]:
        """The topics about which somebody asks who would be given checks of this group."""
        return {
            topic_id
            for name in (producer_group, None)
            for (topic_id, _), last in self._asked.get(name, {}).items()
            if last.lately(now_ms) or last.at_it(now_ms, windows=windows)
        }
