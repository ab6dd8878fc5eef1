"""Keyed state of consumers: checks of a settle, and its history from files and the unsealed log."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa

from rmq_pipeline import limits, state_columns
from rmq_pipeline.broker.decide.group_offsets import Offsets
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import ends_at, segments_of
from rmq_pipeline.errors import RequestError, TableSchemaError
from rmq_pipeline.message import hash64
from rmq_pipeline.state_columns import folded, newest, telling
from rmq_pipeline.store import state_history
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.keyed_state import Trial
from rmq_pipeline.store.state_history import HISTORY, PLACES, Owner
from rmq_pipeline.tables import check_size, columns_of, contiguous, sound

#: Most columns of the state of a group for a topic, including those of earlier settles and the
#: fields of nested ones. Each takes up to a block of DuckDB's memory in every checkpoint of a large
#: table, some take three. With 500,000 states, 200 columns were written and 250 brought the
#: database down.
_COLUMNS_MAX: Final = 150
#: Share of DuckDB's memory that a trial may use; dispatch uses a little more than the merge.
_TRIAL_PART: Final = 0.75
#: Most owners in memory, and most tried traits of each.
_OWNERS_KEPT: Final = 1024
_TRIED_KEPT: Final = 512
#: Most columns tried one by one to find the one at fault.
_BLAMED_MAX: Final = 64
_GATES: Final[WeakKeyDictionary[Engine, "_Gate"]] = WeakKeyDictionary()
_MAKING: Final = threading.Lock()
_NONE: Final = pa.schema([])
_Wide = frozenset[tuple[str, pa.DataType]]
#: Folded name and type of a column, or two sets of wide columns, as _traits returns them.
_Trait = tuple[str, pa.DataType] | tuple[_Wide, _Wide]


def state_batch(
    engine: Engine, group: str, *, topic: str, table: pa.Table
) -> pa.RecordBatch | None:
    """Return the state in the log's columns; None for an empty table.

    Columns: message_group, message_group_hash, removed, and the consumer's own columns.

    Raises:
        RequestError: ``topic`` is empty.
        TableSchemaError: a column or its values cannot be stored.
    """
    if not topic:
        raise RequestError("Keyed state needs the topic of its messages.")
    group_id = engine.state.group(group).group_id
    topic_id = engine.state.topic(topic).topic.topic_id
    _check_state(sound(table, "state"))
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
    most_bytes = engine.settings.duckdb_memory_bytes // limits.STATES_IN_MEMORY
    # Arrow's casts have bugs, and the log is read without validating it again.
    sound(whole, "state")
    state_columns.check_rows(whole, most_bytes=1 << (most_bytes.bit_length() - 1))
    _gate_of(engine).check(engine, Owner(group_id, topic_id), rows=whole)
    ids = {b"group_id": str(group_id).encode(), b"topic_id": str(topic_id).encode()}
    return whole.replace_schema_metadata(ids).combine_chunks().to_batches()[0]


def _check_state(table: pa.Table) -> None:
    """Refuse columns that dispatch could not merge or no client could read back."""
    if "message_group" not in table.column_names:
        raise TableSchemaError("Column message_group is missing in the state.")
    state_columns.check(table.schema)
    for name in table.column_names:
        check_size(table.column(name), name)


def _cast(table: pa.Table, name: str, *, to: pa.DataType) -> pa.Array:
    column = table.column(name)
    try:
        return contiguous(column.cast(to))
    except (pa.ArrowException, ValueError) as error:
        raise TableSchemaError(
            f"Column {name} of the state is {column.type} and must be {to}: {error}."
        ) from error


def _indexed_alike(column: pa.Array) -> pa.Array:
    """Return a dictionary column with int32 indices: the table has more values than a settle.

    Nulls move from the dictionary to the indices, the only place Parquet has for them.
    """
    if not pa.types.is_dictionary(column.type):
        return column
    is_short = column.type.index_type != pa.int32()
    again = is_short or column.dictionary.null_count
    return column.dictionary_decode().dictionary_encode() if again else column


@dataclass(slots=True)
class _Known:
    """Columns of an owner's table, including those of settles that dispatch has not merged yet."""

    columns: pa.Schema
    #: Columns of the last settle. Most settles have the same ones, and skip the checks.
    last: pa.Schema | None = None
    #: Traits that passed a trial, as _traits returns them.
    tried: set[_Trait] = field(default_factory=set)


class _Gate:
    """Check of keyed state: dispatch must be able to merge it, and seal to write it."""

    def __init__(self, memory_bytes: int) -> None:
        self._trial = Trial(int(memory_bytes * _TRIAL_PART))
        self._lock = threading.Lock()
        self._known: dict[Owner, _Known] = {}

    def check(self, engine: Engine, owner: Owner, *, rows: pa.Table) -> None:
        """Refuse rows, in the log's columns, that cannot be stored.

        Raises:
            TableSchemaError: names the column if one alone is at fault.
        """
        row = rows.slice(0, 1)
        with self._lock:
            known = self._known_of(engine, owner)
            is_seen = known.last is not None and known.last.equals(row.schema)
            is_tried = is_seen or _traits(row, known.columns) <= known.tried
        if not is_tried:
            _check_file(row)
        if not is_seen and self._refusal(engine, owner, row=row):
            # The known columns may come from settles that were refused later for another reason.
            # Their columns were never stored, so read the table again.
            engine.dispatched(engine.state.changed(Kind.SETTLED, owner.group_id, owner.topic_id))
            with self._lock:
                self._known.pop(owner, None)
            if why := self._refusal(engine, owner, row=row):
                raise TableSchemaError(why)
        self._check_values(rows)

    def _known_of(self, engine: Engine, owner: Owner) -> _Known:
        if (known := self._known.get(owner)) is not None:
            return known
        if len(self._known) >= _OWNERS_KEPT:
            self._known.clear()
        nobody = np.zeros(0, np.int64)
        found = engine.database.keyed_state(owner.group_id, owner.topic_id, hashes=nobody)
        return self._known.setdefault(
            owner, _Known(pa.schema([]) if found is None else found.schema)
        )

    def _refusal(self, engine: Engine, owner: Owner, *, row: pa.Table) -> str | None:
        """Return why a row's columns cannot join the known ones; None: they can, and are known now.

        Raises:
            TableSchemaError: one column alone is at fault.
        """
        with self._lock:
            known = self._known_of(engine, owner)
            columns = pa.schema(list(newest(known.columns, row.schema).values()))
            own = state_columns.stored_columns(columns)
            # A home that exceeds the limit already may keep its columns.
            if own > max(_COLUMNS_MAX, state_columns.stored_columns(known.columns)):
                return (
                    f"The state would have {own} columns, including those of earlier settles and "
                    f"the fields of nested ones. It may have {_COLUMNS_MAX}."
                )
            untried = _traits(row, known.columns) - known.tried
            if untried and (why := self._trial_refusal(row, known.columns)):
                _blame(row, lambda alone: self._trial_refusal(alone, _NONE))
                return f"The state has columns that cannot be kept together: {why}."
            known.columns, known.last = columns, row.schema
            known.tried = untried | (known.tried if len(known.tried) < _TRIED_KEPT else set())
        return None

    def _trial_refusal(self, row: pa.Table, known: pa.Schema) -> str | None:
        columns = pa.schema(list(newest(known, row.schema).values()))
        return self._trial.refusal(telling(row, newest(known)), known=columns)

    def _check_values(self, rows: pa.Table) -> None:
        """Check values of types that DuckDB or Parquet can store only in part."""
        for column in rows.schema:
            if pa.types.is_timestamp(column.type):
                _refuse(column.name, _too_far(rows.column(column.name)))
            elif pa.types.is_nested(column.type):
                moments = _holds(column.type, pa.types.is_timestamp)
                if moments or _holds(column.type, pa.types.is_map):
                    with self._lock:
                        why = self._trial.refusal_of_values(rows.select([column.name]))
                    _refuse(column.name, why)
                if moments:
                    alone = rows.select([*state_columns.RESERVED, column.name])
                    _refuse(column.name, state_history.refusal(alone))


def _gate_of(engine: Engine) -> _Gate:
    with _MAKING:
        gate = _GATES.get(engine)
        if gate is None:
            gate = _GATES[engine] = _Gate(engine.settings.duckdb_memory_bytes)
        return gate


def _traits(row: pa.Table, known: pa.Schema) -> set[_Trait]:
    """Return the traits of a row's columns that need a trial, given the known columns.

    A trait is a new type of a column, or the sets of wide columns in the row and in the table. For
    other columns the neighbours hardly matter.
    """
    before = newest(known)
    told = telling(row, before).schema
    own = {folded(one.name): one.type for one in told if one.name not in state_columns.RESERVED}
    found: set[_Trait] = {
        (name, of_type)
        for name, of_type in own.items()
        if name not in before or before[name].type != of_type
    }
    wide = _wide(own)
    if wide or found:
        of_all = {name: one.type for name, one in before.items()} | own
        found.add((wide, _wide(of_all)))
    return found


def _wide(columns: Mapping[str, pa.DataType]) -> _Wide:
    """Return the columns whose memory depends on their type: fixed-size lists.

    DuckDB allocates space for 2048 of these at a time.
    """
    is_one = pa.types.is_fixed_size_list
    return frozenset(item for item in columns.items() if _holds(item[1], is_one))


def _check_file(row: pa.Table) -> None:
    if (why := state_history.refusal(row)) is not None:
        _blame(row, state_history.refusal)
        raise TableSchemaError(f"The state has columns that cannot be kept together: {why}.")


def _blame(row: pa.Table, refusal: Callable[[pa.Table], str | None]) -> None:
    """Refuse the first column that fails alone, if there is one."""
    names = [name for name in row.column_names if name not in state_columns.RESERVED]
    for name in names[:_BLAMED_MAX]:
        _refuse(name, refusal(row.select([*state_columns.RESERVED, name])))


def _refuse(name: str, why: str | None) -> None:
    if why is not None:
        raise TableSchemaError(f"Column {name} of the state cannot be kept: {why.rstrip('.')}.")


def _too_far(moments: pa.ChunkedArray) -> str | None:
    """Return the error if a time does not fit DuckDB's microseconds or Parquet's milliseconds."""
    unit, zone = moments.type.unit, moments.type.tz
    finer = "us" if zone and unit in ("s", "ms") else "ms" if unit == "s" else None
    try:
        if finer is not None:
            moments.cast(pa.timestamp(finer, zone))
    except pa.ArrowInvalid as error:
        return str(error)
    return None


def _holds(of_type: pa.DataType, is_one: Callable[[pa.DataType], bool]) -> bool:
    """Return True if ``is_one`` holds for a type or for a type nested in it."""
    parts = (of_type.field(i).type for i in range(of_type.num_fields))
    return is_one(of_type) or any(_holds(part, is_one) for part in parts)


#: Kind of a row in the answer: state before, state after, or start of a group without one.
BEFORE, AFTER, BEGINS = "before", "after", "begins"


def keep(engine: Engine, *, start: int, end: int) -> None:
    """Write the states of the log in [start, end), before it is sealed.

    States older than ``state_retention_ms`` are dropped, except the newest of each message group.

    Raises:
        OSError: writing failed.
    """
    if not engine.database.has_keyed_state():
        return
    folder = engine.home.path / "state"
    groups, topics = engine.state.groups, engine.state.topics
    state_history.forget(folder, groups=groups.keys(), topics=topics.keys())
    retention_ms = engine.settings.state_retention_ms
    if retention_ms is not None:
        state_history.expire(folder, before_ms=engine.clock.now_ms() - retention_ms)
    found = state_history.of_frames(engine.log.frames(start, end))
    alive = {
        owner: tables
        for owner, tables in found.items()
        if owner.group_id in groups and owner.topic_id in topics
    }
    state_history.write(folder, alive, start=start, end=end)


def keyed_state_history(engine: Engine, group: str, *, topic: str, places: pa.Table) -> pa.Table:
    """Return the keyed state of message groups before and after a range of offsets of each.

    Raises:
        TableSchemaError: ``places`` lacks a column, or has a null.
        StorageError: the history cannot be read.
    """
    owner = Owner(engine.state.group(group).group_id, engine.state.topic(topic).topic.topic_id)
    if missing := set(PLACES.names) - set(sound(places, "places").column_names):
        raise TableSchemaError(f"Column {min(missing)} is missing in the places.")
    places = pa.table(columns_of(places.select(PLACES.names), PLACES), schema=PLACES)
    if empty := [name for name in PLACES.names if places[name].null_count]:
        raise TableSchemaError(f"Column {empty[0]} of the places has a null.")
    hashes = hash64(pa.concat_arrays(places["message_group"].chunks or [pa.array([], pa.string())]))
    segments = segments_of(engine)
    bounds = engine.submit(Offsets(topic))[1]
    # A seal that ends meanwhile would drop the log that is read here.
    with segments.sealing:
        # The states come from the log; the starts of message groups come from DuckDB.
        engine.dispatched(ends_at(engine, topic_id=owner.topic_id, bounds=bounds))
        # The home may lack states of the log that another leader has sealed (shared_files.py).
        writes_all = engine.shared_history is None or segments.tidy
        sealed_to = segments.sealed_to if writes_all else engine.log.first
        frames = engine.log.frames(sealed_to, engine.log.end)
        found = state_history.around(
            engine.home.path / "state",
            owner,
            sealed_to=sealed_to,
            unsealed=state_history.of_frames(frames).get(owner, []),
            places=places,
            hashes=hashes,
        )
    before, after = found or (HISTORY.empty_table(), HISTORY.empty_table())
    known = np.isin(hashes, before["message_group_hash"].to_numpy())
    begins = engine.database.first_of_groups(owner.topic_id, hashes=hashes[~known])
    named = dict(zip(hashes.tolist(), places["message_group"].to_pylist(), strict=True))
    begins = begins.add_column(
        0, "message_group", pa.array([named[h] for h in begins["message_group_hash"].to_pylist()])
    )
    parts = [
        table.add_column(0, "moment", pa.repeat(pa.scalar(moment), table.num_rows))
        for moment, table in ((BEFORE, before), (AFTER, after), (BEGINS, begins))
    ]
    return pa.concat_tables(parts, promote_options="permissive")
