"""The state at start: DuckDB's tables at their log position, and the frames after it."""

import itertools

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker import event_rows, placed
from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.schedule import Scheduled
from rmq_pipeline.broker.state import State, Window
from rmq_pipeline.broker.writer import EVENTS, MESSAGES
from rmq_pipeline.group import Group
from rmq_pipeline.store.commit_log import CommitLog
from rmq_pipeline.store.database import StoredState
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import Topic


def recover(stored: StoredState, commit_log: CommitLog) -> State:
    """The state that the log says, without reading more of it than dispatch has not seen."""
    state = State(
        next_topic_id=stored.next_topic_id,
        next_group_id=stored.next_group_id,
        last_at_ms=stored.last_at_ms,
    )
    for detail in stored.topics.column("detail").to_pylist():
        state.put_topic(Topic.from_json(detail))
    for detail in stored.groups.column("detail").to_pylist():
        state.put_group(Group.from_json(detail))
    for head in stored.heads.to_pylist():
        topic = state.topics.get(head["topic_id"])
        if topic is not None:
            queue = topic.queues[head["queue_id"]]
            queue.min_offset, queue.max_offset = head["min_offset"], head["max_offset"]
    _load_consumptions(state, stored)
    _load_schedule(state, stored.scheduled)
    for row in stored.windows.to_pylist():
        state.windows[row["name"]] = Window(
            row["name"],
            row["owner"] or "",
            row["epoch"],
            row["expires_at_ms"],
            row["settle_id"] or "",
            row["settle_answer"] or "",
        )
    replay(state, commit_log, start=stored.dispatched)
    return state


def replay(state: State, commit_log: CommitLog, *, start: int) -> None:
    """Apply all frames from ``start`` on."""
    for _, sections in commit_log.frames(start, commit_log.end):
        for section in sections:
            if section.kind == MESSAGES:
                state.append(placed.from_batch(section.batch), section.position)
            elif section.kind == EVENTS:
                for events in event_rows.from_batch(section.batch):
                    state.apply(events)


def _load_consumptions(state: State, stored: StoredState) -> None:
    for kind, table in (
        (Kind.CURSOR, stored.cursors),
        (Kind.INVISIBLE, stored.leases),
        (Kind.BEHIND, stored.behind),
    ):
        for events in _runs(kind, table):
            state.apply(events)


def _runs(kind: Kind, table: pa.Table) -> list[EventRows]:
    """A state table as events that set its rows, queue by queue; it is sorted by them."""
    columns = {
        field.name: table.column(field.name).to_numpy()
        for field in table.schema
        if pa.types.is_integer(field.type)
    }
    if not table.num_rows:
        return []
    keys = ("group_id", "topic_id", "queue_id")
    changes = np.zeros(table.num_rows, dtype=np.bool_)
    changes[0] = True
    for name in keys:
        changes[1:] |= np.diff(columns[name]) != 0
    bounds = [*np.flatnonzero(changes).tolist(), table.num_rows]
    runs = []
    for start, stop in itertools.pairwise(bounds):
        run = {name: values[start:stop] for name, values in columns.items()}
        fixed = {name: int(run.pop(name)[0]) for name in keys}
        runs.append(EventRows(kind=kind, at_ms=0, **fixed, **run))  # type: ignore[arg-type]
    return runs


def _load_schedule(state: State, table: pa.Table) -> None:
    if table.num_rows:
        state.schedule.add(
            Scheduled(
                *(
                    table.column(name).to_numpy()
                    for name in (
                        "deliver_at_ms",
                        "queue_id",
                        "queue_offset",
                        "position",
                        "row",
                        "target_topic_id",
                    )
                )
            )
        )
