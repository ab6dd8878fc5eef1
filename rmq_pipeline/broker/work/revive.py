"""The revive job: record ended leases, dead-letter exhausted messages, wake waiting receives."""

from typing import Any

from rmq_pipeline.broker.decide.redeliver import Revive
from rmq_pipeline.broker.work.dead_letter import AT_ONCE, dead_letter_exhausted, told
from rmq_pipeline.broker.work.engine import Engine

#: No topic has this id, so no message wakes the wait: only its timeout does.
_NO_TOPIC = -1


def revive(
    engine: Engine, *, wait_ms: int, limit: int, window: tuple[str, int] | None
) -> dict[str, Any]:
    """Revive leases that have ended or end within ``wait_ms``.

    Returns:
        revived, parked, dead_lettered, next_visible_ms; dead_letter_failures: number of messages
        that cannot be dead-lettered because reading or copying them fails.

    Raises:
        OperatorError, LookupError: a message cannot be dead-lettered and no call has reported it
            yet. All other work is done.
    """
    deadline = engine.clock.now_ms() + wait_ms
    failures, revived, parked, dead_lettered = engine.dead_letter_failures, 0, 0, 0
    while True:
        # Read the version before looking, so that a change during the look starts another one.
        version, now_ms = engine.wakeups.version(_NO_TOPIC), engine.clock.now_ms()
        some, held, exhausted, next_visible = engine.submit(Revive(limit - revived, window))
        revived += some
        parked += held
        if exhausted or failures:
            again = failures.take_time(now_ms)
            dead_lettered += dead_letter_exhausted(engine, None, limit=AT_ONCE, again=again).n
        done = now_ms >= deadline or revived >= limit or engine.wakeups.closed
        if done:
            _tell(failures.take_untold())
            return {
                "revived": revived,
                "parked": parked,
                "dead_lettered": dead_lettered,
                "next_visible_ms": next_visible,
                "dead_letter_failures": len(failures),
                "unburied": len(failures),  # the earlier name, for one release
            }
        wake = deadline if next_visible is None else min(deadline, next_visible)
        # A new lease wakes no waiter. Look again after one second, the precision the job promises.
        engine.wakeups.wait(_NO_TOPIC, version, at_ms=min(wake, now_ms + 1000))


def _tell(error: Exception | None) -> None:
    """Raise the error, if any; each failed message is reported by one call only."""
    if error is not None:
        raise told(error)
