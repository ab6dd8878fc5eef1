"""Properties that the broker adds to messages, with RocketMQ's names where it has one."""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.message import Int64s

#: The transaction in which a committed message was sent.
TRANSACTION_ID: Final = "__transactionId__"
#: The priority with which a message was sent, whatever its queue.
PRIORITY: Final = "__PRIORITY"


def with_properties(properties: pa.MapArray, added: dict[str, pa.Array]) -> pa.MapArray:
    """Set properties of all rows, one value per row; works by column, without a loop over rows."""
    properties = _without(_compact(properties), list(added))
    n, more = len(properties), len(added)
    counts = np.diff(properties.offsets.to_numpy()).astype(np.int64)
    own = int(counts.sum())
    stops = np.cumsum(counts + more)
    # Pick from the rows' own entries, followed by the added ones, name by name.
    pick: Int64s = np.empty(own + n * more, dtype=np.int64)
    is_own = np.ones(len(pick), dtype=np.bool_)
    for i in range(more):
        at = stops - more + i
        pick[at] = own + i * n + np.arange(n)
        is_own[at] = False
    pick[is_own] = np.arange(own)
    names = [pa.repeat(pa.scalar(name, pa.string()), n) for name in added]
    keys = pa.concat_arrays([properties.keys, *names]).take(pa.array(pick))
    items = pa.concat_arrays([properties.items, *added.values()]).take(pa.array(pick))
    offsets = np.concatenate(([0], stops)).astype(np.int32)
    return pa.MapArray.from_arrays(pa.array(offsets), keys, items)


def _compact(properties: pa.MapArray) -> pa.MapArray:
    """Return the same rows without unused entries: a slice's buffers hold those of its parent."""
    bounds = properties.offsets.to_numpy()
    counts = np.diff(bounds)
    if properties.null_count:
        counts[properties.is_null().to_numpy(zero_copy_only=False)] = 0
    if bounds[0] == 0 and int(counts.sum()) == len(properties.keys):
        return properties
    return properties.take(pa.array(np.arange(len(properties))))


def _without(properties: pa.MapArray, names: list[str]) -> pa.MapArray:
    """Remove properties by name: a republished message may have earlier values."""
    same = pc.is_in(properties.keys, value_set=pa.array(names, pa.string()))
    if not pc.any(same).as_py():
        return properties
    others = pc.invert(same)
    kept = np.concatenate(([0], np.cumsum(others.to_numpy(zero_copy_only=False))))
    offsets = pa.array(kept[properties.offsets.to_numpy()].astype(np.int32))
    keys, items = properties.keys.filter(others), properties.items.filter(others)
    return pa.MapArray.from_arrays(offsets, keys, items)
