"""A small file that records up to which position a commit log was synced.

The log alone cannot tell damage at its end from a torn write. The mark is written at intervals and
at close, after the log was synced up to it. The mark itself is not synced: after a power cut it may
be older, but never too new.

After the mark follows the position up to which a loss of frames was accepted, if any.
"""

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from rmq_pipeline.store.log.frame import crc32

NAME: Final = "synced"
_MAGIC: Final = b"RMQSYNC1"
_ACCEPTED: Final = b"RMQLOST1"
_MARK: Final = struct.Struct("<8sQQ")
_CRC: Final = struct.Struct("<I")
_SIZE: Final = _MARK.size + _CRC.size


class SyncedMark:
    """The mark of an open log. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._descriptor = -1
        self._seed = 0
        self._written = 0
        #: The operator has accepted that frames before this position are lost; 0 for none.
        self.accepted = 0

    def read(self, *, seed: int) -> int:
        """Return the position, 0 without a mark of this log. Call once, before ``write``.

        Args:
            seed: seed of the log's files.
        """
        self._seed = seed
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        data = os.pread(self._descriptor, 2 * _SIZE, 0)
        self._written = _position(data[:_SIZE], magic=_MAGIC, seed=seed)
        self.accepted = _position(data[_SIZE:], magic=_ACCEPTED, seed=seed)
        return self._written

    def write(self, position: int) -> None:
        """Record that the log before a position is on disk; a failed write keeps the older mark."""
        if position != self._written:
            with suppress(OSError):
                os.pwrite(self._descriptor, _packed(_MAGIC, seed=self._seed, position=position), 0)
                self._written = position

    def sync(self) -> None:
        """Sync the file.

        Raises:
            OSError: the sync failed.
        """
        os.fsync(self._descriptor)

    def accept(self, position: int) -> None:
        """Record that frames before a position are lost; synced when this returns.

        Raises:
            OSError: the write failed.
        """
        os.pwrite(self._descriptor, _packed(_ACCEPTED, seed=self._seed, position=position), _SIZE)
        os.fsync(self._descriptor)
        self.accepted = position

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _packed(magic: bytes, *, seed: int, position: int) -> bytes:
    data = _MARK.pack(magic, seed, position)
    return data + _CRC.pack(crc32(data))


def _position(data: bytes, *, magic: bytes, seed: int) -> int:
    """Decode the position of a record; 0 if it is missing, damaged, or from another log."""
    if len(data) < _SIZE or _CRC.unpack_from(data, _MARK.size) != (crc32(data[: _MARK.size]),):
        return 0
    found, of_seed, position = _MARK.unpack_from(data)
    return int(position) if (found, of_seed) == (magic, seed) else 0
