"""Settings of a push consumer: checked once, immutable."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

from rmq_pipeline import limits
from rmq_pipeline.consumer.allocation import Strategy, strategy_of
from rmq_pipeline.consumer.by_key import KeyOf, by_keys, by_message_group
from rmq_pipeline.consumer.listener import Hook
from rmq_pipeline.consumer.message_queue import BROKER_NAME
from rmq_pipeline.consumer.offset_store import StartFrom, checked_start
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.process_queue import Thresholds
from rmq_pipeline.consumer.rebalancing import Model
from rmq_pipeline.errors import ConsumerUsageError

#: Order of the calls of the listener.
Order = Literal["concurrently", "queue", "key"]

CONSUME_TIMEOUT_MS: Final = 15 * 60 * 1000
#: A longer call no longer counts as one of the threads.
STUCK_AFTER_MS: Final = 1_000


class PushOptions(TypedDict, total=False):
    """Options of a push consumer; PushSettings has the defaults."""

    #: "clustering", or "broadcasting": reads all queues, stores offsets in a file of this machine,
    #: and skips messages that fail.
    model: Model
    #: "concurrently", "queue" or "key".
    order: Order
    #: For order "key": "message_group", "keys", or a function of a message. Messages with key None
    #: have no order. All messages of a key must be in one queue.
    key: str | KeyOf
    #: AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, or an object of consumer.allocation.
    strategy: str | Strategy
    #: Start of queues without a committed offset: "last", "first", or ms since 1970.
    start_from: StartFrom
    #: Parallel calls. Up to max_threads, twice as many by default, replace threads whose call
    #: lasts longer than stuck_after_ms.
    threads: int
    max_threads: int | None
    stuck_after_ms: int
    #: Maximum number of messages of a call.
    batch: int
    #: For order "concurrently": messages of a longer call are retried.
    consume_timeout_ms: int
    #: For ordered consumption: pause after a failure, 10 ms to 30 s. None: 1 s for order "queue",
    #: the group's backoff for order "key".
    suspend_ms: int | None
    #: For order "queue": failures after which a message is retried out of order, until its attempts
    #: are exhausted and it is dead-lettered; -1: never.
    max_reconsume_times: int
    #: For order "key": attempts before the group's on_failure applies; None: the group's number.
    max_attempts: int | None
    #: Limits on held messages per queue.
    thresholds: Thresholds
    #: Maximum number of messages of a pull (four times as many for order "key" while workers idle),
    #: and its wait at the broker; ``close`` waits for it too.
    pull_batch: int
    poll_ms: int
    #: Time that ``close`` waits for running calls.
    close_timeout_s: float
    hooks: Sequence[Hook]
    #: Id of this member; ``room@name`` for strategies that use machine rooms. The offset file of a
    #: broadcasting consumer has this id in its path.
    client_id: str
    #: Folder of offset files of broadcasting consumers; ``~/.rocketmq_offsets`` by default.
    offsets_folder: Path | str | None
    #: Broker name of all queues; ``room@name`` for strategies that use machine rooms.
    broker_name: str
    #: Times of heartbeats, rebalances, locks and leases.
    pace: Pace


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """Settings of a push consumer, documented in PushOptions."""

    group: str
    client_id: str = ""
    model: Model = "clustering"
    order: Order = "concurrently"
    key: str | KeyOf = "message_group"
    strategy: str | Strategy = "AVG"
    start_from: StartFrom = "first"
    threads: int = 20
    max_threads: int | None = None
    stuck_after_ms: int = STUCK_AFTER_MS
    batch: int = 1
    consume_timeout_ms: int = CONSUME_TIMEOUT_MS
    suspend_ms: int | None = None
    max_reconsume_times: int = -1
    max_attempts: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    pull_batch: int = 1_000
    poll_ms: int = 1_000
    close_timeout_s: float = 30.0
    hooks: Sequence[Hook] = ()
    offsets_folder: Path | str | None = None
    broker_name: str = BROKER_NAME
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConsumerUsageError: a setting is invalid; the error has its name and allowed values.
        """
        checked_start(self.start_from)
        strategy_of(self.strategy)
        for name, allowed in (("model", Model), ("order", Order)):
            if getattr(self, name) not in get_args(allowed):
                given, known = getattr(self, name), ", ".join(get_args(allowed))
                raise ConsumerUsageError(
                    f"The {name} {given!r} is unknown.", remedy=f"Use one of {known}."
                )
        if self.key not in ("message_group", "keys") and not callable(self.key):
            raise ConsumerUsageError(
                f"The key {self.key!r} is unknown.",
                remedy="Use message_group, keys, or a function of a message.",
            )
        at_least: dict[str, tuple[Any, int]] = {
            "threads": (self.threads, 1),
            "max_threads": (self.most_threads, self.threads),
            "batch": (self.batch, 1),
            "pull_batch": (self.pull_batch, 1),
            "poll_ms": (self.poll_ms, 1),
            "consume_timeout_ms": (self.consume_timeout_ms, 1),
            "suspend_ms": (0 if self.suspend_ms is None else self.suspend_ms, 0),
            "max_reconsume_times": (self.max_reconsume_times, -1),
            "max_attempts": (self.max_attempts if self.max_attempts is not None else 1, 1),
        }
        for name, (given, least) in at_least.items():
            whole = isinstance(given, int) and not isinstance(given, bool)
            if not whole or given < least:
                raise ConsumerUsageError(
                    f"{name} is {given!r}.", remedy=f"Give an integer of {least} or more."
                )
        if self.pull_batch > limits.RECEIVE_ROWS:
            raise ConsumerUsageError(
                f"pull_batch is {self.pull_batch}.", remedy=f"Give at most {limits.RECEIVE_ROWS}."
            )

    @property
    def most_threads(self) -> int:
        """Maximum number of threads, including replacements of stuck ones."""
        return 2 * self.threads if self.max_threads is None else self.max_threads

    @property
    def is_broadcasting(self) -> bool:
        """True if this member reads all queues."""
        return self.model == "broadcasting"

    @property
    def is_locking(self) -> bool:
        """True if queues are locked, because order must survive a change of owners."""
        return self.order != "concurrently" and not self.is_broadcasting

    @property
    def key_of(self) -> KeyOf:
        """Function that returns the key of a message."""
        if isinstance(self.key, str):
            return by_keys if self.key == "keys" else by_message_group
        return self.key

    def check_group(self, order: str) -> None:
        """Refuse a consumer group whose order conflicts with this consumer's.

        Raises:
            ConsumerUsageError: the orders conflict; the error has the possible combinations.
        """
        if self.is_broadcasting or order == "none":
            return
        if self.order == "concurrently":
            raise ConsumerUsageError(
                f"Group {self.group} keeps order by {order}; a listener that is called"
                " concurrently breaks the order.",
                remedy="Use order='key' or order='queue', or a group of order none.",
            )
        if self.order == "key" and (self.key != "message_group" or order != "message_group"):
            raise ConsumerUsageError(
                f"Group {self.group} keeps order by {order}, which is not this consumer's key.",
                remedy="Use key='message_group' with a group of order message_group, or a group of"
                " order none, whose messages come in the order of their queue.",
            )
