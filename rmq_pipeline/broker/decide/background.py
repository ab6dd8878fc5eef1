"""Background work: the windows of its runs, and the work that is due."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.blocked_groups import open_backlogs
from rmq_pipeline.broker.decide.fifo import ready_from_cursor
from rmq_pipeline.broker.decide.redeliver import expire, release_running
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.lease_table import AHEAD, EXHAUSTED, WAITING
from rmq_pipeline.broker.state.state import Queue, State
from rmq_pipeline.errors import RequestError
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

CONSUMER: str = "consumer/"


def _check(name: str, duration_ms: int) -> None:
    kind, _, of = str(name).partition("/")
    if kind not in ("upkeep", "consumer") or not of:
        raise RequestError(f"Window {name!r} is neither upkeep/<job> nor consumer/<group>.")
    if not 1 <= duration_ms <= limits.WINDOW_MAX_MS:
        raise RequestError(f"The lease of a window must be 1 ms to 12 h, not {duration_ms} ms.")


@dataclass(frozen=True, slots=True)
class OpenWindow(Request):
    """Request that opens a window."""

    name: str
    owner: str
    duration_ms: int
    takeover: bool

    def decide(self, state: State, now_ms: int) -> Decision:
        """Open a new epoch, unless another owner's lease runs.

        Opening a consumer's window releases the deliveries of older epochs at once. Their attempts
        do not count, because the run that held them is gone, and the messages are not at fault.
        """
        _check(self.name, self.duration_ms)
        group_id = 0
        if self.name.startswith(CONSUMER):
            group_id = state.group(self.name.removeprefix(CONSUMER)).group_id
        current = state.windows.get(self.name)
        live = current is not None and current.expires_at_ms > now_ms
        if current is not None and live and not self.takeover:
            if current.owner == self.owner:  # repeated after a lost answer
                return Decision({"epoch": current.epoch, "expires_at_ms": current.expires_at_ms})
            return Decision(
                {
                    "yielded_to": current.owner,
                    "epoch": current.epoch,
                    "expires_at_ms": current.expires_at_ms,
                }
            )
        epoch = current.epoch + 1 if current is not None else 1
        expires = now_ms + self.duration_ms
        # The last run did not close its window: it was killed, or a message ended its process.
        unclosed = current is not None and current.expires_at_ms > 0
        decision = Decision(
            {"epoch": epoch, "expires_at_ms": expires, "follows_unclosed": unclosed}
        )
        decision.events.append(
            _event(
                Kind.WINDOW,
                self.name,
                now_ms=now_ms,
                epoch=epoch,
                expires_at_ms=expires,
                owner=self.owner,
            )
        )
        if group_id:
            decision.events.extend(_end_older(state, group_id, epoch=epoch, now_ms=now_ms))
        return decision


def _event(
    kind: Kind, name: str, *, now_ms: int, epoch: int, expires_at_ms: int, owner: str | None
) -> EventRows:
    return single(
        kind, now_ms, epoch=epoch, visible_at_ms=expires_at_ms, client_id=owner, detail=name
    )


def _end_older(state: State, group_id: int, *, epoch: int, now_ms: int) -> list[EventRows]:
    events = []
    for key, consumption in state.consumptions.items():
        leases = consumption.leases
        if key[0] != group_id or not len(leases):
            continue
        old = (leases.epoch > 0) & (leases.epoch < epoch)
        released = release_running(consumption, old, now_ms=now_ms)
        events.extend(QueueKey._make(key).events(released, now_ms))
    return events


@dataclass(frozen=True, slots=True)
class RenewWindow(Request):
    """Request that extends a window."""

    name: str
    epoch: int
    duration_ms: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Refuse if a newer epoch was opened, or this one was closed."""
        _check(self.name, self.duration_ms)
        state.fence((self.name, self.epoch))
        expires = now_ms + self.duration_ms
        event = _event(
            Kind.WINDOW,
            self.name,
            now_ms=now_ms,
            epoch=self.epoch,
            expires_at_ms=expires,
            owner=None,
        )
        return Decision({"epoch": self.epoch, "expires_at_ms": expires}, events=[event])


@dataclass(frozen=True, slots=True)
class CloseWindow(Request):
    """Request that closes a window. Has no effect on a closed window or one with a newer epoch."""

    name: str
    epoch: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event, unless the window is closed already."""
        current = state.windows.get(self.name)
        if current is None or current.epoch != self.epoch or current.expires_at_ms == 0:
            return Decision()
        event = _event(
            Kind.WINDOW_CLOSED,
            self.name,
            now_ms=now_ms,
            epoch=self.epoch,
            expires_at_ms=0,
            owner=None,
        )
        return Decision(events=[event])


@dataclass(frozen=True, slots=True)
class Due(Request):
    """Query for the due work of upkeep jobs and of consumers."""

    #: Offsets that cannot be dead-lettered now: they are not due.
    but: Mapping[QueueKey, Int64s] = field(default_factory=dict)

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return a JSON-able dict as the answer; store nothing."""
        ended, next_visible, oldest_ended = 0, None, None
        groups: dict[str, dict[str, object]] = {
            group.name: {
                "topics": {},
                "window": window_of(state, f"consumer/{group.name}", now_ms=now_ms),
            }
            for group in state.groups.values()
        }
        for (group_id, topic_id, queue_id), consumption in state.consumptions.items():
            topic, group = state.topics.get(topic_id), state.groups.get(group_id)
            if topic is None or group is None or not consumption.touched:
                continue
            leases = consumption.leases
            soonest = consumption.next_after(now_ms)
            but = self.but.get(QueueKey(group_id, topic_id, queue_id))
            unrecorded = _unrecorded(consumption, group, but=but, now_ms=now_ms)
            ended += len(unrecorded)
            if len(unrecorded):
                oldest_ended = earlier(oldest_ended, int(unrecorded.min()))
            next_visible = earlier(next_visible, soonest)
            per_topic = groups[group.name]["topics"]
            assert isinstance(per_topic, dict)
            entry = per_topic.setdefault(
                topic.topic.name,
                {"ready": 0, "unread": 0, "unsettled": 0, "parked": 0, "next_visible_ms": None},
            )
            queue = topic.queues[queue_id]
            entry["ready"] += ready(queue, consumption, now_ms=now_ms)
            entry["ready"] += open_backlogs(state, topic, group=group, queue_id=queue_id)
            entry["unread"] += queue.max_offset - consumption.cursor
            parked = len(leases.parked())
            entry["unsettled"] += len(leases.unsettled()) - parked
            entry["parked"] += parked
            entry["next_visible_ms"] = earlier(entry["next_visible_ms"], soonest)
        revive = {"next_due_ms": next_visible, "due": ended, "oldest_ended_ms": oldest_ended}
        jobs = _jobs(state, revive, now_ms=now_ms)
        return Decision({"now_ms": now_ms, "jobs": jobs, "groups": groups})


def _unrecorded(
    consumption: Consumption, group: Group, *, but: Int64s | None, now_ms: int
) -> Int64s:
    """Return the end of each lease that is due for the revive job."""
    leases = consumption.leases
    rows = leases.alive & (leases.visible_at <= now_ms) & (leases.delivery != WAITING)
    leased = rows & (leases.delivery > WAITING)
    if leased.any():
        # In order, a message behind another is due only after that one is settled or has ended.
        found = expire(consumption, group, now_ms=now_ms, limit=len(leases))
        known = [each.queue_offset for each in found]
        rows &= ~leased | np.isin(leases.offset, np.concatenate(known) if known else known)
    if but is not None:
        rows &= (leases.delivery != EXHAUSTED) | ~np.isin(leases.offset, but)
    ended: Int64s = leases.visible_at[rows]
    return ended


def ready(queue: Queue, consumption: Consumption, *, now_ms: int) -> int:
    """Return how many messages of a queue a receive may get now, without backlogs."""
    leases = consumption.leases
    if consumption.is_blocked(now_ms):
        return 0
    over = (leases.delivery >= WAITING) & (leases.visible_at <= now_ms)
    again = np.count_nonzero(leases.alive & (over | (leases.delivery == AHEAD)))
    return ready_from_cursor(queue, consumption) + int(again)


def _jobs(state: State, revive: dict[str, Any], *, now_ms: int) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = {
        "deliver_scheduled": {
            "next_due_ms": state.schedule.next_due_ms(ahead_ms=state.ahead_ms),
            "due": state.schedule.count_due(now_ms, ahead_ms=state.ahead_ms),
        },
        "revive": revive,
        "check_transactions": {
            "next_due_ms": state.halves.next_due_ms(),
            "due": state.halves.count_due(now_ms),
        },
        "seal": {"next_due_ms": None, "due": 0},
        "compact": {"next_due_ms": None, "due": 0},
        "expire": {"next_due_ms": None, "due": 0},
    }
    for name, job in jobs.items():
        job["window"] = window_of(state, f"upkeep/{name}", now_ms=now_ms)
    return jobs


def earlier(one: int | None, other: int | None) -> int | None:
    """Return the earlier of two times; None: never."""
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def window_of(state: State, name: str, *, now_ms: int) -> dict[str, object] | None:
    """Return a window that is live now."""
    window = state.windows.get(name)
    if window is None or window.expires_at_ms <= now_ms:
        return None
    return {
        "owner": window.owner,
        "epoch": window.epoch,
        "expires_at_ms": window.expires_at_ms,
    }


@dataclass(frozen=True, slots=True)
class NoteFallback(Request):
    """Request that records an overdue job done by the broker."""

    job: str
    overdue_ms: int
    report: dict[str, Any]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event."""
        detail = {"job": self.job, "overdue_ms": self.overdue_ms, "report": self.report}
        return Decision(events=[single(Kind.UPKEEP_FALLBACK, now_ms, detail=json.dumps(detail))])
