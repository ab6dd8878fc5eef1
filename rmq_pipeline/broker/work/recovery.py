"""State at start: DuckDB's tables at their log position, and the frames after it."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.state import event_rows, placed
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.members import QueueLock
from rmq_pipeline.broker.state.schedule import Scheduled
from rmq_pipeline.broker.state.state import State, Window
from rmq_pipeline.broker.work.writer import EVENTS, KEYED_STATE, MESSAGES
from rmq_pipeline.errors import CorruptLogError
from rmq_pipeline.group import Group
from rmq_pipeline.store.database import Database, StoredState
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.commit_log import CommitLog, Section
from rmq_pipeline.tables import with_sound_texts
from rmq_pipeline.topic import Topic

log = logging.getLogger(__name__)

_NAMING: Final = (Kind.TOPIC, Kind.GROUP)
_Decoded = TypeVar("_Decoded")


def recover(database: Database, commit_log: CommitLog) -> State:
    """Rebuild the state of the log, reading only the frames that DuckDB does not have."""
    state, start = State(), 0
    if database.dispatched:  # before the first frame is dispatched, all tables are empty
        stored = database.load_state()
        state, start = _load(stored), stored.dispatched
    replay(state, commit_log, start=start)
    return state


def _load(stored: StoredState) -> State:
    state = State(
        next_topic_id=stored.next_topic_id,
        next_group_id=stored.next_group_id,
        last_at_ms=stored.last_at_ms,
    )
    for detail in stored.topics.column("detail").to_pylist():
        state.put_topic(Topic.from_json(detail))
    for detail in stored.groups.column("detail").to_pylist():
        state.put_group(Group.from_json(detail))
    state.paces.empty(state.last_at_ms)
    for head in stored.heads.to_pylist():
        topic = state.topics.get(head["topic_id"])
        if topic is not None:
            queue = topic.queues[head["queue_id"]]
            queue.min_offset, queue.max_offset = head["min_offset"], head["max_offset"]
    _load_consumptions(state, stored)
    _load_schedule(state, stored.scheduled)
    for topic_id, rows in stored.recent.items():
        state.duplicates.load(topic_id, rows)
    _load_halves(state, stored.halves)
    state.redriven.load(stored.redriven)
    for row in stored.lite_subscriptions.to_pylist():
        state.subscriptions.put(
            row["group_id"],
            row["topic_id"],
            client_id=row["client_id"],
            detail=row["lite_topics"],
        )
    _load_queue_locks(state, stored)
    for row in stored.sinks.to_pylist():
        state.sinks.load(row["group_id"], version=row["version"], replaced=row["replaced"])
    for row in stored.windows.to_pylist():
        state.windows[row["name"]] = Window(
            row["name"],
            row["owner"] or "",
            row["epoch"],
            row["expires_at_ms"],
            row["settle_id"] or "",
            row["settle_answer"] or "",
        )
    return state


def replay(state: State, commit_log: CommitLog, *, start: int) -> None:
    """Apply all frames from ``start`` on.

    A frame stores its events after its messages. Replay applies the events that create topics and
    groups first, because a message may be in a topic or queue that its own frame creates. Events
    that delete topics and groups come last, together with the messages stored in them.
    """
    position = start
    for end, sections in commit_log.frames(start, commit_log.end):
        state.position = position
        try:
            _replay_frame(state, sections)
        except (ValueError, LookupError, TypeError) as error:
            raise _undecodable(commit_log, position, sections=sections, why=error) from error
        position = end


def _undecodable(
    commit_log: CommitLog, position: int, *, sections: Sequence[Section], why: Exception
) -> CorruptLogError:
    file = commit_log.file_of(position)
    holds = ", ".join(map(_described, sections))
    return CorruptLogError(
        f"{file.path}: the frame at position {position} (byte {file.offset_of(position)}) is whole,"
        f" and cannot be applied: {why!r}. It holds {holds}.",
        remedy="Start the version of rmq_pipeline that wrote it, or restore the home from a copy.",
    )


def _described(section: Section) -> str:
    rows = section.batch
    if section.kind != MESSAGES or not rows.num_rows:
        return f"{rows.num_rows} rows of kind {section.kind}"
    topic_id, queue_id, offset = (
        rows.column(name)[0] for name in ("topic_id", "queue_id", "queue_offset")
    )
    return (
        f"{rows.num_rows} messages of topic {topic_id} from offset {offset} of queue {queue_id} on"
    )


def _replay_frame(state: State, sections: Sequence[Section]) -> None:
    events = [
        rows
        for section in sections
        if section.kind == EVENTS
        for rows in _decoded(section, lambda batch: list(event_rows.from_batch(batch)))
    ]
    for rows in events:
        if rows.kind in _NAMING:
            state.apply(rows)
    for section in sections:
        if section.kind == MESSAGES:
            state.append(_decoded(section, placed.from_batch), section.position)
        elif section.kind == KEYED_STATE:
            state.keep(section.batch)
    for rows in events:
        if rows.kind in _NAMING:
            _take_names(state, rows)
        else:
            state.apply(rows)


def _decoded(section: Section, decode: Callable[[pa.RecordBatch], _Decoded]) -> _Decoded:
    """Decode a section; replace bad UTF-8, which older versions accepted."""
    try:
        return decode(section.batch)
    except UnicodeDecodeError:
        log.warning("bad UTF-8 in texts is replaced: %s", _described(section))
        return decode(with_sound_texts(section.batch))


def _take_names(state: State, events: EventRows) -> None:
    """Restore the names of topics and groups.

    An earlier deletion may have removed a reused name.
    """
    for row in range(len(events)):
        if events.kind == Kind.TOPIC:
            topic = Topic.from_json(events.detail_of(row))
            state.topic_ids[topic.name] = topic.topic_id
        else:
            group = Group.from_json(events.detail_of(row))
            state.group_ids[group.name] = group.group_id


def _load_consumptions(state: State, stored: StoredState) -> None:
    for kind, table in (
        (Kind.CURSOR, stored.cursors),
        (Kind.INVISIBLE, stored.leases),
        (Kind.BEHIND, stored.behind),
        (Kind.QUARANTINE, stored.quarantined_groups),
    ):
        for events in _runs(kind, table):
            state.apply(events)


def _runs(kind: Kind, table: pa.Table) -> list[EventRows]:
    """Return a sorted state table as events that set its rows, queue by queue."""
    columns = {
        field.name: table.column(field.name).to_numpy()
        for field in table.schema
        if pa.types.is_integer(field.type)
    }
    if not table.num_rows:
        return []
    if "epoch" in columns:
        columns |= event_rows.read_epoch(kind, columns.pop("epoch"))
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
        run |= {"detail": _failures(table.slice(start, stop - start))}
        runs.append(EventRows(kind=kind, at_ms=0, **fixed, **run))  # type: ignore[arg-type]
    return runs


def _failures(rows: pa.Table) -> list[str | None] | None:
    """Return the failures of unsettled messages, or those behind quarantines."""
    if "failure" not in rows.column_names:
        return None
    said = rows.column("failure")
    return None if said.null_count == len(said) else said.to_pylist()


def _load_queue_locks(state: State, stored: StoredState) -> None:
    for row in stored.queue_locks.to_pylist():
        key = (row.pop("group_id"), row.pop("topic_id"), row.pop("queue_id"))
        state.queue_locks.put(key, QueueLock(**row))
    for row in stored.resets.to_pylist():
        found = state.consumptions.get((row["group_id"], row["topic_id"], row["queue_id"]))
        if found is not None:
            found.resets = row["resets"]


def _load_halves(state: State, table: pa.Table) -> None:
    if not table.num_rows:
        return
    columns = {
        field.name: table.column(field.name).to_numpy()
        for field in table.schema
        if pa.types.is_integer(field.type)
    }
    offsets = columns["queue_offset"]
    state.halves.add(
        offsets,
        position=columns["position"],
        row=columns["row"],
        target=columns["target_topic_id"],
    )
    producers = table.column("producer_group").combine_chunks().dictionary_encode()
    codes = producers.indices.to_numpy()
    for code, name in enumerate(producers.dictionary.to_pylist()):
        at = codes == code
        state.halves.apply(
            EventRows(
                kind=Kind.HALF,
                at_ms=0,
                queue_offset=offsets[at],
                attempt=columns["checks"][at],
                visible_at_ms=columns["next_check_ms"][at],
                delivery=columns["immunity_ms"][at],
                message_group_hash=columns["message_id_hash"][at],
                client_id=name,
            )
        )


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
