"""Classification of read errors: a damaged segment, or a device that fails at present.

Only a damaged segment is set aside and counts against its messages. A transient disk error says
nothing about the data.
"""

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from rmq_pipeline.archive.root import Root
from rmq_pipeline.archive.segment_file import open_segment
from rmq_pipeline.errors import CorruptLogError, StorageError


def read_failure(
    error: Exception, root: Root, *, path: str, read: Callable[[pq.ParquetFile], object]
) -> CorruptLogError | StorageError:
    """Return the error to raise: CorruptLogError if all bytes are readable but invalid.

    Arrow raises OSError for a damaged page as well as for a missing file, so the file is read
    again.

    Args:
        error: the error of the first attempt.
        read: repeats the read of the first attempt.
    """
    try:
        with root.open(path) as file:
            watched = _Watched(file)
            try:
                read(open_segment(pa.PythonFile(watched, mode="r")))
            except (OSError, pa.ArrowException):
                if not watched.failed:
                    return CorruptLogError(f"{path} is damaged: {error}.")
    except OSError:
        pass  # the first error is as good
    return StorageError(f"{path} cannot be read: {error}.")


class _Watched(io.RawIOBase):
    """File object that notes whether a read failed."""

    def __init__(self, file: pa.NativeFile) -> None:
        super().__init__()
        self._file = file
        self.failed = False

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        at: int = self._file.tell()
        return at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        at: int = self._noted(lambda: self._file.seek(offset, whence))
        return at

    @override
    def read(self, size: int = -1, /) -> bytes:
        data: bytes = self._noted(lambda: self._file.read(size if size >= 0 else None))
        return data

    def _noted(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except OSError:
            self.failed = True
            raise
