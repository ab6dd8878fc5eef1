"""The walk over a table of many message groups: call the handler, keep what counts of it.

Pure Arrow and Python. A handler that raises, or returns what cannot be used, fails its message,
never the walk.
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

from rmq_pipeline.handling.failing import Failure, is_failure
from rmq_pipeline.handling.handler import Handler, Outcome, OutcomeError
from rmq_pipeline.handling.harvest import Effects, Harvest, Walked
from rmq_pipeline.handling.known_state import as_declared, nullable
from rmq_pipeline.handling.origins import with_origin
from rmq_pipeline.handling.returned import STATE, conform, published, results_of
from rmq_pipeline.idempotency import SEEN_BEFORE

#: Messages of one call of an unordered handler, so that one bad message costs 1,000 single calls.
UNORDERED_CALL_ROWS: Final = 1_000
#: Stands for the state of a group without one, where the consumer keeps none.
NO_STATE: Final = pa.schema([])


@dataclass(frozen=True, slots=True)
class Rules:
    """What a handler is called with and may return."""

    handler: Handler
    #: Order by message group: one group a call, and nothing of a group after its first failure.
    ordered: bool = True
    state_schema: pa.Schema | None = None
    sink_schema: pa.Schema | None = None
    #: The sink's column that may not be null, because it chooses the partition.
    partition_time: str = ""
    #: Topics the handler may publish to, and the type of each.
    publishes: dict[str, str] = field(default_factory=dict)
    #: The topic, where rows are to say which message they are of (handling/origins.py).
    origin: str = ""
    #: The columns of states on their way: null where a state was removed, or recorded otherwise.
    known_schema: pa.Schema | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.state_schema is not None:
            object.__setattr__(self, "known_schema", nullable(self.state_schema))


@dataclass(frozen=True, slots=True)
class _Walk:
    messages: pa.Table
    rules: Rules
    harvest: Harvest
    #: Each call has one message.
    singly: bool


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for cyclic garbage rarely: a walk makes many objects, and hardly any."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def walk(messages: pa.Table, state: pa.Table | None, *, rules: Rules) -> Walked:
    """Give every message to the handler, group by group.

    Args:
        messages: handler.MESSAGES; messages of one group adjacent, in offset order.
        state: ``message_group`` and the state's columns, at most a row a group; None: nobody
            has one.
        rules: the handler and what it may return.
    """
    this = _Walk(messages.combine_chunks(), rules, Harvest(), singly=_singly(messages, rules))
    if not rules.ordered:
        for start in range(0, messages.num_rows, UNORDERED_CALL_ROWS):
            _walk_unordered(this, start)
        return this.harvest.gathered(None)
    # Null groups are strangers to each other: such a message has no order and no state.
    groups = this.messages["message_group"]
    for start, stop, before in _spans(groups, _own_columns(state, rules)):
        _walk_group(this, start=start, stop=stop, before=before)
    return this.harvest.gathered(groups)


def _singly(messages: pa.Table, rules: Rules) -> bool:
    """Whether no call may be made again: the handler of marked messages has effects outside.

    What came of several messages can only be told apart where it is nothing but results.
    """
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
            this.harvest.failed(start, effects.reason, error_type=effects.error_type)
            return
    elif not effects.results:
        this.harvest.keep(effects, group_row=start)
        return
    elif n == 1 or not any(r.outcome == "retry" for r in effects.results):
        this.harvest.keep_with_results(effects, group_row=start, start=start)
        return
    # What a call of several messages made of the one that failed, and of those after it, would
    # count now and again when they come again: only single calls tell them apart.
    _walk_one_by_one(this, start=start, stop=stop, before=before)


def _walk_one_by_one(this: _Walk, *, start: int, stop: int, before: pa.Table) -> None:
    state, changed = before, None
    for row in range(start, stop):
        effects = _call(this.messages.slice(row, 1), state, rules=this.rules)
        if isinstance(effects, Failure):
            this.harvest.failed(row, effects.reason, error_type=effects.error_type)
            this.harvest.release(row + 1, stop)
            break
        if this.harvest.keep_single(effects, row=row):
            this.harvest.release(row + 1, stop)
            break
        if effects.state is not None:
            state = changed = effects.state
    if changed is not None:
        this.harvest.changed_state(changed, group_row=start)


def _walk_unordered(this: _Walk, start: int) -> None:
    given = this.messages.slice(start, UNORDERED_CALL_ROWS)
    n = given.num_rows
    if n > 1 and this.singly:
        _walk_each(this, start=start, stop=start + n)
        return
    effects = _call(given, NO_STATE.empty_table(), rules=this.rules)
    if isinstance(effects, Failure):
        if n == 1:
            this.harvest.failed(start, effects.reason, error_type=effects.error_type)
            return
    elif (
        n == 1
        or (effects.rows is None and not effects.publish)
        or not any(r.outcome == "retry" for r in effects.results)
    ):
        this.harvest.keep_with_results(effects, group_row=None, start=start)
        return
    # As in order: only single calls tell what came of the messages that failed.
    _walk_each(this, start=start, stop=start + n)


def _walk_each(this: _Walk, *, start: int, stop: int) -> None:
    for row in range(start, stop):
        single = _call(this.messages.slice(row, 1), NO_STATE.empty_table(), rules=this.rules)
        if isinstance(single, Failure):
            this.harvest.failed(row, single.reason, error_type=single.error_type)
        else:
            this.harvest.keep_single(single, row=row)


def _call(messages: pa.Table, state: pa.Table, *, rules: Rules) -> Effects | Failure:
    """Call the handler and check what it returns; whatever goes wrong is the messages' failure."""
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
    onward = published(outcome.publish, rules.publishes) if outcome.publish else []
    results = results_of(outcome.results, messages) if outcome.results is not None else []
    return Effects(rows, after, onward, results)


def _own_columns(state: pa.Table | None, rules: Rules) -> tuple[pa.Array, pa.Table]:
    """The groups that have state, and their rows in the state schema's columns."""
    schema = rules.known_schema or NO_STATE
    if state is None or rules.known_schema is None:
        return pa.array([], pa.string()), schema.empty_table()
    groups = state["message_group"].combine_chunks()
    return groups, as_declared(state, schema).select(schema.names).combine_chunks()


def _spans(
    groups: pa.ChunkedArray, state: tuple[pa.Array, pa.Table]
) -> Iterator[tuple[int, int, pa.Table]]:
    """Start, stop and state row (a table of 0 or 1 rows) of every group."""
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
    """Where each run of one message group begins; a null is a run of its own."""
    n = len(groups)
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    differs = pc.not_equal(groups.slice(1), groups.slice(0, n - 1))
    begins = np.ones(n, dtype=bool)
    begins[1:] = pc.fill_null(differs, True).to_numpy()
    return np.flatnonzero(begins).astype(np.int64)
