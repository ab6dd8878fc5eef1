"""Effects outside the broker, done once per key: what was seen before, and what to remember.

``mark`` adds two columns to received messages; a handler carries out the effect of those that were
not seen before, and ``acks`` settles all of them, which remembers their keys.
"""

import hashlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema

logger = logging.getLogger(__name__)

#: A column of the message (message_id, message_group; of keys the first), else one of its
#: properties, or a function of the messages that gives a key, or null, for each.
Key = str | Callable[[pa.Table], pa.Array | pa.ChunkedArray]

COLUMNS: Final = ("message_id", "message_group", "keys", "tag")
SEEN_BEFORE: Final = pa.field("seen_before", pa.bool_())
IDEMPOTENCY_KEY: Final = pa.field("idempotency_key", pa.string())


class Memory(Protocol):
    """Who remembers: the client, or the broker itself."""

    def seen_before(self, group: str, keys: pa.Table) -> pa.Table:
        """schema.SEEN for schema.IDEMPOTENCY_KEY, row for row."""
        ...


def mark(
    memory: Memory,
    messages: pa.Table,
    *,
    group: str,
    key: Key,
    held: pa.Array | pa.ChunkedArray | None = None,
) -> pa.Table:
    """The messages with ``idempotency_key`` and ``seen_before``.

    Of several messages with one key the first is to carry out the effect; the others count as seen
    and have no key to remember, so that it is carried out later should the first one fail.

    Args:
        memory: the client.
        messages: as received.
        group: the consumer group, whose window counts.
        key: where a message's key comes from.
        held: keys of messages whose effect is being carried out elsewhere.
    """
    keys = keys_of(messages, key)
    seen = memory.seen_before(group, pa.table([keys], schema=schema.IDEMPOTENCY_KEY))
    known = seen.column("seen_at_ms").is_valid().to_numpy()
    busy = _repeated(keys)
    if held is not None and len(held):
        busy |= pc.and_kleene(keys.is_valid(), pc.is_in(keys, held)).to_numpy(zero_copy_only=False)
    remembered = pc.if_else(pa.array(busy & ~known), pa.scalar(None, pa.string()), keys)
    return messages.append_column(IDEMPOTENCY_KEY, remembered).append_column(
        SEEN_BEFORE, pa.array(known | busy)
    )


def acks(marked: pa.Table) -> pa.Table:
    """Outcomes that settle marked messages as done and remember their keys; schema.OUTCOME."""
    return pa.table(
        {
            "receipt_handle": marked.column("receipt_handle"),
            "outcome": pa.repeat("ack", marked.num_rows),
            "idempotency_key": marked.column("idempotency_key"),
        }
    )


def keys_of(messages: pa.Table, key: Key) -> pa.Array:
    """The key of each message; null for none. A long one is replaced by its digest.

    A function that raises is asked again for each message alone; one that raises then has no key.

    Raises:
        TypeError: the function gave no array of as many texts.
    """
    if callable(key):
        found = _called(messages, key)
    elif key in COLUMNS:
        found = messages.column(key)
        if key == "keys":
            found = pc.list_element(_padded(found), 0)
    else:
        found = pc.map_lookup(messages.column("properties"), pa.scalar(key), "first")
    return _short(_one_array(found.cast(pa.string())))


def _called(
    messages: pa.Table, key: Callable[[pa.Table], pa.Array | pa.ChunkedArray]
) -> pa.Array | pa.ChunkedArray:
    try:
        found = key(messages)
    except Exception:  # one message's fault must not stop the others
        if messages.num_rows == 1:
            logger.warning("a message has no idempotency key", exc_info=True)
            return pa.nulls(1, pa.string())
        single = [
            _one_array(_called(messages.slice(row, 1), key)) for row in range(messages.num_rows)
        ]
        return pa.concat_arrays([each.cast(pa.string()) for each in single])
    if not isinstance(found, pa.Array | pa.ChunkedArray) or len(found) != messages.num_rows:
        raise TypeError(f"The key function gave no array of {messages.num_rows} keys.")
    return found


def _padded(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Lists without an element as null, which has a first one: null."""
    return pc.if_else(pc.greater(pc.list_value_length(keys), 0), keys, pa.scalar(None, keys.type))


def _short(keys: pa.Array) -> pa.Array:
    lengths = pc.utf8_length(keys)
    keys = pc.if_else(pc.equal(lengths, 0), pa.scalar(None, pa.string()), keys)
    long = pc.fill_null(pc.greater(lengths, limits.IDEMPOTENCY_KEY_LENGTH), False)
    if not pc.any(long).as_py():
        return keys
    digests = [
        f"sha256:{hashlib.sha256(k.encode()).hexdigest()}" for k in keys.filter(long).to_pylist()
    ]
    return pc.replace_with_mask(keys, long, pa.array(digests, pa.string()))


def _repeated(keys: pa.Array) -> npt.NDArray[np.bool_]:
    """Which keys stand earlier in the array too."""
    codes = keys.dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
    _, firsts = np.unique(codes, return_index=True)
    repeated = np.ones(len(codes), dtype=np.bool_)
    repeated[firsts] = False
    repeated &= codes >= 0
    return repeated


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    return column
