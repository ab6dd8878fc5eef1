"""Whether the few rows of a small send are so plain that nothing can be wrong with them.

Looking at a column takes about the same for one row as for a hundred: of a few rows, looking at the
values takes a tenth of it. What is not plain is not wrong yet; admission.py looks into it.
"""

import re
import struct
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import limits

#: Up to this many rows it is worth it.
FEW_ROWS: Final = 8
#: Property names that the system gives a meaning (semantics §1.3). TRACE_CONTEXT and __BORNHOST are
#: not among them: whoever sends a message on may say where it came from.
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
        "__transactionId__",
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
#: ASCII letters, digits and signs; in a tag no bar. In a property's value no control characters.
_is_plain: Final = re.compile(r"[!-~]+").fullmatch
_is_plain_tag: Final = re.compile(r"[!-{}~]+").fullmatch
_is_plain_value: Final = re.compile(r"[^\x00-\x1f\x7f]*").fullmatch


def are_plain_rows(columns: dict[str, pa.Array]) -> bool:
    """Whether bodies, tags, ids, keys and properties of schema.SEND are surely allowed."""
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
    """Whether all are there, and surely allowed as names of message groups."""
    try:
        return all(
            name is not None and len(name) <= limits.MESSAGE_GROUP_BYTES and _is_plain(name)
            for name in names.to_pylist()
        )
    except UnicodeDecodeError:
        return False


def broken_at(texts: pa.Array) -> int | None:
    """The first row of a flat column of texts that is no UTF-8; None where there is none.

    Arrow checks 1,000 texts in 10 µs, but does not tell which is wrong: that is found by halves.
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
    """Whether all are there, and of a length that is allowed; no body is copied."""
    n = len(bodies)
    if bodies.null_count:
        return False
    bounds = struct.unpack_from(f"={n + 1}i", bodies.buffers()[1], 4 * bodies.offset)
    return all(0 < bounds[at + 1] - bounds[at] <= limits.BODY_BYTES for at in range(n))


def _are_described(tags: Any, keys: Any, *, properties: Any) -> bool:
    """The same for tags, lists of keys, and lists of properties; all together in their limit."""
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
    # No letter takes more than four bytes.
    return 4 * letters <= limits.PROPERTY_BYTES
