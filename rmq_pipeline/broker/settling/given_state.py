"""Keyed state as a settle brings it: checked, and in the columns that the log has.

What dispatch could not fold in would be answered, and would then keep the broker from starting;
what seal could not write would keep the log from ever becoming shorter. So rows of new columns are
tried in a database in memory and in a file in memory first.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa

from rmq_pipeline import state_columns
from rmq_pipeline.broker import arguments
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.errors import RequestError, TableSchemaError
from rmq_pipeline.message import hash64
from rmq_pipeline.store import state_history
from rmq_pipeline.store.history_columns import newest
from rmq_pipeline.store.keyed_state import Trial
from rmq_pipeline.store.state_history import Owner
from rmq_pipeline.tables import contiguous

#: Columns that the state of a group for a topic may have, those of earlier settles and the parts of
#: nested ones included. Each takes up to a block of DuckDB's memory in every checkpoint of a large
#: table, some of them three: 200 were written with 500,000 states, 250 ended the database.
_COLUMNS_MAX: Final = 150
#: Of DuckDB's memory, what a trial may take; dispatch does a little more than fold states in.
_TRIAL_PART: Final = 0.75
#: Owners, and sets of columns of each, that are known not to need another trial.
_OWNERS_KEPT: Final = 1024
_TRIED_KEPT: Final = 16
#: How many columns are tried alone to find the one to blame.
_BLAMED_MAX: Final = 64
_GATES: Final[WeakKeyDictionary[Engine, "_Gate"]] = WeakKeyDictionary()
_MAKING: Final = threading.Lock()


def state_batch(
    engine: Engine, group: str, *, topic: str, table: pa.Table
) -> pa.RecordBatch | None:
    """Keyed state as the log keeps it: message_group, its hash, removed, the consumer's columns."""
    if not topic:
        raise RequestError("State needs the topic whose messages it belongs to.")
    group_id = engine.state.group(group).group_id
    topic_id = engine.state.topic(topic).topic.topic_id
    _check_state(arguments.sound(table, "state"))
    if not table.num_rows:
        return None
    table = table.combine_chunks()
    keys = _cast(table, "message_group", to=pa.string())
    if keys.null_count:
        raise TableSchemaError("Column message_group of the state has a null.")
    removed = pa.repeat(pa.scalar(False), len(keys))
    if "removed" in table.column_names:
        removed = _cast(table, "removed", to=pa.bool_()).fill_null(False)
    own = [name for name in table.column_names if name not in state_columns.RESERVED]
    whole = pa.table(
        {
            "message_group": keys,
            "message_group_hash": pa.array(hash64(keys)),
            "removed": removed,
            **{name: _indexed_alike(contiguous(table.column(name))) for name in own},
        }
    )
    _gate_of(engine).check(engine, Owner(group_id, topic_id), rows=whole)
    ids = {b"group_id": str(group_id).encode(), b"topic_id": str(topic_id).encode()}
    return whole.replace_schema_metadata(ids).combine_chunks().to_batches()[0]


def _check_state(table: pa.Table) -> None:
    """Refuse what dispatch could not fold in, or nobody could read again: the log keeps it."""
    if "message_group" not in table.column_names:
        raise TableSchemaError("Column message_group is missing in the state.")
    state_columns.check(table.schema)


def _cast(table: pa.Table, name: str, *, to: pa.DataType) -> pa.Array:
    column = table.column(name)
    try:
        return contiguous(column.cast(to))
    except (pa.ArrowException, ValueError) as error:
        raise TableSchemaError(
            f"Column {name} of the state is {column.type} and must be {to}: {error}."
        ) from error


def _indexed_alike(column: pa.Array) -> pa.Array:
    """Short indices made longer: all of the state has more values than what one settle changes.

    Nulls go from the dictionary to the indices: a Parquet file has them nowhere else.
    """
    if not pa.types.is_dictionary(column.type):
        return column
    is_short = column.type.index_type != pa.int32()
    again = is_short or column.dictionary.null_count
    return column.dictionary_decode().dictionary_encode() if again else column


@dataclass(slots=True)
class _Known:
    """What an owner's table has, or will have with what is on its way through the log."""

    columns: pa.Schema
    #: Columns of a settle, and of the table with them, that were tried; the newest at the end.
    tried: list[tuple[pa.Schema, pa.Schema]] = field(default_factory=list)


class _Gate:
    """Lets states pass that dispatch can fold in and seal can write."""

    def __init__(self, memory_bytes: int) -> None:
        self._trial = Trial(int(memory_bytes * _TRIAL_PART))
        self._lock = threading.Lock()
        self._known: dict[Owner, _Known] = {}

    def check(self, engine: Engine, owner: Owner, *, rows: pa.Table) -> None:
        """Refuse rows, in the log's columns, that could not be kept.

        Raises:
            TableSchemaError: with the column, where one alone is to blame.
        """
        with self._lock:
            known = self._known.get(owner) or self._found(engine, owner)
            if not known.tried or not known.tried[-1][0].equals(rows.schema):
                self._check_columns(rows, known)
            self._check_values(rows)

    def _found(self, engine: Engine, owner: Owner) -> _Known:
        if len(self._known) >= _OWNERS_KEPT:
            self._known.clear()
        nobody = np.zeros(0, np.int64)
        found = engine.database.keyed_state(owner.group_id, owner.topic_id, hashes=nobody)
        return self._known.setdefault(
            owner, _Known(pa.schema([]) if found is None else found.schema)
        )

    def _check_columns(self, rows: pa.Table, known: _Known) -> None:
        columns = pa.schema(list(newest(known.columns, rows.schema).values()))
        own = state_columns.stored_columns(columns)
        # A home in which there are more already goes on with these.
        if own > max(_COLUMNS_MAX, state_columns.stored_columns(known.columns)):
            raise TableSchemaError(
                f"The state would have {own} columns, those of earlier settles and the parts of "
                f"nested ones included, and may have {_COLUMNS_MAX}."
            )
        this = (rows.schema, columns)
        others = [tried for tried in known.tried if tried != this]
        if len(others) == len(known.tried):
            self._try(rows.slice(0, 1), columns)
        known.columns = columns
        known.tried = [*others[1 - _TRIED_KEPT :], this]

    def _try(self, row: pa.Table, columns: pa.Schema) -> None:
        why = self._refusal(row, columns)
        if why is None:
            return
        names = [name for name in row.column_names if name not in state_columns.RESERVED]
        for name in names[:_BLAMED_MAX]:
            alone = row.select([*state_columns.RESERVED, name])
            _refuse(name, self._refusal(alone, alone.schema))
        raise TableSchemaError(f"The state has columns that cannot be kept together: {why}.")

    def _refusal(self, row: pa.Table, columns: pa.Schema) -> str | None:
        return self._trial.refusal(row, known=columns) or state_history.refusal(row)

    def _check_values(self, rows: pa.Table) -> None:
        """Look at values of types whose values do not all have a form in DuckDB and in Parquet."""
        for column in rows.schema:
            if pa.types.is_timestamp(column.type):
                _refuse(column.name, _too_far(rows.column(column.name)))
            elif pa.types.is_nested(column.type):
                moments = _holds(column.type, pa.types.is_timestamp)
                if moments or _holds(column.type, pa.types.is_map):
                    _refuse(column.name, self._trial.refusal_of_values(rows.select([column.name])))
                if moments:
                    alone = rows.select([*state_columns.RESERVED, column.name])
                    _refuse(column.name, state_history.refusal(alone))


def _gate_of(engine: Engine) -> _Gate:
    with _MAKING:
        gate = _GATES.get(engine)
        if gate is None:
            gate = _GATES[engine] = _Gate(engine.settings.duckdb_memory_bytes)
        return gate


def _refuse(name: str, why: str | None) -> None:
    if why is not None:
        raise TableSchemaError(f"Column {name} of the state cannot be kept: {why.rstrip('.')}.")


def _too_far(moments: pa.ChunkedArray) -> str | None:
    """Whether there are moments that DuckDB's microseconds, or Parquet's milliseconds, lack."""
    unit, zone = moments.type.unit, moments.type.tz
    finer = "us" if zone and unit in ("s", "ms") else "ms" if unit == "s" else None
    try:
        if finer is not None:
            moments.cast(pa.timestamp(finer, zone))
    except pa.ArrowInvalid as error:
        return str(error)
    return None


def _holds(of_type: pa.DataType, is_one: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or one that it is made of, is such a one."""
    parts = (of_type.field(i).type for i in range(of_type.num_fields))
    return is_one(of_type) or any(_holds(part, is_one) for part in parts)
