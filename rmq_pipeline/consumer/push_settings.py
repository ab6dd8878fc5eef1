"""What a push consumer was told: checked once, and never changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

from rmq_pipeline import limits
from rmq_pipeline.consumer.allocation import Strategy, strategy_of
from rmq_pipeline.consumer.by_key import KeyOf, by_keys, by_message_group
from rmq_pipeline.consumer.flow_control import Thresholds
from rmq_pipeline.consumer.hooks import Hook
from rmq_pipeline.consumer.kept_offsets import StartFrom, checked_start
from rmq_pipeline.consumer.listener import SUSPEND_MS
from rmq_pipeline.consumer.message_queue import BROKER_NAME
from rmq_pipeline.consumer.rebalancing import Model, Pace
from rmq_pipeline.errors import ConsumerUsageError

#: In which order the listener gets messages.
Order = Literal["concurrently", "queue", "key"]

CONSUME_TIMEOUT_MS: Final = 15 * 60 * 1000
#: A call that lasts longer does not count as one of the threads.
STUCK_AFTER_MS: Final = 1_000


class PushOptions(TypedDict, total=False):
    """What a push consumer may be told; PushSettings has the defaults."""

    #: clustering, or broadcasting: it reads all queues, keeps offsets in a file of this machine,
    #: and goes on without messages that fail.
    model: Model
    #: concurrently, queue or key.
    order: Order
    #: By key: message_group, keys, or a function of a message. Messages whose key is None are in no
    #: order; those of one key must be in one queue.
    key: str | KeyOf
    #: AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, or one of consumer.allocation.
    strategy: str | Strategy
    #: Where queues begin that the group has no committed offset of: last, first, ms since 1970.
    start_from: StartFrom
    #: Calls at a time; and with those that make up for calls that last longer than stuck_after_ms:
    #: twice as many unless said otherwise.
    threads: int
    max_threads: int | None
    stuck_after_ms: int
    #: The most messages of a call.
    batch: int
    #: Concurrently: messages whose call takes longer are sent back.
    consume_timeout_ms: int
    #: In order: between a failure and the next call; 10 ms to 30 s.
    suspend_ms: int
    #: By queue: messages that have failed so often come again behind others, and go to the dead
    #: letters when their attempts are used up; -1: never.
    max_reconsume_times: int
    #: By key: of a message, then the group's on_failure; None: as many as the group has.
    max_attempts: int | None
    #: The most that is held of each queue before no more is pulled.
    thresholds: Thresholds
    #: The most messages of one pull (four times as many by key, while workers have nothing to do),
    #: and how long one waits at the broker; ``close`` waits, too.
    pull_batch: int
    poll_ms: int
    #: How long ``close`` waits for calls under way.
    close_timeout_s: float
    hooks: Sequence[Hook]
    #: Whose member this is; ``room@name`` for strategies that go by rooms. A broadcasting consumer
    #: has its offsets by it.
    client_id: str
    #: Of broadcasting consumers; else ``~/.rocketmq_offsets``.
    offsets_folder: Path | str | None
    #: The name of all queues' broker; ``room@name`` for strategies that go by rooms.
    broker_name: str
    #: Of rebalances.
    pace: Pace | None


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """How a push consumer works; PushOptions says what each setting means."""

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
    suspend_ms: int = SUSPEND_MS
    max_reconsume_times: int = -1
    max_attempts: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    pull_batch: int = 1_000
    poll_ms: int = 1_000
    close_timeout_s: float = 30.0
    hooks: Sequence[Hook] = ()
    offsets_folder: Path | str | None = None
    broker_name: str = BROKER_NAME
    pace: Pace | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConsumerUsageError: which setting, what it may be.
        """
        checked_start(self.start_from)
        strategy_of(self.strategy)
        for name, allowed in (("model", Model), ("order", Order)):
            if getattr(self, name) not in get_args(allowed):
                given, known = getattr(self, name), ", ".join(get_args(allowed))
                raise ConsumerUsageError(f"{name} is one of {known}, not {given!r}.")
        if self.key not in ("message_group", "keys") and not callable(self.key):
            raise ConsumerUsageError(
                f"key is message_group, keys, or a function of a message, not {self.key!r}."
            )
        at_least: dict[str, tuple[Any, int]] = {
            "threads": (self.threads, 1),
            "max_threads": (self.most_threads, self.threads),
            "batch": (self.batch, 1),
            "pull_batch": (self.pull_batch, 1),
            "poll_ms": (self.poll_ms, 1),
            "consume_timeout_ms": (self.consume_timeout_ms, 1),
            "suspend_ms": (self.suspend_ms, 0),
            "max_reconsume_times": (self.max_reconsume_times, -1),
            "max_attempts": (self.max_attempts if self.max_attempts is not None else 1, 1),
        }
        for name, (given, least) in at_least.items():
            whole = isinstance(given, int) and not isinstance(given, bool)
            if not whole or given < least:
                raise ConsumerUsageError(
                    f"{name} is a whole number of {least} or more, not {given!r}."
                )
        if self.pull_batch > limits.RECEIVE_ROWS:
            raise ConsumerUsageError(f"pull_batch is at most {limits.RECEIVE_ROWS}.")

    @property
    def most_threads(self) -> int:
        """With those that make up for calls that last."""
        return 2 * self.threads if self.max_threads is None else self.max_threads

    @property
    def is_broadcasting(self) -> bool:
        """Whether this member reads everything."""
        return self.model == "broadcasting"

    @property
    def is_locking(self) -> bool:
        """Whether queues are owned by lock: order must outlive a change of owners."""
        return self.order != "concurrently" and not self.is_broadcasting

    @property
    def key_of(self) -> KeyOf:
        """What messages that must not overtake each other have in common."""
        if isinstance(self.key, str):
            return by_keys if self.key == "keys" else by_message_group
        return self.key

    def check_group(self, order: str) -> None:
        """Refuse a consumer group whose order is at odds with this consumer's.

        Raises:
            ConsumerUsageError: what the group is to be instead.
        """
        if self.is_broadcasting or order == "none":
            return
        if self.order == "concurrently":
            raise ConsumerUsageError(
                f"Group {self.group} keeps order by {order}, and a listener that is called"
                " concurrently breaks it. Use order='key' or order='queue', or a group of order"
                " none."
            )
        if self.order == "key" and (self.key != "message_group" or order != "message_group"):
            raise ConsumerUsageError(
                f"Group {self.group} keeps order by {order}, which is not this consumer's key."
                " Use key='message_group' with a group of order message_group, or a group of order"
                " none, whose messages come in the order of their queue."
            )
