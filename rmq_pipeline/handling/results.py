"""Results of the handler: failures of calls, results of walks, reports of batches and windows."""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.failure import signature_of
from rmq_pipeline.handling.handler import Published, Result
from rmq_pipeline.text import said_by, speakable

REASON_LENGTH: Final = 1_000
#: Errors that end the caller of the handler. Every other error is a failure of the call, even one
#: that is no Exception: the panic of a Rust library, for example, has a class that cannot be
#: imported. They are listed by name, because this module must not import Dagster, and Dagster's
#: error derives directly from BaseException.
_ENDING: Final = frozenset({"KeyboardInterrupt", "DagsterExecutionInterruptedError"})
#: Tracebacks omit the frames of these files, which called the handler.
_HERE: Final = str(Path(__file__).parent)
#: Why a window ended. "fenced": a newer window of the group took over.
Ended = Literal["idle", "length", "fenced", "yielded"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed, as text that the broker can store."""

    reason: str
    error_type: str
    error: BaseException | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Build the failure of a call that raised."""
        kind = speakable(type(error).__name__)
        return cls(f"{kind}: {said_by(error)}"[:REASON_LENGTH], kind, error)

    @property
    def signature(self) -> str:
        """Key that is equal for similar failures, as the broker computes it."""
        return signature_of(self.reason, error_type=self.error_type)

    def traceback(self) -> str:
        """Return the traceback from the handler on; a long one is cut at the beginning."""
        if self.error is None:
            return ""
        frame = self.error.__traceback__
        while frame is not None and frame.tb_next is not None:
            if not frame.tb_frame.f_code.co_filename.startswith(_HERE):
                break
            frame = frame.tb_next
        try:
            lines = traceback.format_exception(type(self.error), self.error, frame)
        except Exception:  # noqa: BLE001 - formatting a foreign error may raise anything
            return ""
        text = speakable("".join(lines)).strip()
        if len(text) <= limits.TRACEBACK_LENGTH:
            return text
        return f"…{text[1 - limits.TRACEBACK_LENGTH :]}"


def is_failure(error: BaseException) -> bool:
    """Return True if the call has failed; False if the error must end the run."""
    if isinstance(error, Exception):
        return True
    return not any(kind.__name__ in _ENDING for kind in type(error).__mro__)


_MERGED_AT_ONCE: Final = 256

#: Messages that are not simply acked; ``row`` is the row in the walked table. "release": not tried,
#: because an earlier message of its group failed.
EXCEPTION: Final = pa.schema(
    [
        ("row", pa.int32()),
        ("outcome", pa.string()),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
        # Only for the first of similar failures, so a failing batch has one traceback and not
        # thousands.
        ("traceback", pa.string()),
    ]
)

_Row = tuple[int, str, int | None, str | None, str | None, str | None]


@dataclass(frozen=True, slots=True)
class WalkResult:
    """Result of a walk, to be settled. Every message without an exception is acked."""

    rows: pa.Table | None
    #: ``message_group``, ``removed`` and the state's columns; one row per changed group.
    state: pa.Table | None
    publish: dict[str, pa.Table]
    exceptions: pa.Table


class Effects(NamedTuple):
    """Validated result of one call. A tuple, because one is created for each call."""

    rows: pa.Table | None
    state: pa.Table | None
    publish: list[Published]
    results: list[Result]


class _Pile:
    """Accumulates many small tables of one schema into one table.

    Small tables are merged while they are still in the processor's cache. A hundred thousand tables
    kept to the end would fragment the heap, and double the time of handler calls.
    """

    def __init__(self) -> None:
        self._small: list[pa.Table] = []
        self._merged: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        self._small.append(table)
        if len(self._small) == _MERGED_AT_ONCE:
            self._merge()

    def _merge(self) -> None:
        self._merged.append(pa.concat_tables(self._small).combine_chunks())
        self._small.clear()

    def __bool__(self) -> bool:
        return bool(self._small or self._merged)

    def table(self) -> pa.Table:
        """Return all rows in few chunks; at least one table must have been added."""
        if self._small:
            self._merge()
        return pa.concat_tables(self._merged)


class Results:
    """Results of a walk so far, as lists of the tables that the calls returned."""

    def __init__(self) -> None:
        self._rows = _Pile()
        self._state = _Pile()
        self._state_rows: list[int] = []
        self._removed: list[bool] = []
        self._publish: dict[str, _Pile] = {}
        self._exceptions: list[_Row] = []
        self._signatures: set[str] = set()

    def keep(self, effects: Effects, *, group_row: int | None) -> None:
        """Add the rows, messages and state of a call."""
        if effects.rows is not None:
            self._rows.add(effects.rows)
        for topic, table in effects.publish:
            self._publish.setdefault(topic, _Pile()).add(table)
        if effects.state is not None and group_row is not None:
            self.changed_state(effects.state, group_row=group_row)

    def keep_with_results(self, effects: Effects, *, group_row: int | None, start: int) -> None:
        """Add a call and its results; drop its output if a message is retried."""
        results = effects.results
        if not any(r.outcome == "retry" for r in results):
            self.keep(effects, group_row=group_row)
        for r in results:
            self._exceptions.append(
                (start + r.place, r.outcome, r.retry_after_ms, r.reason, None, None)
            )

    def keep_single(self, effects: Effects, *, row: int) -> bool:
        """Add the call of one message without its state; return True if the message is retried."""
        retried = any(r.outcome == "retry" for r in effects.results)
        if not retried:
            self.keep(effects, group_row=None)
        for r in effects.results:
            self._exceptions.append((row, r.outcome, r.retry_after_ms, r.reason, None, None))
        return retried

    def changed_state(self, state: pa.Table, *, group_row: int) -> None:
        """Add a group's new state; ``group_row`` is the row of one of its messages."""
        self._state.add(state)
        self._state_rows.append(group_row)
        self._removed.append(not state.num_rows)

    def failed(self, row: int, failure: Failure) -> None:
        """Record that a message's call failed; the group's backoff delays its redelivery."""
        where = None
        if failure.signature not in self._signatures:
            self._signatures.add(failure.signature)
            where = failure.traceback() or None
        self._exceptions.append((row, "retry", None, failure.reason, failure.error_type, where))

    def release(self, start: int, stop: int) -> None:
        """Release messages that were not tried."""
        self._exceptions.extend(
            (row, "release", None, None, None, None) for row in range(start, stop)
        )

    def gathered(self, groups: pa.ChunkedArray | None) -> WalkResult:
        """Return all results as one table per kind."""
        columns = (
            zip(*self._exceptions, strict=True) if self._exceptions else ((),) * len(EXCEPTION)
        )
        return WalkResult(
            rows=self._rows.table() if self._rows else None,
            state=self._state_table(groups) if groups is not None and self._state else None,
            publish={t: p.table() for t, p in self._publish.items()},
            exceptions=pa.table(
                [pa.array(c, f.type) for c, f in zip(columns, EXCEPTION, strict=True)],
                schema=EXCEPTION,
            ),
        )

    def _state_table(self, groups: pa.ChunkedArray) -> pa.Table:
        # A removed state is a table without rows, and becomes a row of nulls.
        own = self._state.table()
        removed = np.array(self._removed)
        if removed.any():
            places = pa.array(np.cumsum(~removed) - 1, mask=removed)
            own = own.take(places) if own.num_rows else _nulls(own.schema, len(removed))
        named = own.add_column(0, "message_group", groups.take(pa.array(self._state_rows)))
        return named.add_column(1, "removed", pa.array(removed))


def _nulls(schema: pa.Schema, n: int) -> pa.Table:
    return pa.table([pa.nulls(n, f.type) for f in schema], names=schema.names)


EXCEPTIONS: Final = "exceptions"
FILES: Final = "files"
STATE: Final = "state"
PUBLISH: Final = "publish"
#: Maximum bytes that the broker stores per row in addition to the columns of a message or state.
_ROW_BYTES: Final = 256


class WorkerDiedError(Exception):
    """A worker process ended during its part: by a crash, a kill or lack of memory."""


class TooMuchError(Exception):
    """A micro-batch exceeds the limit of one settle; nothing of it is settled.

    Args:
        said: the limit that is exceeded, with figures.
        is_refused: the broker has refused it, and only the broker knows its limit.
    """

    def __init__(self, said: str, *, is_refused: bool = False) -> None:
        super().__init__(said)
        self.is_refused = is_refused


class Piece(NamedTuple):
    """One table of a part's result."""

    part: int
    #: EXCEPTIONS, exactly one per part; FILES, STATE or PUBLISH.
    kind: str
    #: The topic, for messages to publish.
    name: str
    table: pa.Table


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Result of a micro-batch, to be settled."""

    #: part -> results.EXCEPTION.
    exceptions: dict[int, pa.Table]
    #: schema.SINK_FILE; staged, not yet published.
    files: pa.Table
    state: pa.Table | None
    publish: dict[str, pa.Table]

    def not_done(self) -> int:
        """Return the number of messages that will be redelivered: failed, or released."""
        outcomes = [table["outcome"] for table in self.exceptions.values()]
        again = [pc.sum(pc.not_equal(each, "dead_letter")).as_py() or 0 for each in outcomes]
        return sum(again)

    def shares(self) -> dict[str, float]:
        """Return the used share of each limit of a settle; more than 1 is too much."""
        found = {
            f"messages for {topic}": max(
                table.num_rows / limits.BATCH_ROWS, table.nbytes / limits.BATCH_BYTES
            )
            for topic, table in self.publish.items()
        }
        stored = [*self.publish.values(), *([] if self.state is None else [self.state])]
        size = sum(table.nbytes + _ROW_BYTES * table.num_rows for table in stored)
        size += sum(table.nbytes for table in self.exceptions.values())
        return {**found, "state and messages": size / limits.SETTLE_BYTES}

    def check_size(self) -> None:
        """Check that the result is within the limits of one settle.

        Raises:
            TooMuchError: it is not.
        """
        what, share = max(self.shares().items(), key=lambda each: each[1])
        if share > 1:
            raise TooMuchError(
                f"One settle may hold {limits.BATCH_ROWS} messages and {limits.BATCH_BYTES} bytes"
                f" for a topic, and {limits.SETTLE_BYTES} bytes in all. The {what} are"
                f" {share:.1f} times as large."
            )


def pieces(part: int, walked: WalkResult, *, files: pa.Table | None = None) -> list[Piece]:
    """Return the pieces of a walk's result; sink rows are represented by their staged files."""
    found = [Piece(part, EXCEPTIONS, "", walked.exceptions)]
    if files is not None:
        found.append(Piece(part, FILES, "", files))
    if walked.state is not None:
        found.append(Piece(part, STATE, "", walked.state))
    return found + [Piece(part, PUBLISH, topic, table) for topic, table in walked.publish.items()]


def gathered(found: Iterable[Piece]) -> BatchResult:
    """Combine the pieces of all parts into one table per kind and topic."""
    exceptions: dict[int, pa.Table] = {}
    tables: dict[tuple[str, str], list[pa.Table]] = {}
    for piece in found:
        if piece.kind == EXCEPTIONS:
            exceptions[piece.part] = piece.table
        else:
            tables.setdefault((piece.kind, piece.name), []).append(piece.table)
    whole = {key: pa.concat_tables(parts) for key, parts in tables.items()}
    return BatchResult(
        exceptions=exceptions,
        files=whole.get((FILES, ""), schema.SINK_FILE.empty_table()),
        state=whole.get((STATE, "")),
        publish={name: table for (kind, name), table in whole.items() if kind == PUBLISH},
    )


def failed_alone(error: WorkerDiedError | TooMuchError) -> BatchResult:
    """Return the result that settles a batch of one message as failed."""
    row = {
        "row": 0,
        "outcome": "retry",
        "retry_after_ms": None,
        "reason": str(error),
        "error_type": type(error).__name__,
        # Not a frame of the handler, but all that is known.
        "traceback": f"{type(error).__name__}: {error}",
    }
    return gathered([Piece(0, EXCEPTIONS, "", pa.Table.from_pylist([row], schema=EXCEPTION))])


class MessageFailure(NamedTuple):
    """A message whose handler call failed, for the log of the run."""

    message_id: str
    reason: str
    error_type: str
    traceback: str


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One settled micro-batch."""

    epoch: int
    number: int
    #: Received messages; ``released`` of them were not tried.
    messages: int
    acked: int
    retried: int
    dead_lettered: int
    parked: int
    released: int
    #: Rows and files added to the sink.
    rows: int
    files: int
    bytes: int
    #: topic -> number of published messages.
    published: dict[str, int]
    #: Seconds from receive to settle, and the engine's share of them.
    seconds: float
    work_s: float
    #: One failure of each kind.
    failures: Sequence[MessageFailure] = ()


@dataclass(slots=True)
class WindowReport:
    """A window: the sum of its micro-batches."""

    consumer: str
    topic: str
    group: str
    #: Owner of the open window, if this one yielded to it.
    yielded_to: str | None = None
    ended: Ended = "idle"
    #: Epoch of the window; the last one if it was reopened.
    epoch: int = 0
    batches: int = 0
    #: Times that a delivery had ended early or an answer was lost, and all messages in flight were
    #: redelivered.
    lost: int = 0
    messages: int = 0
    acked: int = 0
    retried: int = 0
    dead_lettered: int = 0
    parked: int = 0
    released: int = 0
    rows: int = 0
    files: int = 0
    bytes: int = 0
    published: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    #: Staged files of dead windows that were deleted before the first receive.
    swept_files: int = 0

    def add(self, batch: BatchReport) -> None:
        """Add the counts of a micro-batch."""
        self.batches += 1
        for name in (
            "messages",
            "acked",
            "retried",
            "dead_lettered",
            "parked",
            "released",
            "rows",
            "files",
            "bytes",
        ):
            setattr(self, name, getattr(self, name) + getattr(batch, name))
        for topic, n in batch.published.items():
            self.published[topic] = self.published.get(topic, 0) + n
