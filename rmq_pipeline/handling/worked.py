"""The result of an engine's work on a micro-batch: the tables of its parts, for one settle."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.handling.harvest import EXCEPTION, Walked

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
class Worked:
    """Result of a micro-batch, to be settled."""

    #: part -> harvest.EXCEPTION.
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
                f" for a topic, and {limits.SETTLE_BYTES} bytes in all: the {what} are"
                f" {share:.1f} times as much."
            )


def pieces(part: int, walked: Walked, *, files: pa.Table | None = None) -> list[Piece]:
    """Return the pieces of a walk's result; sink rows are represented by their staged files."""
    found = [Piece(part, EXCEPTIONS, "", walked.exceptions)]
    if files is not None:
        found.append(Piece(part, FILES, "", files))
    if walked.state is not None:
        found.append(Piece(part, STATE, "", walked.state))
    return found + [Piece(part, PUBLISH, topic, table) for topic, table in walked.publish.items()]


def gathered(found: Iterable[Piece]) -> Worked:
    """Combine the pieces of all parts into one table per kind and topic."""
    exceptions: dict[int, pa.Table] = {}
    tables: dict[tuple[str, str], list[pa.Table]] = {}
    for piece in found:
        if piece.kind == EXCEPTIONS:
            exceptions[piece.part] = piece.table
        else:
            tables.setdefault((piece.kind, piece.name), []).append(piece.table)
    whole = {key: pa.concat_tables(parts) for key, parts in tables.items()}
    return Worked(
        exceptions=exceptions,
        files=whole.get((FILES, ""), schema.SINK_FILE.empty_table()),
        state=whole.get((STATE, "")),
        publish={name: table for (kind, name), table in whole.items() if kind == PUBLISH},
    )


def failed_alone(error: WorkerDiedError | TooMuchError) -> Worked:
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
