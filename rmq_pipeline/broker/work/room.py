"""Free space on the disk: drawing on the log's reserve."""

from pathlib import Path

from rmq_pipeline.broker.work.home import Home
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.log_file import FULL
from rmq_pipeline.store.reserve import Reserve


def part_of(reserve_bytes: int) -> int:
    """Return the bytes of a reserve to release at a time."""
    return max(1, reserve_bytes // 8)


def give_up_reserve(folder: Path, reserve_bytes: int) -> None:
    """Release a part of the reserve before the log is open.

    Raises:
        StoreFullError: nothing of the reserve is left.
    """
    reserve = Reserve(folder, wanted_bytes=reserve_bytes)
    try:
        reserve.draw(part_of(reserve_bytes))
    finally:
        reserve.close()


def note_open(home: Home, settings: Settings) -> None:
    """Mark a home as open; on a full disk, release parts of the reserve for that."""
    while True:
        try:
            home.note_open()
        except OSError as error:
            if error.errno not in FULL:
                raise
            give_up_reserve(home.log, settings.reserve_bytes)
        else:
            return
