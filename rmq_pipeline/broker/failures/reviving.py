"""The revive job: record ended leases, dead-letter exhausted messages, wake waiting receives."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.failures.burying import AT_ONCE, bury, told
from rmq_pipeline.broker.failures.redeliver import dooms, expire
from rmq_pipeline.broker.receiving.lease_table import FAR, WAITING
from rmq_pipeline.broker.receiving.scan import QueueKey
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.store.events import Kind

#: No topic has this id, so no message wakes the wait: only its timeout does.
_NO_TOPIC = -1


@dataclass(frozen=True, slots=True)
class Revive(Request):
    """Request that records ended leases of all groups."""

    limit: int
    window: tuple[str, int] | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return (revived, parked, marked, when the next lease ends) as the answer.

        ``marked`` is above 0 if messages wait for dead-lettering.
        """
        state.fence(self.window)
        decision = Decision()
        revived, parked, doomed, next_visible = 0, 0, 0, FAR
        for key, consumption in state.consumptions.items():
            group = state.groups.get(key[0])
            if group is None or not len(consumption.leases):
                continue
            found: list[EventRows] = []
            if now_ms >= consumption.leases.next_visible and revived < self.limit:
                found = expire(consumption, group, now_ms=now_ms, limit=self.limit - revived)
                for events in found:
                    again = events.column("delivery", np.int64) == WAITING
                    revived += int(again.sum()) if events.kind != Kind.CONDEMN else 0
                    parked += len(events) if events.kind == Kind.PARK else 0
                decision.events.extend(QueueKey._make(key).events(found, now_ms))
            leases = consumption.leases
            running = leases.alive & (leases.delivery > WAITING) & (leases.visible_at > now_ms)
            if running.any():
                next_visible = min(next_visible, int(leases.visible_at[running].min()))
            doomed += len(consumption.leases.doomed()) + dooms(found)
        decision.answer = (revived, parked, doomed, None if next_visible == FAR else next_visible)
        return decision


def revive(
    engine: Engine, *, wait_ms: int, limit: int, window: tuple[str, int] | None
) -> dict[str, Any]:
    """Revive leases that have ended or end within ``wait_ms``.

    Returns:
        revived, parked, dead_lettered, next_visible_ms; unburied: number of messages that cannot be
        dead-lettered because reading or copying them fails.

    Raises:
        OperatorError, LookupError: a message cannot be dead-lettered and no call has reported it
            yet. All other work is done.
    """
    deadline = engine.clock.now_ms() + wait_ms
    unburied, revived, parked, buried = engine.unburied, 0, 0, 0
    while True:
        # Read the version before looking, so that a change during the look starts another one.
        version, now_ms = engine.arrivals.version(_NO_TOPIC), engine.clock.now_ms()
        some, held, doomed, next_visible = engine.submit(Revive(limit - revived, window))
        revived += some
        parked += held
        if doomed or unburied:
            again = unburied.take_time(now_ms)
            buried += bury(engine, None, limit=AT_ONCE, again=again).n
        done = now_ms >= deadline or revived >= limit or engine.arrivals.closed
        if done:
            _tell(unburied.take_untold())
            return {
                "revived": revived,
                "parked": parked,
                "dead_lettered": buried,
                "next_visible_ms": next_visible,
                "unburied": len(unburied),
            }
        wake = deadline if next_visible is None else min(deadline, next_visible)
        # A new lease wakes no waiter. Look again after one second, the precision the job promises.
        engine.arrivals.wait(_NO_TOPIC, version, at_ms=min(wake, now_ms + 1000))


def _tell(error: Exception | None) -> None:
    """Raise the error, if any; each failed message is reported by one call only."""
    if error is not None:
        raise told(error)
