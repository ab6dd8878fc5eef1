"""Every limit of the broker, in one table (semantics §1.2, design §4)."""

from dataclasses import dataclass

MIB = 1024 * 1024

BODY_BYTES = 4 * MIB
BATCH_BYTES = 256 * MIB
BATCH_ROWS = 1_000_000
#: Rows of any other table from outside, such as the outcomes and the state of a settle.
TABLE_ROWS = 4_000_000
#: Divisor of DuckDB's memory that limits one keyed state: 64 KiB by default. When DuckDB commits,
#: reads or checkpoints states, it holds the values of 2,048 rows in blocks of powers of two. With
#: this divisor they take at most three quarters of its memory.
STATES_IN_MEMORY = 2731
#: State, published messages and failures of one settle of a window; a frame may have 1 GiB.
SETTLE_BYTES = 768 * MIB
#: Bytes of messages that one frame delivers on schedule, commits or dead-letters; the broker holds
#: them in memory. A frame takes at least one message.
STEP_BYTES = 64 * MIB
PROPERTY_COUNT = 128
PROPERTY_BYTES = 16 * 1024
TOPIC_NAME_LENGTH = 127
SYSTEM_TOPIC_NAME_LENGTH = 255
GROUP_NAME_LENGTH = 120
MESSAGE_GROUP_BYTES = 63
QUEUES = 1024
#: Bytes of the file of a route table, its brokers, and the queues of one route.
ROUTE_FILE_BYTES = MIB
ROUTE_BROKERS = 256
ROUTE_QUEUES = 2048
#: Lite topics per client, and characters of a client id.
LITE_TOPICS_PER_CLIENT = 2000
CLIENT_ID_LENGTH = 255
#: Members of a consumer group, topics per member, and bytes of a member's details as JSON.
GROUP_MEMBERS = 10_000
MEMBER_TOPICS = 1000
MEMBER_DETAILS_BYTES = 64 * 1024
#: Messages per group that are suspected of having ended a member's process.
GROUP_SUSPECTS = 1000
#: A member counts as gone this long after its last heartbeat, and this long after its waiting call
#: was cut off, unless it calls again.
MEMBER_TIMEOUT_MS = 120_000
MEMBER_CUT_OFF_MS = 2_000
#: Default and maximum duration of a queue lock.
QUEUE_LOCK_MS = 60_000
QUEUE_LOCK_MAX_MS = 3_600_000
#: Default bytes of bodies that one pull returns; it returns at least one message.
PULL_BYTES = 4 * MIB
INVISIBLE_MIN_MS = 1
INVISIBLE_MAX_MS = 12 * 3600 * 1000
RECEIVE_ROWS = 100_000
#: Characters of a filter expression, and nesting depth of its parentheses.
FILTER_LENGTH = 8192
FILTER_DEPTH = 64
POLL_MAX_MS = 60_000
#: The end of the year 9999. Times in µs or ns, passed by mistake, lie beyond it.
TIME_MAX_MS = 253_402_300_799_999
DELAY_MAX_MS = 365 * 24 * 3600 * 1000
MAX_ATTEMPTS = 1000
#: Default and maximum time for which a group remembers idempotency keys; characters of a key.
IDEMPOTENCY_WINDOW_MS = 24 * 3600 * 1000
IDEMPOTENCY_WINDOW_MAX_MS = 366 * 24 * 3600 * 1000
IDEMPOTENCY_KEY_LENGTH = 255
#: Dead letters of one redrive call, and characters of its id.
REDRIVE_ROWS = 100_000
REDRIVE_ID_LENGTH = 127
#: Files that one replacement in a sink adds or removes, and characters of its id.
REPLACED_FILES = 100_000
REPLACEMENT_ID_LENGTH = 255
#: Time for which a sink's history lists replaced files.
SINK_HISTORY_MS = 30 * 24 * 3600 * 1000
#: Stored characters of a failure's reason and traceback.
REASON_LENGTH = 4000
TRACEBACK_LENGTH = 4000
#: Range of a group's rate limit, in deliveries per second.
MIN_RATE_PER_S = 0.001
MAX_RATE_PER_S = 10_000_000
WINDOW_MAX_MS = 12 * 3600 * 1000
#: Default and maximum time before the first check of a half message.
TRANSACTION_IMMUNITY_MS = 6_000
TRANSACTION_IMMUNITY_MAX_MS = 3_600_000
TRANSACTION_CHECK_INTERVAL_MS = 30_000
TRANSACTION_CHECKS = 15
#: Repeating the end of a transaction within this time returns the first answer. Afterwards the
#: broker no longer knows the transaction.
TRANSACTION_REMEMBERED_MS = 7 * 24 * 3600 * 1000
#: A producer counts as live this long after it last fetched checks.
PRODUCER_LIVE_MS = 60_000

#: Delays of the levels 1 to 18, in ms (semantics §4.1).
DELAY_LEVELS_MS = tuple(
    1000 * s
    for s in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
#: Maximum number of delay levels in a broker's settings.
DELAY_LEVELS = 64
#: Default and maximum deduplication window of a topic.
DEDUPLICATE_WINDOW_MS = 10 * 60 * 1000
DEDUPLICATE_WINDOW_MAX_MS = 24 * 3600 * 1000
#: Default backoff of a group: all delay levels, as RocketMQ tells its clients.
BACKOFF_MS = DELAY_LEVELS_MS
#: Default backoff until October 2026; groups declared before that keep it.
FORMER_BACKOFF_MS = DELAY_LEVELS_MS[2:]
#: Defaults of an exponential backoff (semantics §8).
BACKOFF_INITIAL_MS = 5_000
BACKOFF_MAX_MS = 7_200_000
BACKOFF_MULTIPLIER = 2
#: An exponential backoff stops growing after this many failures.
BACKOFF_GROWTHS = 32
#: First delivery and 16 retries.
DEFAULT_MAX_ATTEMPTS = 17
DEFAULT_QUEUES = 8

#: Minimum retention time, and minimum bytes of retained segments.
RETENTION_MIN_MS = 1000
RETENTION_MIN_BYTES = 1
#: Maximum of both; they are stored as int64 and added to times.
RETENTION_MAX = 1 << 62
#: Retention of delivered scheduled messages and ended half messages.
SYSTEM_RETENTION_MS = 72 * 3600 * 1000
#: Target size of a merged segment, and the number of small segments that triggers a merge.
COMPACT_TARGET_BYTES = 128 * MIB
COMPACT_MIN_INPUTS = 8
#: Larger merges are left to Spark.
COMPACT_SPARK_BYTES = 1024 * MIB
#: Grace period in which readers of an older manifest may read replaced or expired segments.
REPLACED_GRACE_MS = 10 * 60 * 1000
#: Messages that one search returns at most.
FIND_ROWS = 100_000
#: Bytes of bodies that one search returns at most; it returns at least one message.
FIND_BYTES = 64 * MIB

#: Clients connected to the gRPC endpoint, and their receives under way.
GRPC_CLIENTS = 10_000
GRPC_RECEIVES = 10_000
#: Other calls under way at the gRPC endpoint, and the total bytes of their requests.
GRPC_CALLS = 10_000
GRPC_REQUESTS_BYTES = 256 * MIB
#: Bytes of one request at the gRPC endpoint, as in RocketMQ's proxy.
GRPC_REQUEST_BYTES = 130 * MIB
#: Bytes of a request that sends no messages, and of one that may wait long for its answer.
GRPC_OTHER_BYTES = 4 * MIB
GRPC_RECEIVE_BYTES = 128 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """Limits of the queries of one database."""

    #: A result is held in memory outside DuckDB's limit.
    result_bytes: int = 256 * MIB
    #: Bytes that are copied to the process of a query that DuckDB may fail to interrupt, and the
    #: memory of that process beyond its memory at start.
    copy_bytes: int = 256 * MIB
    process_bytes: int = 1024 * MIB
    #: Messages whose bodies one query reads, and the bytes of these bodies.
    body_rows: int = 10_000
    body_bytes: int = 64 * MIB
    #: Time to wait for an interrupted query.
    stop_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightLimits:
    """Limits of one Flight endpoint."""

    #: Calls under way.
    calls: int = 16_384
    #: Bytes of one call's body, and of all bodies.
    call_bytes: int = 1280 * MIB
    calls_bytes: int = 1024 * MIB
    #: A call with an incomplete body is refused if nothing arrives for this long.
    silent_s: float = 10.0


#: Bytes of one gRPC message of a call, which arrives before it is counted; clients send slices.
FLIGHT_MESSAGE_BYTES = 4 * MIB
FLIGHT_SLICE_BYTES = 1 * MIB
#: Bytes of a call's verb and of its arguments that are not tables.
FLIGHT_COMMAND_BYTES = FLIGHT_MESSAGE_BYTES - 64 * 1024
#: Memory that the arguments of a call may take while it waits for messages.
FLIGHT_WAITING_BYTES = 4 * MIB
#: Characters of a statement of Flight SQL with its values; a ticket has at most four times as many
#: bytes. Time for which a ticket or a prepared statement is valid.
FLIGHT_SQL_CHARACTERS = 128 * 1024
FLIGHT_SQL_HANDLE_MS = 12 * 3600 * 1000
#: Bytes of all messages that bind parameters, and of another message of a foreign client. Decoding
#: may multiply such a message: an empty message in it takes 2 bytes, and about 50 in memory.
FLIGHT_SQL_PARAMETERS_BYTES = 2 * MIB
FLIGHT_SQL_MESSAGE_BYTES = 2 * MIB
FLIGHT_SQL_DECODED = 32
#: Target size of a record batch for foreign clients, of which some accept 4 MiB a message.
FLIGHT_SQL_PIECE_BYTES = 1 * MIB

LOG_FILE_BYTES = 256 * MIB
RESERVE_BYTES = 256 * MIB
DISPATCH_BEHIND_BYTES = 1024 * MIB
ASYNC_SYNC_MS = 500
QUERY_TIMEOUT_S = 30.0
QUERY_TIMEOUT_MAX_S = 24 * 3600
#: Unread messages up to which the matching lag of a tag filter is exact; above it, and for SQL92
#: filters, the lag is extrapolated from a sample of the second size.
LAG_COUNTED_ROWS = 10_000_000
LAG_JUDGED_ROWS = 16_384
FALLBACK_OVERDUE_MS = 60_000
SNAPSHOT_EVERY_MS = 3_600_000
SNAPSHOT_EVENTS = 500_000
HISTORY_RETENTION_MS = 7 * 24 * 3600 * 1000
