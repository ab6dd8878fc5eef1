"""The log as dispatch takes it in: small frames that follow each other as one table a kind.

By itself a frame of one message costs as much to decode, to put beside others and to let go of as
one of a thousand, and the interpreter is held for most of it: the writer waits meanwhile.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline.store import frame
from rmq_pipeline.store.commit_log import CommitLog, Section
from rmq_pipeline.store.frame import SmallFrames
from rmq_pipeline.store.log_file import LogFile

#: So much of the log is looked at for small frames at a time.
_WINDOW_BYTES: Final = 128 << 10
#: Frames beyond this length are read where they are.
_SMALL_BYTES: Final = 16 << 10
#: Columns that dispatch has no use for.
_UNREAD: Final = frozenset({"body"})


class Rows(NamedTuple):
    """Rows of one kind: of one section, or of several in the order of the log."""

    #: 1 messages, 2 events, 3 keyed state.
    kind: int
    #: Messages are without their bodies.
    batch: pa.RecordBatch
    #: Of each section its log position, and how many of the rows are its.
    positions: list[int]
    counts: list[int]


class Stretch(NamedTuple):
    """One frame, or small ones that follow each other."""

    #: The log position after it.
    end: int
    rows: list[Rows]


class Stretches:
    """Reads a log in stretches; for one thread."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._forms = {kind: _Form(of_kind) for kind, of_kind in log.schemas.items()}
        #: The file read last; one that was dropped is not kept on disk for this.
        self._last: weakref.ref[LogFile] | None = None

    def between(self, start: int, stop: int) -> Iterator[Stretch]:
        """What is in [start, stop), both of which are where frames start or the log ends.

        Raises:
            LookupError: ``start`` was dropped.
            CorruptLogError: a frame is damaged; names the place.
            StorageError: the log is closed, or has failed.
        """
        position, stop = start, min(stop, self._log.end)
        while position < stop:
            stretch = self._small(self._file_of(position), position, stop=stop)
            if stretch is None:
                end, sections = next(self._log.frames(position, stop))
                stretch = Stretch(end, [self._of(section) for section in sections])
            yield stretch
            position = stretch.end

    def _file_of(self, position: int) -> LogFile:
        """The file that has a position; of the one before it the mapped pages are let go of.

        They would add up to all of the log: a file by itself lets go of them only now and then.
        """
        file = self._log.file_of(position)
        last = self._last() if self._last is not None else None
        if last is not file:
            if last is not None:
                last.release()
            self._last = weakref.ref(file)
        return file

    def _of(self, section: Section) -> Rows:
        form = self._forms.get(section.kind)
        batch = section.batch if form is None else section.batch.select(form.names)
        return Rows(section.kind, batch, [section.position], [batch.num_rows])

    def _small(self, file: LogFile, position: int, *, stop: int) -> Stretch | None:
        """The small frames from a position on; None: there are no two, or something is wrong."""
        header = file.frame_at(position)
        if header is None or header.length > _SMALL_BYTES:
            return None
        data = file.copy(position, min(stop, position + _WINDOW_BYTES))
        found = frame.small_frames(data, position=position, longest=_SMALL_BYTES, seed=file.seed)
        if found.number < 2:
            return None
        try:
            return Stretch(found.end, list(self._decoded(found)))
        except pa.ArrowInvalid:  # whoever reads that frame by itself says where
            return None

    def _decoded(self, found: SmallFrames) -> Iterator[Rows]:
        for kind, sections in found.sections.items():
            form = self._forms.get(kind)
            if form is not None:
                yield from form.rows(kind, sections)
            else:
                for position, payload in sections:
                    batch = frame.decode(pa.py_buffer(payload), None)
                    yield self._of(Section(position, kind, batch))


class _Form:
    """How payloads without a schema are read as one stream, which begins with it."""

    def __init__(self, of_kind: pa.Schema) -> None:
        kept = [at for at, name in enumerate(of_kind.names) if name not in _UNREAD]
        self.names: Final = [of_kind.names[at] for at in kept]
        self._options = pa.ipc.IpcReadOptions(included_fields=kept, use_threads=False)
        self._head = of_kind.serialize().to_pybytes()

    def rows(self, kind: int, sections: Sequence[tuple[int, memoryview]]) -> Iterator[Rows]:
        """Those of sections, if there are any: position and payload of each.

        Raises:
            pa.ArrowInvalid: a payload is no batch of this schema.
        """
        stream = b"".join((self._head, *(payload for _, payload in sections)))
        with pa.ipc.open_stream(stream, options=self._options) as reader:
            table = reader.read_all()
        counts = list(map(len, table.column(0).chunks))
        if len(counts) != len(sections):
            raise pa.ArrowInvalid(f"{len(counts)} batches in {len(sections)} sections")
        positions = [position for position, _ in sections]
        for batch in table.combine_chunks().to_batches():  # which is one, or none
            yield Rows(kind, batch, positions, counts)
