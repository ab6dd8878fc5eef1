"""Idempotent effects outside the broker: each key's effect is carried out once.

``mark`` adds two columns to received messages. The handler carries out the effect of the messages
that were not seen before. ``acks`` settles all of them, which remembers their keys.
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

#: A column (message_id, message_group; of keys the first), else the name of a property. Or a
#: function of the messages that returns a key or null for each.
Key = str | Callable[[pa.Table], pa.Array | pa.ChunkedArray]

COLUMNS: Final = ("message_id", "message_group", "keys", "tag")
SEEN_BEFORE: Final = pa.field("seen_before", pa.bool_())
IDEMPOTENCY_KEY: Final = pa.field("idempotency_key", pa.string())


class Memory(Protocol):
    """The store of the keys: the client, or the broker itself."""

    def seen_before(self, group: str, keys: pa.Table) -> pa.Table:
        """Return schema.SEEN for schema.IDEMPOTENCY_KEY, row for row."""
        ...


def mark(
    memory: Memory,
    messages: pa.Table,
    *,
    group: str,
    key: Key,
    held: pa.Array | pa.ChunkedArray | None = None,
) -> pa.Table:
    """Return the messages with the columns ``idempotency_key`` and ``seen_before``.

    The first of several messages with one key carries out the effect. The others count as seen but
    have a null key, so that a later delivery carries out the effect if the first one fails.

    Args:
        memory: the client.
        messages: as received.
        group: the consumer group, whose idempotency window applies.
        key: source of a message's key.
        held: keys whose effects another worker is carrying out.
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
    """Return schema.OUTCOME that acks marked messages and remembers their keys."""
    return pa.table(
        {
            "receipt_handle": marked.column("receipt_handle"),
            "outcome": pa.repeat("ack", marked.num_rows),
            "idempotency_key": marked.column("idempotency_key"),
        }
    )


def keys_of(messages: pa.Table, key: Key) -> pa.Array:
    """Return the key of each message, or null; a long key is replaced by its digest.

    If a key function raises, it is called again for each message alone. A message for which it
    raises again has no key.

    Raises:
        TypeError: the function returned no array with a text per message.
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
            logger.warning(
                "the key function failed; a message has no idempotency key", exc_info=True
            )
            return pa.nulls(1, pa.string())
        single = [
            _one_array(_called(messages.slice(row, 1), key)) for row in range(messages.num_rows)
        ]
        return pa.concat_arrays([each.cast(pa.string()) for each in single])
    if not isinstance(found, pa.Array | pa.ChunkedArray) or len(found) != messages.num_rows:
        raise TypeError(f"The key function must return an array of {messages.num_rows} keys.")
    return found


def _padded(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Replace empty lists by null, of which ``list_element`` returns null."""
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
    """Return True for each key that also occurs earlier in the array."""
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
