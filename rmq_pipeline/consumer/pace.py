"""Times of a consumer: heartbeats, rebalances, locks, leases, fetches."""

from dataclasses import dataclass
from typing import Final

#: Duration of a lock at the broker.
LOCK_MS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times of a consumer; where RocketMQ has the same, with its values."""

    #: Minimum interval between two heartbeats, even if the group changes often.
    beat_gap_s: float = 0.05
    #: Interval of rebalances while the queues are shared out, and before.
    balanced_s: float = 20.0
    unbalanced_s: float = 1.0
    #: Minimum time between two rebalances, even if the group changes often.
    gap_s: float = 1.0
    #: Interval at which ``drop`` and ``reset`` of the owner are retried.
    ask_s: float = 0.1
    #: Time after which a dropped queue is unlocked although its owner still works on it. The lock
    #: is no longer renewed, but lasts longer than this.
    let_go_s: float = 20.0
    #: Duration of a lock at the broker; its holder trusts it for half of that.
    lock_ms: int = LOCK_MS
    #: Interval of renewals of locks. The first one is early: a lock taken at the start of a slow
    #: call soon gets its full time.
    renew_s: float = 20.0
    first_renew_s: float = 1.0
    #: Interval of checks for new queues while queues are assigned.
    look_s: float = 30.0
    #: Wait of a pull consumer's fetch at the broker. A new or reset queue waits at most as long,
    #: and a poll ends its wait.
    fetch_ms: int = 1_000
    #: Interval of checks for pulls that hang, and the age at which a push consumer's queue counts
    #: as not pulled.
    pulls_ms: int = 10_000
    pull_expiry_ms: int = 120_000
    #: Duration of the leases of concurrent consumption, and interval of their renewals.
    lease_ms: int = 30_000
    lease_renew_s: float = 10.0
    #: Minimum time between two calls that settle, so that results are batched; ``hurry`` skips it.
    settle_gap_s: float = 0.025
