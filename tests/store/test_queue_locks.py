"""Queue locks and resets in the tables, however the log is cut into transactions."""

import pytest

from rmq_pipeline.store.events import Kind
from tests.store.conftest import OpenDatabase
from tests.store.rows import START_MS, Row, dispatch, event, events, group, on_queue, topic


def locked(client: str, at: int, *, queue_id: int = 0, until: int = 60) -> Row:
    return on_queue(
        Kind.QUEUE_LOCKED,
        -1,
        queue_id=queue_id,
        client_id=client,
        at_ms=START_MS + at,
        epoch=START_MS,
        visible_at_ms=START_MS + until,
    )


HISTORY = [
    topic(2, "departures", queues=3),
    group(1, "rotations"),
    locked("a", 0),
    locked("a", 1, queue_id=1),
    on_queue(Kind.RESET, 5),
    locked("a", 2, until=90),
    on_queue(Kind.QUEUE_UNLOCKED, -1, queue_id=1, client_id="a"),
    locked("c", 3, queue_id=2),
    on_queue(Kind.RESET, 2, delivery=-1),
    on_queue(Kind.RESET, 7),
    on_queue(Kind.QUEUE_UNLOCKED, -1, queue_id=2, client_id="c"),
    locked("b", 4, queue_id=2),
]


@pytest.mark.parametrize("rows", [1, 2, 5, len(HISTORY)])
def test_the_last_event_of_a_queue_is_its_lock_and_resets_add_up(
    open_database: OpenDatabase, rows: int
) -> None:
    database = open_database()
    for start in range(0, len(HISTORY), rows):
        dispatch(database, [events(*HISTORY[start : start + rows])])

    state = open_database().load_state()

    names = ("queue_id", "client_id", "expires_at_ms", "locked_at_ms", "renewed_at_ms")
    assert [tuple(row[name] for name in names) for row in state.queue_locks.to_pylist()] == [
        (0, "a", START_MS + 90, START_MS, START_MS + 2),
        (2, "b", START_MS + 60, START_MS, START_MS + 4),
    ]
    assert [tuple(row.values()) for row in state.resets.to_pylist()] == [(1, 2, 0, 2)]


@pytest.mark.parametrize("kind", [Kind.TOPIC_DELETED, Kind.GROUP_DELETED])
def test_they_go_with_their_topic_or_group(open_database: OpenDatabase, kind: Kind) -> None:
    database = open_database()
    dispatch(database, [events(*HISTORY)])
    ids = {"topic_id": 2} if kind == Kind.TOPIC_DELETED else {"group_id": 1}

    dispatch(database, [events(event(kind, **ids))])

    state = database.load_state()
    assert not state.queue_locks.num_rows
    assert not state.resets.num_rows
