"""What an operator may set for a broker; every default is a choice of limits.py."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rmq_pipeline import limits


class Settings(BaseModel):
    """Settings of one broker; sizes in bytes, times in ms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    log_file_bytes: int = Field(limits.LOG_FILE_BYTES, ge=1 * limits.MIB)
    reserve_bytes: int = Field(limits.RESERVE_BYTES, ge=0)
    dispatch_behind_bytes: int = Field(limits.DISPATCH_BEHIND_BYTES, ge=limits.MIB)
    duckdb_memory_bytes: int = Field(192 * limits.MIB, ge=64 * limits.MIB)
    #: Rows of consume queues kept ready for receives, 28 bytes each.
    index_cache_rows: int = Field(2_000_000, ge=100_000)
    delay_max_ms: int = Field(limits.DELAY_MAX_MS, ge=1000)
    #: The delay of each level, from level 1 on. What is stored keeps its moment when they change.
    delay_levels_ms: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        limits.DELAY_LEVELS_MS, min_length=1, max_length=limits.DELAY_LEVELS
    )
    #: When a half message is first asked about, unless it says so itself; how often then, and how
    #: many times.
    transaction_immunity_ms: int = Field(limits.TRANSACTION_IMMUNITY_MS, ge=1)
    transaction_check_interval_ms: int = Field(limits.TRANSACTION_CHECK_INTERVAL_MS, ge=1)
    transaction_check_max: int = Field(limits.TRANSACTION_CHECKS, ge=1)
    #: A member of a consumer group is gone after this time without a heartbeat.
    member_timeout_ms: int = Field(limits.MEMBER_TIMEOUT_MS, ge=1000)
    #: In upkeep mode dagster: what is overdue by more than this the broker does itself.
    fallback_overdue_ms: int = Field(limits.FALLBACK_OVERDUE_MS, ge=1000)
    #: Sealed are messages older than this, and whole log files that are full.
    seal_after_ms: int = Field(10 * 60_000, ge=0)
    #: Where segments are: a path, or the URI of a pyarrow file system; None: in the home.
    archive_root: str | None = None
    #: Neighbouring segments of a queue become one of about this size, when there are so many.
    compact_target_bytes: int = Field(limits.COMPACT_TARGET_BYTES, ge=1)
    compact_min_inputs: int = Field(limits.COMPACT_MIN_INPUTS, ge=2)
    #: How long files that count no more may still be read by those who have an older manifest.
    replaced_grace_ms: int = Field(limits.REPLACED_GRACE_MS, ge=0)
    #: How long scheduled messages that were delivered, and half messages that were ended, are kept.
    system_retention_ms: int | None = Field(limits.SYSTEM_RETENTION_MS, ge=limits.RETENTION_MIN_MS)
    #: A snapshot of the state is taken when the last one is this old, or after so many events; the
    #: state as of a moment is a snapshot and the events after it.
    snapshot_every_ms: int = Field(limits.SNAPSHOT_EVERY_MS, ge=0)
    snapshot_events: int = Field(limits.SNAPSHOT_EVENTS, ge=1)
    #: How long snapshots and events are kept; None: for good.
    history_retention_ms: int | None = Field(limits.HISTORY_RETENTION_MS, ge=0)
    #: How long each keyed state that was left is kept, for replays; of older ones the newest of a
    #: message group is. None: for good.
    state_retention_ms: int | None = Field(None, ge=0)
    #: Clients connected to the gRPC door and their receives under way, at most.
    grpc_clients: int = Field(limits.GRPC_CLIENTS, ge=1)
    grpc_receives: int = Field(limits.GRPC_RECEIVES, ge=1)
    #: Other calls of that door under way, and the bytes of their requests together, at most; one
    #: request may be larger.
    grpc_calls: int = Field(limits.GRPC_CALLS, ge=1)
    grpc_request_bytes: int = Field(limits.GRPC_REQUESTS_BYTES, ge=limits.MIB)
    #: Whether it keeps the host that a message was born on, as the property __BORNHOST.
    grpc_born_hosts: bool = False
    #: Whether a consumer group that a client of it names is created if need be.
    grpc_create_groups: bool = True
