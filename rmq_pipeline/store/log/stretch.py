"""The log as dispatch reads it: adjacent small frames become one table per kind.

A single frame of one message costs as much to decode, combine and free as a frame of a thousand.
The interpreter lock is held for most of that time, and the writer waits.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.commit_log import CommitLog, Section
from rmq_pipeline.store.log.frame import SmallFrames
from rmq_pipeline.store.log.log_file import LogFile
from rmq_pipeline.tables import with_sound_texts

#: Bytes of the log searched for small frames at a time.
_WINDOW_BYTES: Final = 128 << 10
#: Longer frames are read in place.
_SMALL_BYTES: Final = 16 << 10
#: Columns that dispatch does not read.
_UNREAD: Final = frozenset({"body"})


class Rows(NamedTuple):
    """Rows of one kind from one section, or from several sections in log order."""

    #: 1 messages, 2 events, 3 keyed state.
    kind: int
    #: Messages are without their bodies.
    batch: pa.RecordBatch
    #: Log position and row count of each section.
    positions: list[int]
    counts: list[int]


class Stretch(NamedTuple):
    """One frame, or several adjacent small frames."""

    #: Log position after the last frame.
    end: int
    rows: list[Rows]

    def with_sound_texts(self) -> "Stretch":
        """Return the same rows with invalid UTF-8 replaced."""
        sound = [rows._replace(batch=with_sound_texts(rows.batch)) for rows in self.rows]
        return Stretch(self.end, sound)


class Stretches:
    """Reads a log in stretches; for one thread."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._forms = {kind: _Form(of_kind, of_kind) for kind, of_kind in log.schemas.items()}
        #: The same for the schemas of the last older file.
        self._older: tuple[Mapping[int, pa.Schema], dict[int, _Form]] = ({}, {})
        #: The file read last; the weak reference lets a dropped file be freed.
        self._last: weakref.ref[LogFile] | None = None

    def between(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield the stretches of [start, stop); both must be the start of a frame or the log's end.

        Raises:
            LookupError: ``start`` was dropped.
            CorruptLogError: a frame is damaged; the error names the place.
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

    def singly(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield the same rows frame by frame."""
        for end, sections in self._log.frames(start, stop):
            yield Stretch(end, [self._of(section) for section in sections])

    def _file_of(self, position: int) -> LogFile:
        """Return the file of a position; release the mapped pages of the previous file.

        Without the release, the resident pages of all files would add up.
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
        """Return the small frames from a position on; None if fewer than two, or one is damaged."""
        header = file.frame_at(position)
        if header is None or header.length > _SMALL_BYTES:
            return None
        data = file.copy(position, min(stop, position + _WINDOW_BYTES))
        found = frame.small_frames(data, position=position, longest=_SMALL_BYTES, seed=file.seed)
        if found.number < 2:
            return None
        try:
            return Stretch(found.end, list(self._decoded(found, self._forms_of(file))))
        except pa.ArrowInvalid:  # reading that frame by itself names the place
            return None

    def _forms_of(self, file: LogFile) -> dict[int, "_Form"]:
        if file.is_current:
            return self._forms
        if file.schemas is not self._older[0]:
            forms = {
                kind: _Form(written, self._log.schemas[kind])
                for kind, written in file.schemas.items()
            }
            self._older = (file.schemas, forms)
        return self._older[1]

    def _decoded(self, found: SmallFrames, forms: dict[int, "_Form"]) -> Iterator[Rows]:
        for kind, sections in found.sections.items():
            form = forms.get(kind)
            if form is not None:
                yield from form.rows(kind, sections, validate=self._log.validates)
            else:
                for position, payload in sections:
                    batch = frame.decode(pa.py_buffer(payload), None)
                    if self._log.validates:
                        batch.validate(full=True)
                    yield self._of(Section(position, kind, batch))


class _Form:
    """Reads payloads without a schema as one IPC stream, by prefixing the schema.

    Args:
        written: schema of the payloads.
        of_kind: schema of the rows: that one, or more columns.
    """

    def __init__(self, written: pa.Schema, of_kind: pa.Schema) -> None:
        kept = [at for at, name in enumerate(written.names) if name not in _UNREAD]
        self._schema = pa.schema([field for field in of_kind if field.name not in _UNREAD])
        self.names: Final = self._schema.names
        self._options = pa.ipc.IpcReadOptions(included_fields=kept, use_threads=False)
        self._head = written.serialize().to_pybytes()

    def rows(
        self, kind: int, sections: Sequence[tuple[int, memoryview]], *, validate: bool
    ) -> Iterator[Rows]:
        """Yield the rows of sections, given as (position, payload).

        Raises:
            pa.ArrowInvalid: a payload is not a batch of this schema.
        """
        stream = b"".join((self._head, *(payload for _, payload in sections)))
        with pa.ipc.open_stream(stream, options=self._options) as reader:
            table = reader.read_all()
        if validate:
            table.validate(full=True)
        counts = list(map(len, table.column(0).chunks))
        if len(counts) != len(sections):
            raise pa.ArrowInvalid(f"{len(counts)} batches in {len(sections)} sections")
        positions = [position for position, _ in sections]
        for batch in table.combine_chunks().to_batches():  # one batch, or none
            yield Rows(kind, frame.completed(batch, self._schema), positions, counts)
