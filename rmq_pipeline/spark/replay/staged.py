"""Files that a replay stages in sinks: their names, and their deletion.

The names begin with ``replay-`` and the replay's label. A consumer's window, which deletes stale
files of other windows, skips them. A repeated replay finds the files of its dead attempts.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline.lake.paths import within

HOUR_MS: Final = 3_600_000


def prefix(label: str) -> str:
    """Return the prefix of a replay's file names."""
    return f"replay-{label}"


def delete(folder: Path, files: pa.Table) -> None:
    """Delete staged files."""
    for path in files["path"].to_pylist():
        within(folder, path).unlink(missing_ok=True)


def sweep(folder: Path, *, label: str, counting: Iterable[str]) -> list[str]:
    """Delete files left by dead attempts of the same replay.

    Args:
        folder: folder of the sink.
        label: label of the replay.
        counting: paths to keep.

    Returns:
        The deleted paths.
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
    """Return the partitions of [from_ms, to_ms), which must be whole hours.

    Raises:
        ValueError: the range is not made of whole hours.
    """
    if from_ms % HOUR_MS or to_ms % HOUR_MS or from_ms >= to_ms:
        raise ValueError(f"[{from_ms}, {to_ms}) are no whole hours.")
    return [str(np.datetime64(h, "h")) for h in range(from_ms // HOUR_MS, to_ms // HOUR_MS)]
