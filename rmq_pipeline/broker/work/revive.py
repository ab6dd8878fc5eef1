"""The revive job: record ended leases, dead-letter exhausted messages, wake waiting receives."""

from typing import Any

from rmq_pipeline.broker.decide.redeliver import Revive
from rmq_pipeline.broker.work.dead_letter import AT_ONCE, dead_letter_exhausted, told
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.waiting import LongPoll

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
    poll = LongPoll(engine.wakeups, wait_ms=wait_ms)
    failures, revived, parked, dead_lettered = engine.dead_letter_failures, 0, 0, 0
    while True:
        now_ms = poll.look(_NO_TOPIC)
        some, held, exhausted, next_visible = engine.submit(Revive(limit - revived, window))
        revived += some
        parked += held
        if exhausted or failures:
            again = failures.take_time(now_ms)
            dead_lettered += dead_letter_exhausted(engine, None, limit=AT_ONCE, again=again).n
        if revived >= limit or poll.is_over:
            _tell(failures.take_untold())
            return {
                "revived": revived,
                "parked": parked,
                "dead_lettered": dead_lettered,
                "next_visible_ms": next_visible,
                "dead_letter_failures": len(failures),
                "unburied": len(failures),  # the earlier name, for one release
            }
        # A new lease wakes no waiter. Look again after one second, the precision the job promises.
        again_ms = now_ms + 1000
        poll.wait(until_ms=again_ms if next_visible is None else min(again_ms, next_visible))


def _tell(error: Exception | None) -> None:
    """Raise the error, if any; each failed message is reported by one call only."""
    if error is not None:
        raise told(error)
