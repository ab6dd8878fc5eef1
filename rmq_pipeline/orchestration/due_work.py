"""Decides which windows to request, from due work and earlier requests. No I/O."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from rmq_pipeline.orchestration.declarations import identifier
from rmq_pipeline.orchestration.windows import AHEAD_MS, UpkeepJob, is_in_a_call

#: A window of 60 s is followed by the next one after about this long, so that they overlap.
HAND_OVER_AFTER_MS: Final = 40_000
#: Windows follow each other while work was due within this time.
BUSY_FOR_MS: Final = 10 * 60_000
#: A run that has not opened its window after this long counts as lost.
ASK_AGAIN_MS: Final = 20_000


@dataclass
class Asked:
    """A sensor's memory of one kind of window."""

    #: Newest epoch seen, and when it was first seen.
    epoch: int = 0
    seen_at_ms: int = 0
    #: Time of the last request, and the newest epoch at that time.
    at_ms: int = 0
    after_epoch: int = -1
    #: The kind counts as busy until this time, because work was due.
    busy_until_ms: int = 0

    def see(self, window: Mapping[str, Any] | None, now_ms: int) -> None:
        """Record the open window."""
        if window and int(window["epoch"]) != self.epoch:
            self.epoch, self.seen_at_ms = int(window["epoch"]), now_ms

    def is_waiting(self, now_ms: int) -> bool:
        """Return True if a request was made that may still lead to a window."""
        return self.after_epoch == self.epoch and now_ms - self.at_ms < ASK_AGAIN_MS

    def ask(self, now_ms: int) -> None:
        """Record that a run is requested."""
        self.at_ms, self.after_epoch = now_ms, self.epoch


def next_serial(serial: int, *, now_ms: int) -> int:
    """Return the serial of a new run key, larger than ``serial`` (0 without a cursor).

    Dagster starts no second run for a run key. Serials are milliseconds, and requests are rarer, so
    serials do not run ahead of the clock. A sensor whose cursor was reset therefore does not reuse
    its old keys.

    The run key does not prevent two runs for the same work. Dagster stores the cursor at the end of
    a tick. If the process of a tick is killed, the next tick has the old cursor. It makes another
    key, although the run was requested. The sensor prevents this by looking for pending runs. If
    two runs start anyway, one of them yields its window.
    """
    return max(serial + 1, now_ms)


@dataclass
class Memory:
    """A sensor's cursor; ``serial`` belongs to the newest run key."""

    serial: int = 0
    asked: dict[str, Asked] = field(default_factory=dict)

    @classmethod
    def load(cls, cursor: str | None) -> Self:
        """Parse a cursor written by ``dump``; empty for a sensor that has never ticked."""
        if not cursor:
            return cls()
        found = json.loads(cursor)
        asked = {name: Asked(**values) for name, values in found["asked"].items()}
        return cls(serial=found["serial"], asked=asked)

    def dump(self) -> str:
        """Return this as a cursor."""
        return json.dumps({"serial": self.serial, "asked": {k: asdict(v) for k, v in self.items()}})

    def items(self) -> list[tuple[str, Asked]]:
        """Return the memory by kind of window."""
        return list(self.asked.items())

    def of(self, name: str) -> Asked:
        """Return the memory of a kind of window."""
        return self.asked.setdefault(name, Asked())

    def next_key(self, name: str, now_ms: int) -> str:
        """Return a new run key (see ``next_serial``)."""
        self.serial = next_serial(self.serial, now_ms=now_ms)
        return f"{name}/{self.serial}"


def none_to_come(_name: str) -> bool:
    """Return False: no kind of window has a pending run."""
    return False


@dataclass(frozen=True)
class Wanted:
    """A window to request; ``name`` is the name of the job and of the tag that limits it."""

    name: str
    run_key: str
    reason: str
    #: Epoch of the open window that it takes over from.
    hand_over_from: int = 0


def wanted_upkeep(
    due: Mapping[str, Any],
    jobs: Mapping[str, UpkeepJob],
    *,
    memory: Memory,
    busy_for_ms: int = BUSY_FOR_MS,
    is_to_come: Callable[[str], bool] = none_to_come,
) -> list[Wanted]:
    """Return the windows to request, at most one per job.

    Args:
        due: the result of ``Client.due``.
        jobs: kinds of work.
        memory: memory of the sensor; updated.
        busy_for_ms: windows follow each other while work was due within this time.
        is_to_come: returns True if a run of that name will still open its window; then no window is
            requested or recorded. Called only when a window is wanted.
    """
    now_ms = int(due["now_ms"])
    wanted = []
    for name, job in jobs.items():
        facts, asked = due["jobs"][name], memory.of(name)
        window = facts.get("window")
        asked.see(window, now_ms)
        reason = _due_reason(facts, ahead_ms=job.ahead_ms, now_ms=now_ms)
        if reason and job.waits:
            asked.busy_until_ms = now_ms + busy_for_ms
        if asked.busy_until_ms > now_ms:
            reason = reason or f"busy within the last {busy_for_ms // 1000} s"
        if not reason or asked.is_waiting(now_ms):
            continue
        if window and not _hands_over(window, job, since_ms=asked.seen_at_ms, now_ms=now_ms):
            continue
        if is_to_come(name):
            continue
        epoch = asked.epoch if window else 0
        asked.ask(now_ms)
        wanted.append(Wanted(name, memory.next_key(name, now_ms), reason, epoch))
    return wanted


def _hands_over(window: Mapping[str, Any], job: UpkeepJob, *, since_ms: int, now_ms: int) -> bool:
    """Return True if the next window should take over from an open one."""
    if not job.waits or now_ms - since_ms < HAND_OVER_AFTER_MS:
        return False
    # A window inside a checker's call: a successor would only repeat the call.
    return not is_in_a_call(window, job, now_ms=now_ms)


def _due_reason(facts: Mapping[str, Any], *, ahead_ms: int, now_ms: int) -> str:
    if facts.get("due"):
        return f"{facts['due']} due"
    next_due_ms = facts.get("next_due_ms")
    if next_due_ms is not None and next_due_ms <= now_ms + ahead_ms:
        return f"next due in {next_due_ms - now_ms} ms"
    return ""


def wanted_consumer(
    due: Mapping[str, Any],
    *,
    group: str,
    topic: str,
    memory: Memory,
    orphans: Callable[[], int],
    is_to_come: Callable[[str], bool] = none_to_come,
) -> Wanted | None:
    """Return the window of a consumer group if its topic has messages and no window is open.

    Args:
        due: the result of ``Client.due``; the broker must know the group.
        group: the consumer group.
        topic: the topic that it reads.
        memory: memory of the sensor; updated.
        orphans: returns the number of messages leased to a dead window; called only when needed.
        is_to_come: as for ``wanted_upkeep``.
    """
    now_ms = int(due["now_ms"])
    facts, asked = due["groups"][group], memory.of(group)
    asked.see(facts.get("window"), now_ms)
    if facts.get("window") or asked.is_waiting(now_ms):
        return None
    reads = facts["topics"].get(topic) or {}
    reason = _consumer_reason(reads, now_ms)
    if not reason and reads.get("unsettled") and (held := orphans()):
        reason = f"{held} messages held by a window that has ended"
    name = identifier(group)
    if not reason or is_to_come(name):
        return None
    asked.ask(now_ms)
    return Wanted(name, memory.next_key(group, now_ms), reason)


def _consumer_reason(facts: Mapping[str, Any], now_ms: int) -> str:
    if facts.get("ready"):
        return f"{facts['ready']} messages ready"
    next_visible_ms = facts.get("next_visible_ms")
    if next_visible_ms is not None and next_visible_ms <= now_ms + AHEAD_MS:
        return f"{facts.get('unsettled', 0)} unsettled, next in {next_visible_ms - now_ms} ms"
    return ""
