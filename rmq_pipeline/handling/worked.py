"""What an engine leaves of a micro-batch: the tables of its parts, gathered for one settle."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.handling.harvest import EXCEPTION, Walked

EXCEPTIONS: Final = "exceptions"
FILES: Final = "files"
STATE: Final = "state"
PUBLISH: Final = "publish"


class WorkerDiedError(Exception):
    """A worker process ended in the middle of its part: a crash, a kill, out of memory."""


class Piece(NamedTuple):
    """A table that came of a part."""

    part: int
    #: EXCEPTIONS, of which every part has one; FILES, STATE or PUBLISH.
    kind: str
    #: The topic, of messages to publish.
    name: str
    table: pa.Table


@dataclass(frozen=True, slots=True)
class Worked:
    """What a micro-batch leaves to settle."""

    #: part -> harvest.EXCEPTION.
    exceptions: dict[int, pa.Table]
    #: schema.SINK_FILE; they do not count yet.
    files: pa.Table
    state: pa.Table | None
    publish: dict[str, pa.Table]

    def not_done(self) -> int:
        """How many messages are to come again: failed, or given back untried."""
        outcomes = [table["outcome"] for table in self.exceptions.values()]
        again = [pc.sum(pc.not_equal(each, "dead_letter")).as_py() or 0 for each in outcomes]
        return sum(again)


def pieces(part: int, walked: Walked, *, files: pa.Table | None = None) -> list[Piece]:
    """What a walk leaves, its rows aside, and the files that these are staged in."""
    found = [Piece(part, EXCEPTIONS, "", walked.exceptions)]
    if files is not None:
        found.append(Piece(part, FILES, "", files))
    if walked.state is not None:
        found.append(Piece(part, STATE, "", walked.state))
    return found + [Piece(part, PUBLISH, topic, table) for topic, table in walked.publish.items()]


def gathered(found: Iterable[Piece]) -> Worked:
    """The pieces of all parts, a table a kind and topic."""
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


def died(reason: str) -> Worked:
    """What a micro-batch of one message leaves whose worker never answered."""
    row = {
        "row": 0,
        "outcome": "retry",
        "retry_after_ms": None,
        "reason": reason,
        "error_type": WorkerDiedError.__name__,
    }
    return gathered([Piece(0, EXCEPTIONS, "", pa.Table.from_pylist([row], schema=EXCEPTION))])
