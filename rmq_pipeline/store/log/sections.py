"""Sections of the commit log: decoding them from mapped files, and a cache of decoded ones."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.frame import SectionHeader
from rmq_pipeline.store.log.log_file import LogFile
from rmq_pipeline.tables import mended

_LOGGER = logging.getLogger(__name__)
#: Memory of the Python and Arrow objects of a decoded batch, independent of its size.
_OVERHEAD_BYTES: Final = 8192
#: After reading this much, release the mapped pages of all files; per file they would add up.
_MAPPED_BYTES: Final = 32 << 20
#: Bytes that the kernel maps around a touched page.
_FAULT_AROUND_BYTES: Final = 64 << 10


class Section(NamedTuple):
    """One Arrow record batch inside a frame."""

    #: Log position; together with a row number it identifies a message permanently.
    position: int
    #: 1 messages, 2 events, 3 keyed state.
    kind: int
    #: Zero copy over the mapped file.
    batch: pa.RecordBatch


class SectionReader:
    """Decodes sections and caches them. Thread-safe.

    Args:
        schemas: schemas of the kinds whose payloads omit the schema.
        kept_bytes: size of the cache of ``read``; the least recently used section is evicted first.
    """

    def __init__(self, schemas: Mapping[int, pa.Schema], *, kept_bytes: int) -> None:
        self._schemas = schemas
        #: False: all sections were validated before they were written.
        self.validates = True
        self._budget_bytes = kept_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Section, int]] = OrderedDict()
        #: Files read from, and the bytes read since their pages were released. Decoded batches are
        #: mapped, so a file may be read again at any time.
        self._mapped: set[LogFile] = set()
        self._mapped_bytes = 0

    def kept(self, position: int) -> Section | None:
        """Return the section at a position if it is cached, else None."""
        with self._lock:
            found = self._kept.get(position)
            if found is None:
                return None
            self._kept.move_to_end(position)
            return found[0]

    def read(self, file: LogFile, position: int) -> Section:
        """Return the section at a position of a file, and cache it.

        Raises:
            CorruptLogError: no sound section is there.
        """
        header = file.section_at(position)
        section = self._decode(file, header)
        cost = header.length + _OVERHEAD_BYTES
        with self._lock:
            _, before = self._kept.pop(position, (section, 0))
            self._kept[position] = (section, cost)
            self._used_bytes += cost - before
            while self._used_bytes > self._budget_bytes:
                self._used_bytes -= self._kept.popitem(last=False)[1][1]
        return section

    def frame(self, file: LogFile, position: int) -> tuple[int, list[Section]]:
        """Return the end of the frame at a position, and its sections; they are not cached.

        Raises:
            CorruptLogError: the frame is damaged.
        """
        end, headers = file.frame_sections(position)
        return end, [self._decode(file, header) for header in headers]

    def forget_before(self, position: int) -> None:
        """Evict the sections before a position, and unmap their files."""
        with self._lock:
            for old in [kept for kept in self._kept if kept < position]:
                self._used_bytes -= self._kept.pop(old)[1]
        self._mapped = {file for file in tuple(self._mapped) if file.base >= position}

    def _decode(self, file: LogFile, header: SectionHeader) -> Section:
        payload = file.payload(header)
        self._mapped.add(file)
        self._mapped_bytes += header.length + _FAULT_AROUND_BYTES
        if self._mapped_bytes > _MAPPED_BYTES:
            self._let_pages_go()
        try:
            batch = frame.decode(payload, file.schemas.get(header.kind))
        except pa.ArrowInvalid as error:
            raise file.damage(header.position, f"a section that is no Arrow ({error})") from error
        if self.validates:
            batch = _mended(batch, header)
        if (schema := self._schemas.get(header.kind)) is not None:
            batch = frame.completed(batch, schema)
        return Section(header.position, header.kind, batch)

    def _let_pages_go(self) -> None:
        self._mapped_bytes = 0
        for file in tuple(self._mapped):
            file.release()


def _mended(batch: pa.RecordBatch, header: SectionHeader) -> pa.RecordBatch:
    """Replace damaged values: older versions stored tables without validating them on send."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        whole = mended(batch)
        if whole is not batch:
            _LOGGER.warning("the section at %d has damaged values: %s", header.position, error)
        return whole
    return batch
