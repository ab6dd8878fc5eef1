"""Calls of the handler for a table of many message groups, with their state, and the results.

Pure Arrow and Python. A handler that raises or returns something invalid fails its message, never
the walk.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.handling.handler import (
    STATE,
    Handler,
    Outcome,
    OutcomeError,
    conform,
    identified,
    published,
    results_of,
    with_origin,
)
from rmq_pipeline.handling.results import Effects, Failure, Results, WalkResult, is_failure
from rmq_pipeline.idempotency import SEEN_BEFORE
from rmq_pipeline.state_columns import folded


def nullable(state: pa.Schema) -> pa.Schema:
    """Return the schema with all columns nullable; the same object if they already are."""
    if all(field.nullable for field in state):
        return state
    return pa.schema([field.with_nullable(True) for field in state], state.metadata)


def as_declared(known: pa.Table, state: pa.Schema) -> pa.Table:
    """Return recorded states with message_group and exactly the declared columns.

    All columns are nullable. A value is null if it was not recorded, or cannot be cast to the
    column's type. Numbers are converted as the store converts them when a settle changes the
    column. From texts and times the store can convert more than this function.

    Args:
        known: ``message_group`` and columns as recorded.
        state: the consumer's columns.
    """
    state = nullable(state)
    recorded = {folded(name): known[name] for name in known.column_names}
    columns = [
        _cast(recorded[folded(field.name)], field.type)
        if folded(field.name) in recorded
        else pa.nulls(known.num_rows, field.type)
        for field in state
    ]
    groups = known["message_group"]
    return pa.table([groups, *columns], schema=pa.schema([("message_group", groups.type), *state]))


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    column = _rounded(column, wanted)
    try:
        return _as_whole(column, wanted)
    except Exception:  # noqa: BLE001 - Arrow's error for two types may have any class
        # One value that cannot be cast must not discard the others.
        values = [_cast_value(column, row, wanted=wanted) for row in range(len(column))]
        return pa.chunked_array([chunk for value in values for chunk in value.chunks], wanted)


def _cast_value(column: pa.ChunkedArray, row: int, *, wanted: pa.DataType) -> pa.ChunkedArray:
    try:
        # Casting a slice of a list array also reads the values outside the slice.
        nested = pa.types.is_nested(column.type)
        value = column.take(pa.array([row])) if nested else column.slice(row, 1)
        return _as_whole(value, wanted)
    except Exception:  # noqa: BLE001 - see above
        return pa.chunked_array([pa.nulls(1, wanted)])


def _as_whole(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    # An integer too long for a float becomes the nearest float, as in the store.
    nearest = pa.types.is_integer(column.type) and pa.types.is_floating(wanted)
    return column.cast(wanted, safe=not nearest)


def _rounded(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Round fractions for an integer column as the store does when it changes the column."""
    if pa.types.is_integer(wanted):
        if pa.types.is_floating(column.type):
            return pc.round(column, round_mode="half_to_even")
        if pa.types.is_decimal(column.type):
            # Rounding up may add a digit.
            wide = column.cast(pa.decimal256(76, column.type.scale))
            return pc.round(wide, round_mode="half_towards_infinity")
    return column


#: Messages per call of an unordered handler; a bad message costs this many single calls.
UNORDERED_CALL_ROWS: Final = 1_000
#: Passed to the handler as state when the consumer keeps none.
NO_STATE: Final = pa.schema([])


@dataclass(frozen=True, slots=True)
class Rules:
    """The handler's arguments and the results that it may return."""

    handler: Handler
    #: Order by message group: a call has messages of one group, and after a failure the rest of the
    #: group waits.
    ordered: bool = True
    state_schema: pa.Schema | None = None
    sink_schema: pa.Schema | None = None
    #: Sink column that chooses the partition and therefore may not be null.
    partition_time: str = ""
    #: Topics to which the handler may publish, and the type of each.
    publishes: dict[str, str] = field(default_factory=dict)
    #: The topic, if rows must name the message they come from (handling/handler.py).
    origin: str = ""
    #: Prefix of the ids of published messages. Each id names the message for which it was
    #: published, so each call has one message. Empty: the handler assigns ids.
    publication: str = ""
    #: Columns of states passed to the handler: nullable, because a state may have been removed or
    #: recorded with other columns.
    known_schema: pa.Schema | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.state_schema is not None:
            object.__setattr__(self, "known_schema", nullable(self.state_schema))


@dataclass(frozen=True, slots=True)
class _Walk:
    messages: pa.Table
    rules: Rules
    results: Results
    #: Each call has one message.
    singly: bool


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector rarely: a walk creates many objects but few reference cycles."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def walk(messages: pa.Table, state: pa.Table | None, *, rules: Rules) -> WalkResult:
    """Pass every message to the handler, group by group.

    Args:
        messages: handler.MESSAGES; messages of one group are adjacent and in offset order.
        state: ``message_group`` and the state's columns, at most one row per group; None if no
            group has state.
        rules: the handler and the results that it may return.
    """
    this = _Walk(messages.combine_chunks(), rules, Results(), singly=_singly(messages, rules))
    if not rules.ordered:
        for start in range(0, messages.num_rows, UNORDERED_CALL_ROWS):
            _walk_unordered(this, start)
        return this.results.gathered(None)
    # Messages with a null group are independent of each other: no order, no state.
    groups = this.messages["message_group"]
    for start, stop, before in _spans(groups, _own_columns(state, rules)):
        _walk_group(this, start=start, stop=stop, before=before)
    return this.results.gathered(groups)


def _singly(messages: pa.Table, rules: Rules) -> bool:
    """Return True if each call must have one message.

    That is so if published messages name their origin. It is also so for marked messages: their
    handler has external effects, so no call may be repeated. Of a call with several messages, only
    results can be attributed to a message. Marked messages therefore share calls only without
    order, sink and topics to publish to.
    """
    if rules.publication:
        return True
    told_apart = not (rules.ordered or rules.sink_schema is not None or rules.publishes)
    return SEEN_BEFORE.name in messages.column_names and not told_apart


def _walk_group(this: _Walk, *, start: int, stop: int, before: pa.Table) -> None:
    n = stop - start
    if n > 1 and this.singly:
        _walk_one_by_one(this, start=start, stop=stop, before=before)
        return
    effects = _call(this.messages.slice(start, n), before, rules=this.rules)
    if isinstance(effects, Failure):
        if n == 1:
            this.results.failed(start, effects)
            return
    elif not effects.results:
        this.results.keep(effects, group_row=start)
        return
    elif n == 1 or not any(r.outcome == "retry" for r in effects.results):
        this.results.keep_with_results(effects, group_row=start, start=start)
        return
    # The call's results include the failed message and its successors, which are handled again
    # later. Only calls with one message each separate them.
    _walk_one_by_one(this, start=start, stop=stop, before=before)


def _walk_one_by_one(this: _Walk, *, start: int, stop: int, before: pa.Table) -> None:
    state, changed = before, None
    for row in range(start, stop):
        effects = _call(this.messages.slice(row, 1), state, rules=this.rules)
        if isinstance(effects, Failure):
            this.results.failed(row, effects)
            this.results.release(row + 1, stop)
            break
        if this.results.keep_single(effects, row=row):
            this.results.release(row + 1, stop)
            break
        if effects.state is not None:
            state = changed = effects.state
    if changed is not None:
        this.results.changed_state(changed, group_row=start)


def _walk_unordered(this: _Walk, start: int) -> None:
    given = this.messages.slice(start, UNORDERED_CALL_ROWS)
    n = given.num_rows
    if n > 1 and this.singly:
        _walk_each(this, start=start, stop=start + n)
        return
    effects = _call(given, NO_STATE.empty_table(), rules=this.rules)
    if isinstance(effects, Failure):
        if n == 1:
            this.results.failed(start, effects)
            return
    elif (
        n == 1
        or (effects.rows is None and not effects.publish)
        or not any(r.outcome == "retry" for r in effects.results)
    ):
        this.results.keep_with_results(effects, group_row=None, start=start)
        return
    # As above: only single calls separate the failed messages from the others.
    _walk_each(this, start=start, stop=start + n)


def _walk_each(this: _Walk, *, start: int, stop: int) -> None:
    for row in range(start, stop):
        single = _call(this.messages.slice(row, 1), NO_STATE.empty_table(), rules=this.rules)
        if isinstance(single, Failure):
            this.results.failed(row, single)
        else:
            this.results.keep_single(single, row=row)


def _call(messages: pa.Table, state: pa.Table, *, rules: Rules) -> Effects | Failure:
    """Call the handler and validate its outcome; any error is a failure of the messages."""
    try:
        return _checked(rules.handler(messages, state), messages, rules=rules)
    except BaseException as error:
        if not is_failure(error):
            raise
        return Failure.of(error)


def _checked(outcome: Outcome, messages: pa.Table, *, rules: Rules) -> Effects:
    if not isinstance(outcome, Outcome):
        raise OutcomeError(f"The handler returned {type(outcome).__name__}, not an Outcome.")
    rows = outcome.rows
    if rows is not None:
        if rules.origin:
            rows = with_origin(rows, messages, topic=rules.origin)
        rows = conform(rows, rules.sink_schema, what="rows", filled=rules.partition_time)
    after = outcome.state
    if after is not None:
        after = conform(after, rules.state_schema, what=STATE, most=1)
        if after is not None and rules.known_schema is not rules.state_schema:
            after = pa.table(after.columns, schema=rules.known_schema)
        if messages["message_group"].null_count:
            raise OutcomeError("A message without a message_group has no state to keep.")
    to_publish = published(outcome.publish, rules.publishes) if outcome.publish else []
    if rules.publication:
        of = rules.publication
        to_publish = [
            (name, identified(each, messages, publication=of)) for name, each in to_publish
        ]
    results = results_of(outcome.results, messages) if outcome.results is not None else []
    return Effects(rows, after, to_publish, results)


def _own_columns(state: pa.Table | None, rules: Rules) -> tuple[pa.Array, pa.Table]:
    """Return the groups that have state, and their rows with the columns of the state schema."""
    schema = rules.known_schema or NO_STATE
    if state is None or rules.known_schema is None:
        return pa.array([], pa.string()), schema.empty_table()
    groups = state["message_group"].combine_chunks()
    return groups, as_declared(state, schema).select(schema.names).combine_chunks()


def _spans(
    groups: pa.ChunkedArray, state: tuple[pa.Array, pa.Table]
) -> Iterator[tuple[int, int, pa.Table]]:
    """Yield start, stop and state (a table of 0 or 1 rows) of every group."""
    starts = group_starts(groups)
    stops = np.append(starts, len(groups))[1:]
    known, rows = state
    nothing = rows.slice(0, 0)
    if not len(known):
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield start, stop, nothing
        return
    firsts = groups.take(pa.array(starts))
    places = pc.fill_null(pc.index_in(firsts, known, skip_nulls=True), -1).to_pylist()
    for start, stop, place in zip(starts.tolist(), stops.tolist(), places, strict=True):
        yield start, stop, rows.slice(place, 1) if place >= 0 else nothing


def group_starts(groups: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the first row of each run of one message group; each null is a run of its own."""
    n = len(groups)
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    differs = pc.not_equal(groups.slice(1), groups.slice(0, n - 1))
    begins = np.ones(n, dtype=bool)
    begins[1:] = pc.fill_null(differs, True).to_numpy()
    return np.flatnonzero(begins).astype(np.int64)
