"""Due work of upkeep jobs and of consumer groups."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmq_pipeline.broker.decide.blocked_groups import open_backlogs
from rmq_pipeline.broker.decide.fifo import ready_from_cursor
from rmq_pipeline.broker.decide.redeliver import expire
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import single
from rmq_pipeline.broker.state.lease_table import AHEAD, EXHAUSTED, WAITING
from rmq_pipeline.broker.state.state import Queue, State
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind


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
