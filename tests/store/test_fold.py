"""Dispatch leaves what its messages and events say, however they are cut into transactions."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import CONSUMPTION, Kind
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID
from tests.histories import histories
from tests.store import rows
from tests.store.conftest import OpenDatabase
from tests.store.fold_model import ENDS_WAIT, REGULAR, Model, state_of
from tests.store.rows import Row, dispatch, event, events, message, messages, on_queue, rows_of


@pytest.fixture
def database(open_database: OpenDatabase) -> Database:
    return open_database()


small = st.integers(0, 3)
number = st.integers(0, 5)
text = st.sampled_from(["", "a", "b"]).map(lambda t: t or None)
places = {
    "group_id": st.integers(1, 2),
    "topic_id": st.integers(2, 3),
    "queue_id": st.integers(0, 1),
}


def made(kinds: list[Kind], **columns: st.SearchStrategy[Any]) -> st.SearchStrategy[Row]:
    return st.builds(event, st.sampled_from(kinds), **columns)


consumption = made(
    [Kind(kind) for kind in sorted(CONSUMPTION)],
    **places,
    queue_offset=number,
    attempt=small,
    visible_at_ms=number,
    delivery=small,
    epoch=small,
    message_group_hash=small,
    client_id=text,
    detail=text,
)
moves = made([Kind.CURSOR, Kind.OFFSET_UPDATED, Kind.RESET], **places, queue_offset=number)
waits = made([Kind.BEHIND, Kind.CAUGHT_UP], **places, queue_offset=number, message_group_hash=small)
verdicts = made(
    [Kind.QUARANTINE, Kind.LIFT],
    **places,
    queue_offset=number,
    message_group_hash=small,
    detail=text,
)
deliveries = made(
    ENDS_WAIT,
    topic_id=st.just(SCHEDULE_TOPIC_ID),
    queue_id=small,
    queue_offset=number,
)
windows = made(
    [Kind.WINDOW, Kind.WINDOW_CLOSED],
    detail=st.sampled_from(["consumer/a", "upkeep/b"]),
    epoch=small,
    client_id=text,
    visible_at_ms=number,
)
settles = made(
    [Kind.SETTLED],
    detail=st.fixed_dictionaries(
        {
            "window": st.sampled_from(["consumer/a", "upkeep/b"]),
            "settle_id": st.sampled_from(["s1", "s2"]),
            "answer": st.fixed_dictionaries({"acked": small}),
        }
    ),
)
locks = made(
    [Kind.QUEUE_LOCKED, Kind.QUEUE_UNLOCKED],
    **places,
    client_id=text,
    visible_at_ms=number,
    epoch=small,
)
subscriptions = made(
    [Kind.LITE_SUBSCRIPTION],
    group_id=places["group_id"],
    topic_id=places["topic_id"],
    client_id=st.sampled_from(["a", "b"]),
    detail=st.sampled_from(['["x"]', "[]"]),
)
names = st.one_of(
    st.builds(rows.topic, places["topic_id"], st.sampled_from(["t", "u"])),
    st.builds(rows.group, places["group_id"], st.sampled_from(["g", "h"])),
)
deletions = st.one_of(
    made([Kind.TOPIC_DELETED], topic_id=st.just(3)), made([Kind.GROUP_DELETED], group_id=st.just(2))
)
an_event = st.one_of(
    *(consumption, consumption, consumption, moves, waits, waits, verdicts),
    *(deliveries, windows, settles, names, locks, subscriptions),
)
#: What becomes of one frame: events, and how many messages go to each of two queues.
frame = st.tuples(st.lists(an_event, max_size=12), st.tuples(small, small), st.booleans())


@histories(20)
@given(
    transactions=st.lists(st.lists(frame, min_size=1, max_size=3), min_size=1, max_size=4),
    deletion=st.none() | deletions,
)
def test_tables_are_the_state_after_the_last_event(
    transactions: list[list[tuple[list[Row], tuple[int, int], bool]]], deletion: Row | None
) -> None:
    model = Model()
    offsets: dict[tuple[int, int], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        database = Database.open(Path(folder) / "state.duckdb", memory_bytes=100_000_000)

        for number_of, frames in enumerate(transactions):
            parts = []
            is_last = number_of == len(transactions) - 1
            for some_events, counts, is_scheduled in frames:
                sent = placed(counts, is_scheduled=is_scheduled, offsets=offsets)
                for row in sent:
                    model.take_message(row)
                told = [row for row in some_events if model.take_event(row)]
                parts.append([messages(*sent), events(*told)])
            if is_last and deletion is not None:
                parts.append([events(deletion)])
                model.take_event(deletion)
            dispatch(database, *parts)
        model.end()
        found = state_of(database)
        database.close()

    model.dead.clear()
    assert found == model


@pytest.mark.parametrize("name", sorted(REGULAR.keys() - {"topics", "groups"}))
def test_each_kind_of_event_sets_or_removes_the_row_of_its_key(
    database: Database, name: str
) -> None:
    """Many events of one table on few keys, so that each kind meets rows that are there."""
    rule, chance = REGULAR[name], random.Random(name)
    kinds = [*rule.sets, *rule.sets, *rule.removes, *[Kind.RESET] * rule.is_reset]
    model = Model()
    for _ in range(12):
        parts = []
        for _ in range(3):
            told = [
                event(
                    chance.choice(kinds),
                    group_id=1,
                    topic_id=2,
                    queue_id=chance.randrange(2),
                    **{n: chance.randrange(3) for n in ("queue_offset", "message_group_hash")},
                    **{n: chance.randrange(9) for n in ("attempt", "visible_at_ms", "epoch")},
                    delivery=chance.randrange(9),
                    client_id=chance.choice(["a", "b"]),
                    detail=chance.choice(["[]", '["x"]', None] if not rule.none else ["[]", "[1]"]),
                )
                for _ in range(4)
            ]
            for row in told:
                model.take_event(row)
            parts.append([events(*told)])
        dispatch(database, *parts)

        assert state_of(database).regular == model.regular


def placed(
    counts: tuple[int, int], *, is_scheduled: bool, offsets: dict[tuple[int, int], int]
) -> list[Row]:
    """Messages on two queues, at the offsets that follow."""
    topic_id = SCHEDULE_TOPIC_ID if is_scheduled else 2
    sent = []
    for queue_id, n in enumerate(counts):
        first = offsets.get((topic_id, queue_id), 0)
        offsets[(topic_id, queue_id)] = first + n
        columns = {"deliver_at_ms": 9, "target_topic_id": 2} if is_scheduled else {}
        sent += [message(topic_id, queue_id, first + i, **columns) for i in range(n)]
    return sent


def test_the_position_and_the_tables_move_together(database: Database) -> None:
    dispatch(database, [messages(message(2, 0, 0)), events(on_queue(Kind.LEASE, 0))])
    before = database.dispatched

    with pytest.raises(KeyError):
        dispatch(database, [messages(message(2, 0, 1)), (9, messages(message(2, 0, 2))[1])])

    assert database.dispatched == before == database.load_state().dispatched
    assert rows_of(database.load_state().heads) == [(2, 0, 0, 1)]
    dispatch(database, [messages(message(2, 0, 1))])
    assert rows_of(database.load_state().heads) == [(2, 0, 0, 2)]


def test_reset_keeps_what_follows_it_in_the_same_transaction(database: Database) -> None:
    dispatch(
        database,
        [
            events(
                on_queue(Kind.LEASE, 7, delivery=1),
                on_queue(Kind.BEHIND, 5, message_group_hash=9),
                on_queue(Kind.RESET, 3),
                on_queue(Kind.LEASE, 3, delivery=2),
            )
        ],
    )

    stored = database.load_state()
    assert rows_of(stored.cursors) == [(1, 2, 0, 4)]
    assert [row[3] for row in rows_of(stored.leases)] == [3]
    assert stored.behind.num_rows == 0


def test_time_and_ids_are_the_largest_ever_seen(database: Database) -> None:
    dispatch(database, [events(rows.topic(7, "t"), rows.group(4, "g"))])
    dispatch(
        database,
        [
            events(
                event(Kind.TOPIC_DELETED, topic_id=7, at_ms=rows.START_MS + 50),
                event(Kind.GROUP_DELETED, group_id=4),
            )
        ],
    )
    dispatch(database, [messages(message(2, 0, 0, stored_at_ms=rows.START_MS + 20))])

    stored = database.load_state()

    assert (stored.next_topic_id, stored.next_group_id) == (8, 5)
    assert stored.last_at_ms == rows.START_MS + 50
    assert stored.topics.num_rows == stored.groups.num_rows == 0


def test_lite_subscriptions_are_the_last_of_each_client(database: Database) -> None:
    def subscribed(client: str, *names: str, topic_id: int = 2) -> Row:
        return event(
            Kind.LITE_SUBSCRIPTION,
            group_id=1,
            topic_id=topic_id,
            client_id=client,
            detail=json.dumps(names),
        )

    naming = [rows.topic(2, "a"), rows.topic(3, "b"), rows.group(1, "g")]
    dispatch(database, [events(*naming, subscribed("one", "x"), subscribed("other", "y"))])
    dispatch(
        database,
        [events(subscribed("one", "x", "z"), subscribed("late", "q"), subscribed("late"))],
        [events(subscribed("one", "n"), subscribed("other"), subscribed("o", "p", topic_id=3))],
    )
    kept = database.load_state().lite_subscriptions.to_pylist()
    dispatch(database, [events(event(Kind.TOPIC_DELETED, topic_id=3))])
    left = database.load_state().lite_subscriptions.to_pylist()

    found = [(row["topic_id"], row["client_id"], row["lite_topics"]) for row in kept]
    assert found == [(2, "one", '["n"]'), (3, "o", '["p"]')]
    assert left == kept[:1]


def test_registered_files_are_kept_in_their_order(database: Database) -> None:
    file = {"rows": 10, "bytes": 1000, "partition": "hour=1"}
    sink_file: rows.Row = {"kind": Kind.SINK_FILE, "group_id": 1, "epoch": 3, "delivery": 1}
    segment = {"path": "a/0.parquet", "base": 0, "end": 10, "rows": 10, "bytes": 99}
    archive = {"path": "events/0.parquet", "from_position": 0, "to_position": 640, "rows": 3}
    dispatch(
        database,
        [
            events(
                event(**sink_file, detail={**file, "path": "b"}),
                event(**sink_file, detail={**file, "path": "a"}),
                event(Kind.SEGMENT, topic_id=2, queue_id=0, queue_offset=0, detail=segment),
                event(Kind.EVENT_SEGMENT, detail=archive),
            )
        ],
    )

    stored = database.load_segments()

    assert rows_of(database.sink_files(1, removed=False)[1]) == [
        ("b", 10, 1000, "hour=1", None, 3, rows.START_MS, 1),
        ("a", 10, 1000, "hour=1", None, 3, rows.START_MS, 1),
    ]
    assert database.sink_files(2, removed=False)[1].num_rows == 0
    assert rows_of(stored.segments) == [(2, 0, 0, 10, "a/0.parquet")]
    assert rows_of(stored.event_segments) == [("events/0.parquet", 0, 640, 3)]


def test_many_small_sections_are_one_transaction(database: Database) -> None:
    frames = [
        [messages(message(2, 0, i, tag=f"tag-{i % 3}")), events(on_queue(Kind.LEASE, i))]
        for i in range(300)
    ]

    dispatch(database, *frames)

    page = database.index(2, 0, start=0, stop=1000)
    assert page.position.tolist() == [64 + 320 * i for i in range(300)]
    assert set(page.row.tolist()) == {0}
    assert len(set(page.tag_hash.tolist())) == 3
    assert database.load_state().leases.num_rows == 300


def test_empty_sections_and_frames_only_move_the_position(database: Database) -> None:
    dispatch(database, [messages(), events()], [])

    assert database.dispatched == 384
    assert database.load_state().dispatched == 384


def test_nothing_to_dispatch_is_nothing(database: Database) -> None:
    database.dispatch([])

    assert database.dispatched == 0
