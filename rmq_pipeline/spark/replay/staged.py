"""Files that a replay writes into sinks: what they are called, and what deletes them.

Their names begin with ``replay-`` and the replay's label, so that a window of the consumer, which
sweeps what other windows have left, passes over them, and the same replay finds those of its dead
attempts.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

HOUR_MS: Final = 3_600_000


def prefix(label: str) -> str:
    """What the names of a replay's files begin with."""
    return f"replay-{label}"


def delete(folder: Path, files: pa.Table) -> None:
    """Delete staged files."""
    for path in files["path"].to_pylist():
        (folder / path).unlink(missing_ok=True)


def sweep(folder: Path, *, label: str, counting: Iterable[str]) -> list[str]:
    """Delete what dead attempts of the same replay have left.

    Args:
        folder: of the sink.
        label: of the replay.
        counting: paths that stay.

    Returns:
        The paths deleted.
    """
    named = set(counting)
    left = [
        path
        for path in folder.glob(f"hour=*/{prefix(label)}-*.parquet")
        if str(path.relative_to(folder)) not in named
    ]
    for path in left:
        path.unlink(missing_ok=True)
    return [str(path.relative_to(folder)) for path in left]


def hours(from_ms: int, to_ms: int) -> list[str]:
    """The partitions of [from_ms, to_ms), which begins and ends with an hour.

    Raises:
        ValueError: it does not.
    """
    if from_ms % HOUR_MS or to_ms % HOUR_MS or from_ms >= to_ms:
        raise ValueError(f"[{from_ms}, {to_ms}) are no whole hours.")
    return [str(np.datetime64(h, "h")) for h in range(from_ms // HOUR_MS, to_ms // HOUR_MS)]
