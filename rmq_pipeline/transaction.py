"""Transaction ids: which half message an end speaks of, as 32 hex digits.

Offset in the half topic, and the hash of the message id: an id of another broker's home never fits.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.errors import TransactionError, TransactionNotFoundError
from rmq_pipeline.message import Int64s, texts_of_bytes
from rmq_pipeline.tables import columns_of

#: What a checker gives, and what one is.
Answer: TypeAlias = pa.Table | pa.Array | pa.ChunkedArray | Sequence[str]
Checker: TypeAlias = Callable[[pa.Table], Answer]

#: How a transaction may be ended; the last one ends nothing.
COMMIT: Final = "commit"
ROLLBACK: Final = "rollback"
UNKNOWN: Final = "unknown"
RESOLUTIONS: Final = (COMMIT, ROLLBACK, UNKNOWN)
#: What became of a half message that nobody decided after the last check.
GIVEN_UP: Final = "given_up"

_WIDTH: Final = 32
_FORM: Final = f"^[0-9A-F]{{{_WIDTH}}}$"


def encode(queue_offset: Int64s, message_id_hash: Int64s) -> pa.StringArray:
    """The ids of half messages."""
    numbers = np.empty((len(queue_offset), 2), dtype=">i8")
    numbers[:, 0] = queue_offset
    numbers[:, 1] = message_id_hash
    return texts_of_bytes(numbers.view(np.uint8).reshape(len(numbers), 16))


def decode(ids: pa.Array) -> tuple[Int64s, Int64s]:
    """Offset and hash behind each id.

    Raises:
        TransactionNotFoundError: an id was not made by ``encode``.
    """
    sound = pc.fill_null(pc.match_substring_regex(ids, _FORM), False)
    if not pc.all(sound, min_count=0).as_py():
        row = pc.index(sound, False).as_py()
        raise TransactionNotFoundError(f"Row {row} is not a transaction id.")
    if not len(ids):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    start = np.frombuffer(ids.buffers()[1], np.int32)[ids.offset]
    digits = ids.buffers()[2].slice(start, len(ids) * _WIDTH).to_pybytes().decode()
    numbers = np.frombuffer(bytes.fromhex(digits), dtype=">i8").reshape(len(ids), 2)
    return numbers[:, 0].astype(np.int64), numbers[:, 1].astype(np.int64)


def codes(resolutions: pa.Array) -> Int64s:
    """The place of each in RESOLUTIONS.

    Raises:
        TransactionError: one is none of them.
    """
    found = pc.index_in(resolutions, value_set=pa.array(RESOLUTIONS))
    if found.null_count:
        row = pc.index(pc.is_null(found), True).as_py()
        raise TransactionError(
            f"Row {row}: {resolutions[row].as_py()!r} is none of {', '.join(RESOLUTIONS)}."
        )
    numbers: Int64s = found.to_numpy().astype(np.int64)
    return numbers


def answers(checks: pa.Table, said: Answer) -> pa.Table:
    """What a checker said of the half messages it was asked about, as schema.RESOLUTION.

    Args:
        checks: schema.CHECK.
        said: commit, rollback or unknown for each of them in order, or schema.RESOLUTION; one that
            a table leaves out stays open.

    Raises:
        TransactionError: it is none of these, or speaks of something else.
    """
    ids = checks.column("transaction_id")
    if isinstance(said, pa.Table):
        found = pa.Table.from_arrays(
            list(columns_of(said, schema.RESOLUTION).values()), schema=schema.RESOLUTION
        )
        if not pc.all(pc.is_in(found["transaction_id"], value_set=ids), min_count=0).as_py():
            raise TransactionError("The checker answers for a transaction it was not asked about.")
    else:
        resolutions = said if isinstance(said, pa.Array | pa.ChunkedArray) else _texts(said)
        if len(resolutions) != len(ids):
            raise TransactionError(
                f"The checker gives {len(resolutions)} answers to {len(ids)} questions."
            )
        found = pa.table([ids, resolutions.cast(pa.string())], schema=schema.RESOLUTION)
    codes(found["resolution"].combine_chunks())
    return found


def _texts(said: Sequence[str]) -> pa.Array:
    try:
        return pa.array(said, pa.string())
    except (pa.ArrowException, TypeError) as error:
        raise TransactionError(f"The checker's answer is no list of texts: {error}.") from error
