"""Settings of a broker; the defaults are in limits.py."""

import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_serializer

from rmq_pipeline import limits
from rmq_pipeline.errors import RequestError
from rmq_pipeline.log_address import check_log_store, is_bucket
from rmq_pipeline.storage.root import shown

#: Characters of URLs that mean nothing in HTML or in the template itself.
_OF_URLS: Final = r"[A-Za-z0-9._~:/?#@!$&()*+,;=%-]"
#: Names of brokers in route tables.
BROKER_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,127}")


def check_route_table(path: str) -> str:
    """Return the path of a route table.

    Raises:
        RequestError: it is relative; the next start may have another folder.
    """
    if not Path(path).is_absolute():
        raise RequestError(
            f"The setting route_table is the relative path {path!r}.",
            remedy="Use an absolute path.",
        )
    return path


def _chosen(value: int | None, default: int) -> int:
    return default if value is None else value


class Settings(BaseModel):
    """Settings of one broker; sizes in bytes, times in ms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    log_file_bytes: int = Field(limits.LOG_FILE_BYTES, ge=1 * limits.MIB)
    reserve_bytes: int = Field(limits.RESERVE_BYTES, ge=0)
    dispatch_behind_bytes: int = Field(limits.DISPATCH_BEHIND_BYTES, ge=limits.MIB)
    duckdb_memory_bytes: int = Field(192 * limits.MIB, ge=64 * limits.MIB)
    #: Rows of consume queues that are cached for receives, 28 bytes each.
    index_cache_rows: int = Field(2_000_000, ge=100_000)
    delay_max_ms: int = Field(limits.DELAY_MAX_MS, ge=1000)
    #: Delays of the levels, from level 1 on. Stored messages keep their delivery time after a
    #: change.
    delay_levels_ms: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        limits.DELAY_LEVELS_MS, min_length=1, max_length=limits.DELAY_LEVELS
    )
    #: Default time before the first check of a half message; interval of further checks; their
    #: number.
    transaction_immunity_ms: int = Field(limits.TRANSACTION_IMMUNITY_MS, ge=1)
    transaction_check_interval_ms: int = Field(limits.TRANSACTION_CHECK_INTERVAL_MS, ge=1)
    transaction_check_max: int = Field(limits.TRANSACTION_CHECKS, ge=1)
    #: A member of a consumer group counts as gone this long after its last heartbeat.
    member_timeout_ms: int = Field(limits.MEMBER_TIMEOUT_MS, ge=1000)
    #: Reaction to a receive whose filter differs from that of the group's other consumers.
    mixed_filters: Literal["warn", "refuse"] = "warn"
    #: In upkeep mode dagster the broker itself does work that is overdue by more than this.
    fallback_overdue_ms: int = Field(limits.FALLBACK_OVERDUE_MS, ge=1000)
    #: Messages older than this are sealed, and so are full log files.
    seal_after_ms: int = Field(10 * 60_000, ge=0)
    #: Address of the archive: a path, or the URI of a pyarrow file system; None: in the home.
    archive_root: str | None = None
    #: URL of the PostgreSQL database (extra postgres), of the prefix of a bucket (extra objects) or
    #: of the stream of NATS (extra nats) that has the commit log, without a password; None: only
    #: the home has it. See docs/replication.md.
    log_store: Annotated[str, AfterValidator(check_log_store)] | None = None
    #: sync: a send is answered once home and store have it; async: once the home has it.
    replication: Literal["sync", "async"] = "sync"
    #: With async: bytes that only the home may have before sends wait, and are then refused.
    replication_behind_bytes: int = Field(64 * limits.MIB, ge=limits.MIB)
    #: Another broker may lead this long after the leader's last sign of life.
    log_lease_ms: int = Field(2000, ge=200)
    #: auto: a standby leads once the leader's lease is over; manual: by `rmq promote` only.
    failover: Literal["auto", "manual"] = "auto"
    #: Time in which the broker repeats a failed write to the store before it refuses the call.
    log_timeout_ms: int = Field(5000, ge=100)
    #: How long a frame waits for further requests before it is written to the store, and how often
    #: a standby asks for the next frame. None: 10 and 200 with a bucket, where each request costs
    #: money; 0 and 50 with others.
    log_gather_ms: int | None = Field(None, ge=0, le=1000)
    log_poll_ms: int | None = Field(None, ge=10, le=10_000)
    #: Absolute path of the route table: the topics and brokers of several homes; None: this broker
    #: has all topics. See docs/routes.md.
    route_table: Annotated[str, AfterValidator(check_route_table)] | None = None
    #: Name of this broker in the route table, and in the routes of RocketMQ's clients.
    broker_name: str = Field("rmq", pattern=rf"^{BROKER_NAME.pattern}$")
    #: Port for small calls of this library's clients over plain TCP; 0: any free port, None: none.
    tcp_port: int | None = Field(0, ge=0, le=65535)
    #: Target size of a merged segment, and the number of small neighbours that triggers a merge.
    compact_target_bytes: int = Field(limits.COMPACT_TARGET_BYTES, ge=1)
    compact_min_inputs: int = Field(limits.COMPACT_MIN_INPUTS, ge=2)
    #: Grace period in which readers of an older manifest may read replaced files.
    replaced_grace_ms: int = Field(limits.REPLACED_GRACE_MS, ge=0)
    #: Retention of delivered scheduled messages and ended half messages.
    system_retention_ms: int | None = Field(limits.SYSTEM_RETENTION_MS, ge=limits.RETENTION_MIN_MS)
    #: Age of the last snapshot, or number of events since, at which the next one is taken. A past
    #: state is read from a snapshot and the events after it.
    snapshot_every_ms: int = Field(limits.SNAPSHOT_EVERY_MS, ge=0)
    snapshot_events: int = Field(limits.SNAPSHOT_EVENTS, ge=1)
    #: Retention of snapshots and events; None: unlimited.
    history_retention_ms: int | None = Field(limits.HISTORY_RETENTION_MS, ge=0)
    #: Retention of earlier keyed states, for replays; the newest older state of a message group is
    #: retained, too. None: unlimited.
    state_retention_ms: int | None = Field(None, ge=0)
    #: URL of an OpenTelemetry collector that metrics are pushed to by OTLP over HTTP (None: none),
    #: and the interval. It needs the extra otel.
    otlp_endpoint: str | None = Field(None, pattern=r"^https?://[^/\s]+\S*$")
    otlp_interval_s: float = Field(60.0, ge=1.0, le=3600.0)
    #: Address of a trace, with {trace_id} in it, for links of the web page and `rmq trace`. Only
    #: characters of URLs, without quotes: it stands in HTML.
    trace_url: str | None = Field(
        None,
        max_length=500,
        pattern=rf"^https?://[A-Za-z0-9.:\[\]-]+/{_OF_URLS}*\{{trace_id\}}{_OF_URLS}*$",
    )
    #: Maximum number of clients connected to the gRPC endpoint, and of their receives under way.
    grpc_clients: int = Field(limits.GRPC_CLIENTS, ge=1)
    grpc_receives: int = Field(limits.GRPC_RECEIVES, ge=1)
    #: Maximum number of its other calls under way, and of the bytes of their requests; a single
    #: request may be larger.
    grpc_calls: int = Field(limits.GRPC_CALLS, ge=1)
    grpc_request_bytes: int = Field(limits.GRPC_REQUESTS_BYTES, ge=limits.MIB)
    #: Local times that gRPC clients may sign as UTC, in minutes ahead of UTC: 0 is UTC, 480 is
    #: Shanghai; None: every offset in use (docs/access.md).
    grpc_utc_offsets_min: tuple[Annotated[int, Field(ge=-720, le=840)], ...] | None = Field(
        None, min_length=1
    )
    #: True: the gRPC endpoint stores a message's born host as the property __BORNHOST.
    grpc_born_hosts: bool = False
    #: True: the gRPC endpoint creates unknown consumer groups that a client names.
    grpc_create_groups: bool = True

    def log_gather_s(self) -> float:
        """Return how long a frame waits for further requests, in seconds."""
        return _chosen(self.log_gather_ms, 10 if is_bucket(self.log_store) else 0) / 1000

    def log_poll_s(self) -> float:
        """Return the pause of a standby between two looks for frames, in seconds."""
        return _chosen(self.log_poll_ms, 200 if is_bucket(self.log_store) else 50) / 1000

    @field_serializer("archive_root", "otlp_endpoint")
    def _without_secrets(self, address: str | None) -> str | None:
        return None if address is None else shown(address)
