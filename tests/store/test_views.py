"""The views say with names what the tables say with ids."""

import json
from typing import Any

import pytest

from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID
from tests.store import rows
from tests.store.conftest import OpenDatabase
from tests.store.rows import (
    START_MS,
    Row,
    dispatch,
    event,
    events,
    hash_of,
    message,
    messages,
    on_queue,
)


@pytest.fixture
def database(open_database: OpenDatabase) -> Database:
    """Topic departures (2) of two queues, its dead letters (3), group rotations (1)."""
    database = open_database()
    names = [
        rows.topic(SCHEDULE_TOPIC_ID, "SCHEDULE_TOPIC_XXXX", queues=19),
        rows.topic(2, "departures", type="fifo", queues=2),
        rows.topic(3, "%DLQ%rotations"),
        rows.group(1, "rotations", order="message_group"),
    ]
    dispatch(database, [events(*names)])
    return database


def select(database: Database, sql: str) -> list[Row]:
    found: list[Row] = database.query(sql, timeout_s=60).to_pylist()
    return found


def sent(n: int, *, queue_id: int = 0, **columns: Any) -> rows.Part:
    return messages(*(message(2, queue_id, i, **columns) for i in range(n)))


def test_topics_and_groups_have_their_settings(database: Database) -> None:
    assert select(database, "FROM topics WHERE topic = 'departures'") == [
        {
            "topic": "departures",
            "topic_id": 2,
            "type": "fifo",
            "queues": 2,
            "partition_time": "stored",
            "deduplicate": "none",
            "deduplicate_window_ms": None,
            "retention_ms": None,
            "retention_bytes": None,
            "created_at_ms": START_MS,
        }
    ]
    assert select(database, "FROM consumer_groups") == [
        {
            "consumer_group": "rotations",
            "group_id": 1,
            "order": "message_group",
            "max_attempts": 3,
            "backoff_ms": [10, 20],
            "backoff": "customized",
            "on_failure": "dead_letter",
            "max_rate_per_s": None,
            "created_at_ms": START_MS,
        }
    ]


def test_messages_have_all_but_body_and_properties(database: Database) -> None:
    row = message(2, 1, 0, tag="UA", keys=["1545"], message_group="N14228")
    dispatch(database, [messages(row)])

    assert select(database, "FROM messages") == [
        {
            "topic": "departures",
            "queue_id": 1,
            "queue_offset": 0,
            "message_id": "m-2-1-0",
            "tag": "UA",
            "keys": ["1545"],
            "message_group": "N14228",
            "born_at_ms": START_MS,
            "stored_at_ms": START_MS,
            "deliver_at_ms": None,
        }
    ]


def test_in_flight_and_retrying_part_the_unsettled(database: Database) -> None:
    lease = {"attempt": 1, "visible_at_ms": 99, "delivery": 5, "epoch": 2, "client_id": "me"}
    dispatch(database, [sent(3, message_group="a"), events(on_queue(Kind.LEASE, 0, **lease))])
    said = {"reason": "no engine", "error_type": "EngineError", "traceback": "in take_off"}
    failed = on_queue(Kind.RETRY, 1, attempt=1, visible_at_ms=77, detail=said)
    dispatch(database, [events(failed)])
    dispatch(database, [events(on_queue(Kind.RETRY, 2, attempt=3, delivery=-1))])
    place = {"consumer_group": "rotations", "topic": "departures", "queue_id": 0}

    assert select(database, "FROM in_flight") == [
        {
            **place,
            "queue_offset": 0,
            "message_id": "m-2-0-0",
            "message_group": "a",
            "delivery_attempt": 1,
            "visible_at_ms": 99,
            "client_id": "me",
            "epoch": 2,
        }
    ]
    retrying = select(database, "FROM retrying ORDER BY queue_offset")
    assert [row["queue_offset"] for row in retrying] == [1, 2]
    assert retrying[0] == {
        **place,
        "queue_offset": 1,
        "message_id": "m-2-0-1",
        "message_group": "a",
        "delivery_attempts": 1,
        "visible_at_ms": 77,
        "reason": "no engine",
        "error_type": "EngineError",
        "signature": None,
        "run_id": None,
        "traceback": "in take_off",
    }


def test_scheduled_is_what_waits_for_its_time(database: Database) -> None:
    waits = {"target_topic_id": 2, "message_group": "a"}
    dispatch(
        database,
        [
            messages(
                message(SCHEDULE_TOPIC_ID, 2, 0, deliver_at_ms=30, **waits),
                message(SCHEDULE_TOPIC_ID, 2, 1, deliver_at_ms=40, **waits),
                message(SCHEDULE_TOPIC_ID, 18, 0, deliver_at_ms=50, **waits),
            )
        ],
        [
            events(
                event(
                    Kind.SCHEDULE_DELIVERED, topic_id=SCHEDULE_TOPIC_ID, queue_id=2, queue_offset=0
                )
            )
        ],
    )

    found = select(database, "FROM scheduled ORDER BY deliver_at_ms")

    assert [(row["deliver_at_ms"], row["delay_level"], row["topic"]) for row in found] == [
        (40, 3, "departures"),
        (50, None, "departures"),
    ]
    assert found[0]["message_id"] == "m-1-2-1"
    assert found[0]["message_group"] == "a"


def test_dead_letters_know_where_they_came_from(database: Database) -> None:
    origin = {
        "DLQ_ORIGIN_TOPIC": "departures",
        "DLQ_ORIGIN_MESSAGE_ID": "m-2-1-7",
        "DLQ_ORIGIN_QUEUE_ID": "1",
        "DLQ_ORIGIN_QUEUE_OFFSET": "7",
        "DLQ_REASON": "no departure time",
        "DLQ_ERROR_TYPE": "KeyError",
        "DLQ_SIGNATURE": "0123456789ab",
        "DLQ_RUN_ID": "run-1",
        "DLQ_ATTEMPTS": "3",
    }
    letter = message(3, 0, 0, tag="UA", message_group="a", properties=[*origin.items()])
    dispatch(database, [messages(message(2, 1, 7), letter)])

    assert select(database, "FROM dead_letters") == [
        {
            "consumer_group": "rotations",
            "topic": "departures",
            "message_id": "m-2-1-7",
            "origin_queue_id": 1,
            "origin_queue_offset": 7,
            "reason": "no departure time",
            "error_type": "KeyError",
            "signature": "0123456789ab",
            "run_id": "run-1",
            "attempts": 3,
            "dead_lettered_at_ms": START_MS,
            "tag": "UA",
            "keys": None,
            "message_group": "a",
            "born_at_ms": START_MS,
            "stored_at_ms": START_MS,
            "dead_letter_topic": "%DLQ%rotations",
            "queue_id": 0,
            "queue_offset": 0,
            "properties": [*origin.items()],
            "redriven_at_ms": None,
            "redrive_id": None,
        }
    ]


def test_dead_letters_of_a_topic_made_in_the_same_transaction_count(
    open_database: OpenDatabase,
) -> None:
    database = open_database()

    letter = message(3, 0, 0, properties=[("DLQ_REASON", "x")])
    dispatch(database, [events(rows.topic(3, "%DLQ%g"))], [messages(letter)])

    assert select(database, "SELECT consumer_group, reason FROM dead_letters") == [
        {"consumer_group": "g", "reason": "x"}
    ]


def test_progress_counts_what_is_unsettled(database: Database) -> None:
    dispatch(
        database,
        [
            sent(9),
            events(
                *(on_queue(Kind.LEASE, i, delivery=1) for i in range(5)),
                on_queue(Kind.ACK, 0),
                on_queue(Kind.ACK, 3),
                on_queue(Kind.RETRY, 2),
                on_queue(Kind.PARK, 4, delivery=-2),
                on_queue(Kind.CURSOR, 0, queue_id=1),
            ),
        ],
    )
    names = {"consumer_group": "rotations", "topic": "departures"}

    assert select(database, "FROM progress ORDER BY queue_id") == [
        {
            **names,
            "queue_id": 0,
            "min_offset": 0,
            "max_offset": 9,
            "cursor": 5,
            "committed_offset": 1,
            "in_flight": 1,
            "retrying": 1,
            "parked": 1,
        },
        {
            **names,
            "queue_id": 1,
            "min_offset": 0,
            "max_offset": 0,
            "cursor": 0,
            "committed_offset": 0,
            "in_flight": 0,
            "retrying": 0,
            "parked": 0,
        },
    ]


def lag(database: Database) -> list[tuple[int, int | None]]:
    found = select(database, "SELECT lag, oldest_unread_at_ms FROM lag ORDER BY queue_id")
    return [(row["lag"], row["oldest_unread_at_ms"]) for row in found]


def test_lag_is_unread_and_unsettled_messages(database: Database) -> None:
    dispatch(database, [sent(9), sent(4, queue_id=1), events(on_queue(Kind.CURSOR, 0))])
    unread = lag(database)
    leased = [on_queue(Kind.LEASE, i, delivery=1) for i in range(9)]
    dispatch(database, [events(*leased, *(on_queue(Kind.ACK, i) for i in (0, 1, 5)))])
    unsettled = lag(database)
    dispatch(database, [events(*(on_queue(Kind.ACK, i) for i in (2, 3, 4, 6, 7, 8)))])

    assert unread == [(9, START_MS)]
    assert unsettled == [(6, START_MS + 2)]
    assert lag(database) == [(0, None)]


def test_lag_counts_what_waits_behind_the_cursor(database: Database) -> None:
    a, b = hash_of("a"), hash_of("b")
    turns = [message(2, 0, i, message_group="ab"[i % 2]) for i in range(10)]
    dispatch(
        database,
        [
            messages(*turns),
            events(
                on_queue(Kind.LEASE, 0, delivery=1, message_group_hash=a),
                *(on_queue(Kind.LEASE, i, delivery=2, message_group_hash=b) for i in (1, 3, 5)),
                *(on_queue(Kind.ACK, i) for i in (1, 3, 5)),
                on_queue(Kind.CURSOR, 8),
                on_queue(Kind.BEHIND, 2, message_group_hash=a),
                on_queue(Kind.BEHIND, 7, message_group_hash=b),
            ),
        ],
    )
    # Unread 8 and 9; in flight 0; waiting 2, 4, 6 of a and 7 of b.
    first = lag(database)
    dispatch(database, [events(on_queue(Kind.LEASE, 7, delivery=3, message_group_hash=b))])

    assert first == [(7, START_MS)]
    assert lag(database) == [(7, START_MS)]


def test_trace_tells_all_that_happened_to_a_message(database: Database) -> None:
    dispatch(database, [sent(2)])
    dispatch(database, [events(on_queue(Kind.LEASE, 1, at_ms=START_MS + 5, client_id="me"))])
    failed = {"at_ms": START_MS + 6, "attempt": 1, "detail": "no time"}
    dispatch(database, [events(on_queue(Kind.RETRY, 1, **failed), on_queue(Kind.ACK, 0))])

    found = select(database, "FROM message_trace WHERE message_id = 'm-2-0-1' ORDER BY at_ms")

    assert [(row["what"], row["consumer_group"], row["detail"]) for row in found] == [
        ("stored", None, None),
        ("lease", "rotations", None),
        ("retry", "rotations", "no time"),
    ]
    assert {row["topic"] for row in found} == {"departures"}


def test_events_have_names_for_kinds_topics_and_groups(database: Database) -> None:
    report = event(Kind.UPKEEP_FALLBACK, detail={"job": "seal", "rows": 5})
    dispatch(database, [events(on_queue(Kind.LEASE, 4), report)])

    found = select(
        database,
        "SELECT kind, consumer_group, topic, queue_offset, detail ->> '$.job' AS job FROM events"
        " WHERE kind IN ('lease', 'upkeep_fallback') ORDER BY position, \"row\"",
    )

    assert [tuple(row.values()) for row in found] == [
        ("lease", "rotations", "departures", 4, None),
        ("upkeep_fallback", None, None, -1, "seal"),
    ]


def test_lite_subscriptions_have_a_row_for_each_lite_topic(database: Database) -> None:
    names = json.dumps(["a", "it's"])
    subscribed = event(Kind.LITE_SUBSCRIPTION, group_id=1, topic_id=2, client_id="me", detail=names)
    dispatch(database, [events(subscribed)])

    assert select(database, "FROM lite_subscriptions ORDER BY lite_topic") == [
        {
            "consumer_group": "rotations",
            "topic": "departures",
            "client_id": "me",
            "lite_topic": name,
        }
        for name in ("a", "it's")
    ]


def test_windows_sink_files_and_segments_are_listed(database: Database) -> None:
    opened = event(
        Kind.WINDOW, detail="consumer/rotations", epoch=3, visible_at_ms=50, client_id="run-1"
    )
    settled = {"window": "consumer/rotations", "settle_id": "s1", "answer": {"acked": 2}}
    offsets = [{"queue_id": 1, "base": 0, "end": 5}]
    file = {"path": "f", "rows": 1, "bytes": 2, "partition": "hour=1", "offsets": offsets}
    segment = {"path": "s", "base": 0, "end": 5, "rows": 5, "bytes": 9}
    dispatch(
        database,
        [
            events(
                opened,
                event(Kind.SETTLED, group_id=1, epoch=3, detail=settled),
                event(Kind.SINK_FILE, group_id=1, epoch=3, delivery=7, detail=file),
                event(Kind.SEGMENT, topic_id=2, queue_id=1, queue_offset=0, detail=segment),
            )
        ],
    )

    assert select(database, "SELECT name, owner, epoch, expires_at_ms, settle_id FROM windows") == [
        {
            "name": "consumer/rotations",
            "owner": "run-1",
            "epoch": 3,
            "expires_at_ms": 50,
            "settle_id": "s1",
        }
    ]
    assert select(database, "FROM sink_files") == [
        {"consumer_group": "rotations", **file, "epoch": 3, "at_ms": START_MS, "version": 7}
    ]
    assert select(database, "FROM segments") == [{"topic": "departures", "queue_id": 1, **segment}]


@pytest.mark.parametrize("view", ["half", "parked"])
def test_half_and_parked_are_there_and_empty(database: Database, view: str) -> None:
    assert select(database, f"FROM {view}") == []
