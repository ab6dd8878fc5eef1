"""Transaction ids: 32 hex digits that identify a half message.

An id is the offset in the half topic and the hash of the message id. The hash keeps an id of
another home from matching.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.errors import TransactionError, TransactionNotFoundError
from rmq_pipeline.message import Int64s, offsets_of, texts_of_bytes
from rmq_pipeline.tables import columns_of

#: The result of a checker, and the checker's type.
Answer: TypeAlias = pa.Table | pa.Array | pa.ChunkedArray | Sequence[str]
Checker: TypeAlias = Callable[[pa.Table], Answer]

#: Resolutions of a transaction; unknown leaves it open.
COMMIT: Final = "commit"
ROLLBACK: Final = "rollback"
UNKNOWN: Final = "unknown"
RESOLUTIONS: Final = (COMMIT, ROLLBACK, UNKNOWN)
#: Outcome of a half message that was unresolved after the last check.
GIVEN_UP: Final = "given_up"

_WIDTH: Final = 32
_FORM: Final = f"^[0-9A-F]{{{_WIDTH}}}$"


class Rollback(Exception):  # noqa: N818 a signal of the caller's, no fault
    """Raise it in the block of ``client.transaction`` to roll back and continue after the block."""


def encode(queue_offset: Int64s, message_id_hash: Int64s) -> pa.StringArray:
    """Return the ids of half messages."""
    numbers = np.empty((len(queue_offset), 2), dtype=">i8")
    numbers[:, 0] = queue_offset
    numbers[:, 1] = message_id_hash
    return texts_of_bytes(numbers.view(np.uint8).reshape(len(numbers), 16))


def decode(ids: pa.Array) -> tuple[Int64s, Int64s]:
    """Return the offset and the hash of each id.

    Raises:
        TransactionNotFoundError: an id was not made by ``encode``.
    """
    sound = pc.fill_null(pc.match_substring_regex(ids, _FORM), False)
    if not pc.all(sound, min_count=0).as_py():
        row = pc.index(sound, False).as_py()
        raise TransactionNotFoundError(f"Row {row} is not a transaction id.")
    if not len(ids):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    start = int(offsets_of(ids)[0])
    digits = ids.buffers()[2].slice(start, len(ids) * _WIDTH).to_pybytes().decode()
    numbers = np.frombuffer(bytes.fromhex(digits), dtype=">i8").reshape(len(ids), 2)
    return numbers[:, 0].astype(np.int64), numbers[:, 1].astype(np.int64)


def codes(resolutions: pa.Array) -> Int64s:
    """Return the index of each resolution in RESOLUTIONS.

    Raises:
        TransactionError: a value is none of them.
    """
    found = pc.index_in(resolutions, value_set=pa.array(RESOLUTIONS))
    if found.null_count:
        row = pc.index(pc.is_null(found), True).as_py()
        raise TransactionError(
            f"Row {row}: {resolutions[row].as_py()!r} is not one of {', '.join(RESOLUTIONS)}."
        )
    numbers: Int64s = found.to_numpy().astype(np.int64)
    return numbers


def answers(checks: pa.Table, said: Answer) -> pa.Table:
    """Return the answers of a checker as schema.RESOLUTION.

    Args:
        checks: schema.CHECK, the half messages it was asked about.
        said: commit, rollback or unknown for each of them in order, or schema.RESOLUTION; a
            transaction that the table leaves out stays open.

    Raises:
        TransactionError: an answer is none of these, or is for another transaction.
    """
    ids = checks.column("transaction_id")
    if isinstance(said, pa.Table):
        found = pa.Table.from_arrays(
            list(columns_of(said, schema.RESOLUTION).values()), schema=schema.RESOLUTION
        )
        if not pc.all(pc.is_in(found["transaction_id"], value_set=ids), min_count=0).as_py():
            raise TransactionError(
                "The checker answered for a transaction that was not in its table."
            )
    else:
        resolutions = said if isinstance(said, pa.Array | pa.ChunkedArray) else _texts(said)
        if len(resolutions) != len(ids):
            raise TransactionError(
                f"The checker returned {len(resolutions)} answers for {len(ids)} half messages."
            )
        found = pa.table([ids, resolutions.cast(pa.string())], schema=schema.RESOLUTION)
    codes(found["resolution"].combine_chunks())
    return found


def _texts(said: Sequence[str]) -> pa.Array:
    try:
        return pa.array(said, pa.string())
    except (pa.ArrowException, TypeError) as error:
        raise TransactionError(f"The checker's answer is not a list of texts: {error}.") from error
