"""Sections decoded from log files; those read last are kept, within a budget of memory."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline.store import frame
from rmq_pipeline.store.frame import SectionHeader
from rmq_pipeline.store.log_file import LogFile

#: What the objects of one decoded batch take, whatever its size.
_OVERHEAD_BYTES: Final = 8192
#: After this much reading the mapped pages of all files are let go of: per file they would add up.
_MAPPED_BYTES: Final = 32 << 20
#: What the kernel maps around a page that is touched.
_FAULT_AROUND_BYTES: Final = 64 << 10


class Section(NamedTuple):
    """One Arrow record batch inside a frame."""

    #: Log position: the lasting name of these rows.
    position: int
    #: 1 messages, 2 events, 3 keyed state.
    kind: int
    #: Zero copy over the mapped file.
    batch: pa.RecordBatch


class SectionReader:
    """Decodes sections. For any thread.

    Args:
        schemas: of the kinds that leave theirs out.
        kept_bytes: how much to keep of what ``read`` gave; the one not read for longest goes first.
    """

    def __init__(self, schemas: Mapping[int, pa.Schema], *, kept_bytes: int) -> None:
        self._schemas = schemas
        self._budget_bytes = kept_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Section, int]] = OrderedDict()
        #: Files read from, and how much since their pages were let go of. What is decoded is read
        #: again later, so that no file is ever done with.
        self._mapped: set[LogFile] = set()
        self._mapped_bytes = 0

    def kept(self, position: int) -> Section | None:
        """The section at a position if it was kept."""
        with self._lock:
            found = self._kept.get(position)
            if found is None:
                return None
            self._kept.move_to_end(position)
            return found[0]

    def read(self, file: LogFile, position: int) -> Section:
        """The section at a position of a file; it is kept.

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
        """The end of the frame at a position of a file, and its sections; they are not kept.

        Raises:
            CorruptLogError: it is damaged.
        """
        end, headers = file.frame_sections(position)
        return end, [self._decode(file, header) for header in headers]

    def forget_before(self, position: int) -> None:
        """Let go of the sections before a position, and so of the files they keep mapped."""
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
            batch = frame.decode(payload, self._schemas.get(header.kind))
        except pa.ArrowInvalid as error:
            raise file.damage(header.position, f"a section that is no Arrow ({error})") from error
        return Section(header.position, header.kind, batch)

    def _let_pages_go(self) -> None:
        self._mapped_bytes = 0
        for file in tuple(self._mapped):
            file.release()
