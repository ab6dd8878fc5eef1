"""Every limit of the broker, in one table (semantics §1.2, design §4)."""

MIB = 1024 * 1024

BODY_BYTES = 4 * MIB
BATCH_BYTES = 256 * MIB
BATCH_ROWS = 1_000_000
#: Of messages that one frame delivers at their time, commits, buries or gives up: what the broker
#: holds of them in memory, too. One message at least.
STEP_BYTES = 64 * MIB
PROPERTY_COUNT = 128
PROPERTY_BYTES = 16 * 1024
TOPIC_NAME_LENGTH = 127
SYSTEM_TOPIC_NAME_LENGTH = 255
GROUP_NAME_LENGTH = 120
MESSAGE_GROUP_BYTES = 63
QUEUES = 1024
#: Lite topics that one client may have, and the length of the id it is known by.
LITE_TOPICS_PER_CLIENT = 2000
CLIENT_ID_LENGTH = 255
#: Members of a consumer group, topics of a member, and bytes of what it says of itself, as JSON.
GROUP_MEMBERS = 10_000
MEMBER_TOPICS = 1000
MEMBER_DETAILS_BYTES = 64 * 1024
#: A member is gone after this time without a heartbeat, and so soon after its waiting call was cut
#: off, unless it has called again.
MEMBER_TIMEOUT_MS = 120_000
MEMBER_CUT_OFF_MS = 2_000
#: A queue is locked for so long, unless its client says otherwise.
QUEUE_LOCK_MS = 60_000
QUEUE_LOCK_MAX_MS = 3_600_000
#: Bytes of bodies that one pull gives, unless it says otherwise; one message at least.
PULL_BYTES = 4 * MIB
INVISIBLE_MIN_MS = 1
INVISIBLE_MAX_MS = 12 * 3600 * 1000
RECEIVE_ROWS = 100_000
#: Characters of a filter expression, and how deep its brackets go.
FILTER_LENGTH = 8192
FILTER_DEPTH = 64
POLL_MAX_MS = 60_000
DELAY_MAX_MS = 365 * 24 * 3600 * 1000
MAX_ATTEMPTS = 1000
#: How long a group remembers the idempotency keys of its effects, unless it says otherwise.
IDEMPOTENCY_WINDOW_MS = 24 * 3600 * 1000
IDEMPOTENCY_WINDOW_MAX_MS = 366 * 24 * 3600 * 1000
IDEMPOTENCY_KEY_LENGTH = 255
#: Dead letters of one call of redrive, and characters of its id.
REDRIVE_ROWS = 100_000
REDRIVE_ID_LENGTH = 127
#: Files that one replacement in a sink adds or removes, and characters of its id.
REPLACED_FILES = 100_000
REPLACEMENT_ID_LENGTH = 255
#: For how long a sink's history names the files that were replaced.
SINK_HISTORY_MS = 30 * 24 * 3600 * 1000
#: Characters that are kept of why a delivery failed.
REASON_LENGTH = 4000
#: Deliveries per second that a group may be limited to.
MIN_RATE_PER_S = 0.001
MAX_RATE_PER_S = 10_000_000
WINDOW_MAX_MS = 12 * 3600 * 1000
#: A half message is not asked about before this; its own immunity is an hour at most.
TRANSACTION_IMMUNITY_MS = 6_000
TRANSACTION_IMMUNITY_MAX_MS = 3_600_000
TRANSACTION_CHECK_INTERVAL_MS = 30_000
TRANSACTION_CHECKS = 15
#: An end that is asked for again within this time is answered as the first one was; after it, and
#: with another transaction, the broker does not know it any more.
TRANSACTION_REMEMBERED_MS = 7 * 24 * 3600 * 1000
#: A producer that asked for checks within this time is there to be asked.
PRODUCER_LIVE_MS = 60_000

#: Delay levels 1..18 in ms (semantics §4.1).
DELAY_LEVELS_MS = tuple(
    1000 * s
    for s in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
#: Delay levels that a broker may be given instead.
DELAY_LEVELS = 64
#: How long a message is remembered whose repetition is not to be stored.
DEDUPLICATE_WINDOW_MS = 10 * 60 * 1000
DEDUPLICATE_WINDOW_MAX_MS = 24 * 3600 * 1000
#: Backoff of a group that names none: the third to the last delay level (semantics §8).
BACKOFF_MS = DELAY_LEVELS_MS[2:]
#: Exponential backoff that says no more than that it is (semantics §8).
BACKOFF_INITIAL_MS = 5_000
BACKOFF_MAX_MS = 7_200_000
BACKOFF_MULTIPLIER = 2
#: An exponential backoff grows no further after this many failures.
BACKOFF_GROWTHS = 32
#: First delivery and 16 retries.
DEFAULT_MAX_ATTEMPTS = 17
DEFAULT_QUEUES = 8

#: A topic keeps its messages at least so long, or so many bytes of segments.
RETENTION_MIN_MS = 1000
RETENTION_MIN_BYTES = 1
#: Either of them is a column of 64 bits, and is added to times.
RETENTION_MAX = 1 << 62
#: Delivered scheduled messages and ended half messages go after this.
SYSTEM_RETENTION_MS = 72 * 3600 * 1000
#: Small segments become one of about this size, when there are so many of them.
COMPACT_TARGET_BYTES = 128 * MIB
COMPACT_MIN_INPUTS = 8
#: More than this at a time is for Spark.
COMPACT_SPARK_BYTES = 1024 * MIB
#: How long a replaced or expired segment may still be read by those who have an older manifest.
REPLACED_GRACE_MS = 10 * 60 * 1000
#: Messages that one search gives at most.
FIND_ROWS = 100_000

#: Clients that are connected to the gRPC door at a time, and their receives under way.
GRPC_CLIENTS = 10_000
GRPC_RECEIVES = 10_000
#: Its other calls under way, and the bytes of their requests together.
GRPC_CALLS = 10_000
GRPC_REQUESTS_BYTES = 256 * MIB
#: One request at the gRPC door: as much as RocketMQ's proxy takes.
GRPC_REQUEST_BYTES = 130 * MIB
#: One that sends no messages, and one that may wait long for its answer.
GRPC_OTHER_BYTES = 4 * MIB
GRPC_RECEIVE_BYTES = 128 * 1024

LOG_FILE_BYTES = 256 * MIB
RESERVE_BYTES = 256 * MIB
DISPATCH_BEHIND_BYTES = 1024 * MIB
ASYNC_SYNC_MS = 500
QUERY_TIMEOUT_S = 30.0
QUERY_TIMEOUT_MAX_S = 24 * 3600
FALLBACK_OVERDUE_MS = 60_000
SNAPSHOT_EVERY_MS = 3_600_000
SNAPSHOT_EVENTS = 500_000
HISTORY_RETENTION_MS = 7 * 24 * 3600 * 1000
