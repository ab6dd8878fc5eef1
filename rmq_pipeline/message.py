"""Identity of messages: hashes, the choice of a queue, message ids."""

import functools
import os
import threading
import time
import uuid
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

#: The two hex digits of each byte, as they lie in memory.
_HEX: Final = np.frombuffer(bytes(range(256)).hex().upper().encode(), dtype=np.uint16)
_EPOCH_2021_S: Final = 1_609_459_200
#: An odd number without structure: the base of ``hash64``'s polynomial.
_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_MAX_POWERS: Final = 4096
#: Texts are hashed column by column if their length times this is at most their number.
_SHORT_SHARE: Final = 8
#: Texts that, padded to the longest, take up to this many bytes are hashed in one multiplication.
_PADDED_BYTES: Final = 32 * 1024
#: The largest byte of a text whose UTF-16 code units equal its bytes.
_ASCII: Final = 127
#: Slots of the cache of seeds and buckets, for each number of buckets.
_SEEDS: Final = 1 << 16
#: Bit of a filled cache slot.
_KNOWN: Final = np.uint64(1 << 31)


def _powers(base: int, dtype: type[np.unsignedinteger]) -> np.ndarray:
    bits = np.iinfo(dtype).bits
    powers = [1]
    for _ in range(_MAX_POWERS - 1):
        powers.append(powers[-1] * base % (1 << bits))
    return np.array(powers, dtype=dtype)


_POWERS_64: Final = _powers(_MULTIPLIER, np.uint64)
_POWERS_31: Final = _powers(31, np.uint32)
_POWERS_BOTH: Final = np.stack([_POWERS_64, _POWERS_31.astype(np.uint64)], axis=1)


def offsets_of(values: pa.Array) -> Int32s:
    """Return the start of each text or body in the data buffer, and the end of the last one.

    Args:
        values: at least one, of type string or binary. A caller's table may have an offsets buffer
            with extra bytes, even a fraction of an offset.
    """
    at = values.offset * np.dtype(np.int32).itemsize
    return np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, at)


def _bytes_of(texts: pa.StringArray) -> tuple[np.ndarray, Int64s, Int64s]:
    """Return the UTF-8 bytes of non-null texts, with the start and length of each."""
    buffers = texts.buffers()
    offsets = offsets_of(texts)
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    data = np.frombuffer(buffers[2], dtype=np.uint8) if buffers[2] else np.zeros(0, np.uint8)
    data = data[starts[0] : offsets[-1]] if len(starts) else data
    return data, starts - (starts[0] if len(starts) else 0), lengths


def _polynomial(
    data: np.ndarray, starts: Int64s, *, lengths: Int64s, powers: np.ndarray
) -> np.ndarray:
    """Return for each text the sum of byte × base^(distance from its end), in the powers' width."""
    sums = np.zeros(len(lengths), dtype=powers.dtype)
    longest = int(lengths.max(initial=0))
    if not longest:
        return sums
    if longest * _SHORT_SHARE <= len(lengths):
        if longest * len(lengths) <= _PADDED_BYTES:
            return _by_rows(data, lengths, powers=powers[:longest])
        return _by_columns(data, starts, lengths=lengths, base=powers[1])
    filled = lengths > 0
    ends = np.repeat(starts + lengths, lengths)
    distance = ends - 1 - np.arange(len(data))
    terms = data.astype(powers.dtype) * powers[distance % _MAX_POWERS]
    sums[filled] = np.add.reduceat(terms, starts[filled])
    return sums


def _by_rows(data: np.ndarray, lengths: Int64s, *, powers: np.ndarray) -> np.ndarray:
    """Compute ``_polynomial`` of texts padded in front with zeros, which add nothing."""
    letters = np.zeros((len(lengths), len(powers)), dtype=powers.dtype)
    letters[np.arange(len(powers)) >= (len(powers) - lengths)[:, np.newaxis]] = data
    sums: np.ndarray = letters @ powers[::-1]
    return sums


def _by_columns(
    data: np.ndarray, starts: Int64s, *, lengths: Int64s, base: np.unsignedinteger
) -> np.ndarray:
    """Compute ``_polynomial`` by Horner's rule: the first bytes of all texts, then the second."""
    sums = data[np.minimum(starts, len(data) - 1)].astype(base.dtype)
    sums[lengths == 0] = 0
    shortest = int(lengths.min())
    for at in range(1, int(lengths.max())):
        if at < shortest:
            sums *= base
            sums += data[starts + at]
        else:
            rows = np.flatnonzero(lengths > at)
            sums[rows] = sums[rows] * base + data[starts[rows] + at]
    return sums


def hash64(texts: pa.Array) -> Int64s:
    """Return a 64-bit hash for each text; 0 for null only.

    Two message groups with the same hash are treated as one, which costs concurrency and never
    order. With a million groups the probability is 1 in 30 million.
    """
    if len(texts) == 0 or texts.null_count == len(texts):
        return np.zeros(len(texts), dtype=np.int64)
    if len(texts) == 1:
        return np.array([_hash64_of(texts[0].as_py())], dtype=np.int64)
    if not texts.null_count:
        return _hash64_of_all(texts)
    encoded = texts.dictionary_encode()
    hashes = _hash64_of_all(encoded.dictionary)
    codes = encoded.indices.fill_null(len(hashes)).to_numpy(zero_copy_only=False)
    spread: Int64s = np.append(hashes, np.int64(0))[codes]
    return spread


@functools.lru_cache(maxsize=65_536)
def _hash64_of(text: str) -> int:
    return int(_hash64_of_all(pa.array([text], pa.string()))[0])


def _hash64_of_all(texts: pa.StringArray) -> Int64s:
    data, starts, lengths = _bytes_of(texts)
    return _mixed(_polynomial(data, starts, lengths=lengths, powers=_POWERS_64), lengths)


def _mixed(polynomials: npt.NDArray[np.uint64], lengths: Int64s) -> Int64s:
    with np.errstate(over="ignore"):
        h = polynomials + lengths.view(np.uint64) * np.uint64(_MULTIPLIER)
        h ^= h >> np.uint64(30)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(27)
        h *= np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    h[h == 0] = 1
    hashes: Int64s = h.view(np.int64)
    return hashes


def java_string_hash(text: str) -> int:
    """Return Java's String.hashCode over UTF-16 code units, signed 32 bits (semantics §3.2)."""
    h = 0
    units = text.encode("utf-16-le")
    for i in range(0, len(units), 2):
        h = (31 * h + units[i] + (units[i + 1] << 8)) & 0xFFFFFFFF
    return h - (1 << 32) if h >= 1 << 31 else h


def _java_string_hashes(texts: pa.StringArray) -> Int64s:
    data, starts, lengths = _bytes_of(texts)
    if len(data) and data.max() > _ASCII:
        encoded = texts.dictionary_encode()
        hashes = [java_string_hash(text) for text in encoded.dictionary.to_pylist()]
        spread: Int64s = np.array(hashes, dtype=np.int64)[encoded.indices.to_numpy()]
        return spread
    with np.errstate(over="ignore"):
        sums = _polynomial(data, starts, lengths=lengths, powers=_POWERS_31)
    hashes_64: Int64s = sums.view(np.int32).astype(np.int64)
    return hashes_64


def consistent_hash(seeds: Int64s, buckets: int) -> Int32s:
    """Return the bucket of each seed, as RocketMQ's proxy chooses a queue (semantics §3.2).

    Growing the number of buckets from n to m moves about (m - n) / m of the seeds.
    """
    chosen = np.zeros(len(seeds), dtype=np.int32)
    active = np.arange(len(seeds))
    state = seeds.astype(np.int64).view(np.uint64).copy()
    candidate = np.zeros(len(seeds))
    while len(active):
        state *= np.uint64(2862933555777941757)
        state += np.uint64(1)
        # Java increments an int here: the largest one overflows, and the search ends.
        x = ((state >> np.uint64(33)) + np.uint64(1)).astype(np.uint32).view(np.int32)
        following = (candidate + 1) * float(1 << 31) / x
        moves = (following >= 0) & (following < buckets)
        active, state = active[moves], state[moves]
        candidate = np.trunc(following[moves])
        chosen[active] = candidate
    return chosen


@functools.lru_cache(maxsize=8)
def _remembered(buckets: int) -> npt.NDArray[np.uint64]:
    """Return a cache of seeds and buckets: 32 bits of seed, ``_KNOWN``, 31 bits of bucket."""
    del buckets  # the cache's key
    return np.zeros(_SEEDS, dtype=np.uint64)


def _bucket_of(seeds: Int64s, buckets: int) -> Int32s:
    """Return ``consistent_hash`` of 32-bit seeds, most of which are in the cache."""
    known = _remembered(buckets)
    high = seeds.view(np.uint64) << np.uint64(32)
    places = seeds & (_SEEDS - 1)
    # Seed and bucket share one number, so that no thread reads a half-written slot.
    found = known[places]
    chosen: Int32s = (found & np.uint64(0x7FFFFFFF)).astype(np.int32)
    new = np.flatnonzero((found & ~np.uint64(0x7FFFFFFF)) != (high | _KNOWN))
    if len(new):
        chosen[new] = consistent_hash(seeds[new], buckets)
        known[places[new]] = high[new] | _KNOWN | chosen[new].astype(np.uint64)
    return chosen


@functools.lru_cache(maxsize=65_536)
def _queue_of_group(message_group: str, queues: int) -> int:
    seed = np.array([java_string_hash(message_group)], dtype=np.int64)
    return int(consistent_hash(seed, queues)[0])


def queue_of_groups(message_groups: pa.StringArray, queues: int) -> Int32s:
    """Return the queue of each message group among ``queues``."""
    if len(message_groups) == 1:
        return np.array([_queue_of_group(message_groups[0].as_py(), queues)], dtype=np.int32)
    return _bucket_of(_java_string_hashes(message_groups), queues)


def hashes_and_queues(message_groups: pa.StringArray, queues: int) -> tuple[Int64s, Int32s]:
    """Return ``hash64`` and ``queue_of_groups`` of non-null message groups, in one pass."""
    data, _, lengths = _bytes_of(message_groups)
    n, longest = len(lengths), int(lengths.max(initial=0))
    short = longest * _SHORT_SHARE <= n and longest * n <= _PADDED_BYTES
    if n == 1 or not short or not len(data) or data.max() > _ASCII:
        return hash64(message_groups), queue_of_groups(message_groups, queues)
    sums = _by_rows(data, lengths, powers=_POWERS_BOTH[:longest])
    seeds = sums[:, 1].astype(np.uint32).view(np.int32).astype(np.int64)
    return _mixed(sums[:, 0], lengths), _bucket_of(seeds, queues)


def texts_of_bytes(rows: npt.NDArray[np.uint8]) -> pa.StringArray:
    """Return the upper-case hex of each row of an (n, width) byte array."""
    return _texts(np.take(_HEX, rows))


def _texts(digits: npt.NDArray[np.uint16]) -> pa.StringArray:
    """Return texts of equal length from an array with two hex digits per element."""
    n, width = digits.shape
    offsets = np.arange(0, (n + 1) * width * 2, width * 2, dtype=np.int32)
    return pa.StringArray.from_buffers(n, pa.py_buffer(offsets), pa.py_buffer(digits))


class MessageIds:
    """Generator of RocketMQ ids v1: 01, MAC, pid, seconds since 2021, counter; 34 hex digits."""

    def __init__(self) -> None:
        mac = uuid.getnode().to_bytes(6, "big")
        seconds = (int(time.time()) - _EPOCH_2021_S) & 0xFFFFFFFF
        prefix = b"\x01" + mac + (os.getpid() & 0xFFFF).to_bytes(2, "big")
        prefix += seconds.to_bytes(4, "big")
        self._prefix = np.take(_HEX, np.frombuffer(prefix, dtype=np.uint8))
        # Brokers of two containers may start in the same second with the same pid.
        self._counter = int.from_bytes(os.urandom(3), "big")
        self._lock = threading.Lock()

    def take(self, n: int) -> pa.StringArray:
        """Return ``n`` new ids."""
        with self._lock:
            first = self._counter
            self._counter += n
        digits = np.empty((n, 17), dtype=np.uint16)
        digits[:, :13] = self._prefix
        counters = np.arange(first, first + n, dtype=np.int64).astype(np.uint32).astype(">u4")
        digits[:, 13:] = np.take(_HEX, counters.view(np.uint8).reshape(n, 4))
        return _texts(digits)


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
