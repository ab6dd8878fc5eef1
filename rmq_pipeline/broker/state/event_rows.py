"""Events in memory, as the broker makes them and as replay reads them.

They form runs of one kind, time, group, topic, queue and client. The column ``epoch`` of stored
events has one of three numbers; a run has a field for each (docs/decisions/0103).
"""

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import CONSUMPTION, Kind
from rmq_pipeline.store.log.frame_builder import FilledForm

_NUMBERS: Final = tuple(
    (field.name, field.type.to_pandas_dtype())
    for field in schema.EVENT
    if field.type != pa.string()
)
#: The attribute of EventRows with the values of each number column.
_SOURCES: Final = tuple("stored_epoch" if name == "epoch" else name for name, _ in _NUMBERS)
_numbers_of: Final = operator.attrgetter(*_SOURCES)
#: Up to this number, the events of a frame are written into a cached form.
_FORM_ROWS: Final = 128
_RUN: Final = ("kind", "at_ms", "group_id", "topic_id", "queue_id")
#: Kinds whose texts name their subject: two at one time belong to different subjects.
_ALONE: Final = (Kind.WINDOW, Kind.WINDOW_CLOSED, Kind.SETTLED, Kind.LITE_SUBSCRIPTION)


def run_starts(values: npt.NDArray[np.generic]) -> npt.NDArray[np.intp]:
    """Return where each run of equal values begins."""
    if len(values) <= 1:
        return np.zeros(len(values), dtype=np.intp)
    return np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRows:
    """Run of n events with one kind, time, group, topic, queue and client; see store/events.py."""

    kind: Kind
    at_ms: int
    queue_offset: Int64s
    group_id: int = 0
    topic_id: int = 0
    queue_id: int = -1
    attempt: Int32s | int = 0
    visible_at_ms: Int64s | int = 0
    delivery: Int64s | int = 0
    epoch: Int64s | int = 0
    attempt_id_hash: Int64s | int = 0
    locked_at_ms: Int64s | int = 0
    message_group_hash: Int64s | int = 0
    client_id: str | None = None
    detail: str | Sequence[str | None] | None = None

    def __len__(self) -> int:
        return len(self.queue_offset)

    def column(self, name: str, dtype: type[np.signedinteger]) -> npt.NDArray[np.signedinteger]:
        """Return a column with n values."""
        value = getattr(self, name)
        if isinstance(value, np.ndarray):
            return value.astype(dtype, copy=False)
        return np.full(len(self), value, dtype=dtype)

    @property
    def stored_epoch(self) -> Int64s | int:
        """Value of the column ``epoch``; ``read_epoch`` is the inverse."""
        if self.kind == Kind.QUEUE_LOCKED:
            return self.locked_at_ms
        # One of them is 0: a receive has either a window or an attempt id.
        return self.epoch - self.attempt_id_hash

    @property
    def producer_group(self) -> str:
        """Producer group of half messages; its column is ``client_id``."""
        assert Kind.HALF <= self.kind <= Kind.HALF_GIVEN_UP, self.kind
        return self.client_id or ""

    @property
    def window_owner(self) -> str:
        """Owner of a window, empty if it stays the same; its column is ``client_id``."""
        assert self.kind in (Kind.WINDOW, Kind.WINDOW_CLOSED), self.kind
        return self.client_id or ""

    def text_bytes(self) -> int:
        """Return the size of the texts in bytes."""
        size = _bytes_of(self.client_id) * len(self)
        if self.detail is None or isinstance(self.detail, str):
            return size + _bytes_of(self.detail) * len(self)
        return size + sum(map(_bytes_of, self.detail))

    def detail_of(self, row: int) -> str:
        """Return the detail of one row; empty without one."""
        if self.detail is None or isinstance(self.detail, str):
            return self.detail or ""
        return self.detail[row] or ""


def _bytes_of(text: str | None) -> int:
    # Python knows whether a text is ASCII, as nearly all are; these need no encoding.
    if text is None or text.isascii():
        return len(text or "")
    return len(text.encode(errors="surrogatepass"))


def single(kind: Kind, at_ms: int, *, offset: int = -1, **columns: int | str | None) -> EventRows:
    """Return a run of one event."""
    row = np.array([offset])
    return EventRows(kind=kind, at_ms=at_ms, queue_offset=row, **columns)  # type: ignore[arg-type]


def to_batch(events: Sequence[EventRows]) -> pa.RecordBatch:
    """Return all events as one batch of schema.EVENT, in order."""
    columns: dict[str, pa.Array] = {}
    lengths = [len(rows.queue_offset) for rows in events]
    stops = list(itertools.accumulate(lengths))
    for (name, dtype), source in zip(_NUMBERS, _SOURCES, strict=True):
        column = np.empty(stops[-1], dtype=dtype)
        for rows, length, stop in zip(events, lengths, stops, strict=True):
            column[stop - length : stop] = getattr(rows, source)
        columns[name] = pa.array(column)
    columns["client_id"] = _texts([rows.client_id for rows in events], lengths)
    columns["detail"] = _texts([rows.detail for rows in events], lengths)
    ordered = [columns[name] for name in schema.EVENT.names]
    return pa.RecordBatch.from_arrays(ordered, schema=schema.EVENT)


def to_payload(events: Sequence[EventRows]) -> pa.Buffer:
    """Return all events as the payload of a commit log section."""
    n = sum(len(rows.queue_offset) for rows in events)
    if n > _FORM_ROWS or any(rows.client_id or rows.detail for rows in events):
        return to_batch(events).serialize()
    payload, columns = _form(n).copy()
    stop = 0
    for rows in events:
        start, stop = stop, stop + len(rows.queue_offset)
        for column, value in zip(columns, _numbers_of(rows), strict=True):
            column[start:stop] = value
    return payload


@functools.lru_cache(maxsize=_FORM_ROWS)
def _form(rows: int) -> FilledForm:
    return FilledForm(schema.EVENT, rows)


def _texts(values: Sequence[str | Sequence[str | None] | None], lengths: Sequence[int]) -> pa.Array:
    if not any(values):
        return pa.nulls(sum(lengths), pa.string())
    parts = []
    for value, n in zip(values, lengths, strict=True):
        if value is None or value == "":
            parts.append(pa.nulls(n, pa.string()))
        elif isinstance(value, str):
            parts.append(pa.repeat(pa.scalar(value, pa.string()), n))
        else:
            parts.append(pa.array(value, pa.string()))
    return pa.concat_arrays(parts)


def read_epoch(kind: Kind, stored: Int64s) -> dict[str, Int64s]:
    """Return the fields of EventRows that the column ``epoch`` has in this kind of events."""
    if kind == Kind.QUEUE_LOCKED:
        return {"locked_at_ms": stored}
    if kind in CONSUMPTION:
        return {"epoch": np.maximum(stored, 0), "attempt_id_hash": np.maximum(-stored, 0)}
    return {"epoch": stored}


def from_batch(batch: pa.RecordBatch) -> Iterator[EventRows]:
    """Yield the runs of a batch of schema.EVENT, in order."""
    # A log file of an older version does not have the columns that were added since.
    columns = {name: batch.column(name).fill_null(0).to_numpy() for name, _ in _NUMBERS}
    starts = np.zeros(batch.num_rows, dtype=np.bool_)
    starts[:1] = True
    for name in _RUN:
        starts[1:] |= np.diff(columns[name]) != 0
    starts |= np.isin(columns["kind"], _ALONE)
    detail, client = batch.column("detail"), batch.column("client_id")
    if client.null_count < len(client):
        codes = client.dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
        starts[1:] |= np.diff(codes) != 0
    bounds = [*np.flatnonzero(starts).tolist(), batch.num_rows]
    plain = detail.null_count == batch.num_rows
    for start, stop in itertools.pairwise(bounds):
        run = {name: values[start:stop] for name, values in columns.items()}
        fixed = {name: int(run.pop(name)[0]) for name in _RUN}
        kind = Kind(fixed.pop("kind"))
        run |= read_epoch(kind, run.pop("epoch"))
        yield EventRows(
            kind=kind,
            **fixed,  # type: ignore[arg-type]  # the names come from the schema
            **run,
            client_id=client[start].as_py(),
            detail=None if plain else detail.slice(start, stop - start).to_pylist(),
        )
