"""Replacing files of a sink in one step."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.event_rows import single
from rmq_pipeline.broker.state.group_facts import SinkVersion
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.store.events import Kind


@dataclass(frozen=True, slots=True)
class ReplaceSinkFiles(Request):
    """Request that replaces sink files.

    The answer is None if the sink has changed since the check.
    """

    group: str
    replacement_id: str
    reason: str
    added: list[dict[str, Any]]
    removed: list[str]
    #: Version of the sink at the check.
    seen: SinkVersion
    #: Window of the caller: a newer epoch fences it off.
    window: tuple[str, int] | None
    #: True if a settle with files since the check makes the request fail, too.
    whole: bool

    def decide(self, state: State, now_ms: int) -> Decision:
        """Replace the files, unless the sink has changed since the check."""
        epoch = state.fence(self.window)
        group = state.group(self.group)
        current = state.sinks.of(group.group_id)
        if current.replaced != self.seen.replaced or (self.whole and current != self.seen):
            return Decision(None)
        version = current.version + 1
        detail = {"reason": self.reason, "added": self.added, "removed": self.removed}
        event = single(
            Kind.SINK_REPLACED,
            now_ms,
            group_id=group.group_id,
            delivery=version,
            epoch=epoch,
            client_id=self.replacement_id,
            detail=json.dumps(detail),
        )
        added = [file["path"] for file in self.added]
        return Decision(replaced_answer(version, added=added, removed=self.removed), events=[event])


def replaced_answer(
    version: int, *, added: Iterable[str], removed: Iterable[str]
) -> dict[str, Any]:
    """Return the answer of a replacement."""
    return {"version": version, "added": list(added), "removed": list(removed)}
