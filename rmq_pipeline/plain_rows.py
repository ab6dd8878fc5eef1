"""Fast checks for the few rows of a small send: plain rows are valid without a closer look.

A check by column takes about the same time for one row as for a hundred. For a few rows, checking
the values takes a tenth of it. Rows that are not plain may be valid; admission.py decides.
"""

import re
import struct
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import limits

#: Up to this many rows the fast checks pay off.
FEW_ROWS: Final = 8
#: Property names that have a meaning for the system (semantics §1.3). TRACE_CONTEXT, __BORNHOST and
#: __transactionId__ are allowed: a client that republishes a message may keep them.
RESERVED: Final = frozenset(
    {
        "KEYS",
        "TAGS",
        "WAIT",
        "DELAY",
        "RETRY_TOPIC",
        "REAL_TOPIC",
        "REAL_QID",
        "TRAN_MSG",
        "PGROUP",
        "MIN_OFFSET",
        "MAX_OFFSET",
        "ORIGIN_MESSAGE_ID",
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        "MSG_REGION",
        "TRACE_ON",
        "UNIQ_KEY",
        "EXTEND_UNIQ_INFO",
        "CONSUME_START_TIME",
        "INNER_NUM",
        "INNER_BASE",
        "DUP_INFO",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "TRANSACTION_CHECK_TIMES",
        "INSTANCE_ID",
        "CORRELATION_ID",
        "REPLY_TO_CLIENT",
        "TTL",
        "ARRIVE_TIME",
        "PUSH_REPLY_TIME",
        "MSG_TYPE",
        "CLUSTER",
        "POP_CK",
        "POP_CK_OFFSET",
        "1ST_POP_TIME",
        "__SHARDINGKEY",
        "INNER_MULTI_DISPATCH",
        "INNER_MULTI_QUEUE_OFFSET",
        "TIMER_DELAY_SEC",
        "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS",
        "TIMER_OUT_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_DEL_UNIQKEY",
        "TIMER_DELAY_LEVEL",
        "BORN_TIMESTAMP",
        "DLQ_ORIGIN_TOPIC",
        "DLQ_ORIGIN_MESSAGE_ID",
        "__CRC32#",
    }
)
#: Printable ASCII without blanks; in a tag no bar. Property values without control characters.
_is_plain: Final = re.compile(r"[!-~]+").fullmatch
_is_plain_tag: Final = re.compile(r"[!-{}~]+").fullmatch
_is_plain_value: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f]*").fullmatch


def are_plain_rows(columns: dict[str, pa.Array]) -> bool:
    """Return True if all checked columns of schema.SEND are plain, hence valid."""
    if not _are_bodies(columns["body"]):
        return False
    try:
        tags, ids, keys, properties = (
            None if columns[name].null_count == len(columns[name]) else columns[name].to_pylist()
            for name in ("tag", "message_id", "keys", "properties")
        )
    except UnicodeDecodeError:
        return False
    if ids is not None and not all(id_ is None or _is_plain(id_) for id_ in ids):
        return False
    return _are_described(tags or (), keys or (), properties=properties or ())


def are_plain_names(names: pa.Array) -> bool:
    """Return True if no name is null and all are plain, hence valid as message groups."""
    try:
        return all(
            name is not None and len(name) <= limits.MESSAGE_GROUP_BYTES and _is_plain(name)
            for name in names.to_pylist()
        )
    except UnicodeDecodeError:
        return False


def broken_at(texts: pa.Array) -> int | None:
    """Return the first row of a flat column of texts that is not UTF-8; None if all are.

    Arrow checks 1,000 texts in 10 µs but does not say which is invalid, so bisect.
    """
    if _is_sound(texts):
        return None
    low, high = 0, len(texts)
    while high - low > 1:
        middle = (low + high) // 2
        if _is_sound(texts.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _is_sound(texts: pa.Array) -> bool:
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _are_bodies(bodies: pa.Array) -> bool:
    """Return True if no body is null and all have an allowed length; copies no body."""
    n = len(bodies)
    if bodies.null_count:
        return False
    bounds = struct.unpack_from(f"={n + 1}i", bodies.buffers()[1], 4 * bodies.offset)
    return all(0 < bounds[at + 1] - bounds[at] <= limits.BODY_BYTES for at in range(n))


def _are_described(tags: Any, keys: Any, *, properties: Any) -> bool:
    """Return True if tags, keys and properties are plain, and together within their limit."""
    letters = 0
    for tag in (tag for tag in tags if tag is not None):
        if not _is_plain_tag(tag):
            return False
        letters += len(tag)
    for key in (key for of_row in filter(None, keys) for key in of_row):
        if key is None or not _is_plain(key):
            return False
        letters += len(key)
    for of_row in filter(None, properties):
        if len(of_row) > limits.PROPERTY_COUNT:
            return False
        for name, value in of_row:
            if value is None or not _is_plain(name) or name in RESERVED:
                return False
            if not _is_plain_value(value):
                return False
            letters += len(name) + len(value)
    # A character takes at most four bytes.
    return 4 * letters <= limits.PROPERTY_BYTES
