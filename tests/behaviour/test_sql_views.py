"""The views say what the broker did, up to the call before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

VIEWS = (
    "in_flight",
    "scheduled",
    "half",
    "retrying",
    "parked",
    "dead_letters",
    "redrives",
    "progress",
    "lag",
    "message_trace",
    "topics",
    "consumer_groups",
    "messages",
    "events",
    "windows",
    "lite_subscriptions",
    "sink_files",
    "sink_replacements",
    "segments",
)


@pytest.mark.every_endpoint
def test_every_view_answers_on_a_new_home(endpoint: Endpoint) -> None:
    for view in VIEWS:
        assert endpoint.broker.sql(f"SELECT * FROM {view}").num_columns > 0, view


def test_in_flight_reads_its_own_writes(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(5))
    got = endpoint.broker.receive(
        readers, name, limit=3, invisible_duration_ms=10_000, client_id="me"
    )
    query = (
        "SELECT consumer_group, topic, queue_id, queue_offset, delivery_attempt, visible_at_ms,"
        " client_id FROM in_flight ORDER BY queue_offset"
    )

    before = endpoint.sql(query)
    endpoint.broker.ack(got.slice(0, 2))
    after = endpoint.sql(query)

    assert before[0] == {
        "consumer_group": readers,
        "topic": name,
        "queue_id": 0,
        "queue_offset": 0,
        "delivery_attempt": 1,
        "visible_at_ms": endpoint.clock.now_ms() + 10_000,
        "client_id": "me",
    }
    assert [row["queue_offset"] for row in before] == [0, 1, 2]
    assert [row["queue_offset"] for row in after] == [2]


def test_scheduled_reads_its_own_writes(endpoint: Endpoint, topic: Make, messages: Make) -> None:
    name = topic(type="delay", queues=1)
    now = endpoint.clock.now_ms()
    endpoint.broker.send(name, messages(2, delay_level=[1, 3]))
    query = "SELECT topic, deliver_at_ms FROM scheduled ORDER BY deliver_at_ms"

    before = endpoint.sql(query)
    endpoint.advance(1_000)
    endpoint.broker.deliver_scheduled()
    after = endpoint.sql(query)

    assert before == [
        {"topic": name, "deliver_at_ms": now + 1_000},
        {"topic": name, "deliver_at_ms": now + 10_000},
    ]
    assert after == before[1:]


def test_retrying_reads_its_own_writes(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[5_000])
    endpoint.broker.send(name, messages(2))
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    query = "SELECT consumer_group, topic, queue_id, queue_offset, visible_at_ms FROM retrying"

    before = endpoint.sql(query)
    due = endpoint.clock.now_ms() + 5_000
    endpoint.advance(5_000)
    endpoint.broker.ack(endpoint.broker.receive(readers, name))
    after = endpoint.sql(query)

    assert before == [
        {
            "consumer_group": readers,
            "topic": name,
            "queue_id": 0,
            "queue_offset": 0,
            "visible_at_ms": due,
        }
    ]
    assert after == []


def test_dead_letters_reads_its_own_writes(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    sent = endpoint.broker.send(name, messages(1))
    endpoint.broker.forward_to_dead_letter_queue(
        endpoint.broker.receive(readers, name), reason="why"
    )

    [row] = endpoint.sql("SELECT * FROM dead_letters")

    assert row["consumer_group"] == readers
    values = {str(value) for value in row.values()}
    assert {name, "why", sent["message_id"][0].as_py()} <= values


def test_progress_has_a_row_for_every_queue_touched(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=2), group()
    untouched = group()
    endpoint.broker.send(name, messages(20))
    got = endpoint.broker.receive(readers, name, limit=20)
    mine = got.filter([q == 0 for q in got["queue_id"].to_pylist()])
    endpoint.broker.ack(mine.slice(0, 2))
    fail(readers, mine.slice(3, 1))

    rows = endpoint.sql("SELECT * FROM progress ORDER BY queue_id")

    assert untouched not in {row["consumer_group"] for row in rows}
    rows = [row for row in rows if row["consumer_group"] == readers and row["topic"] == name]
    assert [row["queue_id"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["min_offset"], row["max_offset"], row["cursor"]) == (0, 10, 10)
    counts = [(row["committed_offset"], row["in_flight"], row["retrying"]) for row in rows]
    assert counts == [(2, 7, 1), (0, 10, 0)]


def test_lag_is_what_is_unread_or_unsettled(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    start = endpoint.clock.now_ms()
    for i in range(5):
        endpoint.broker.send(name, messages(2, start=2 * i))
        endpoint.advance(100)
    endpoint.broker.subscribe(readers, name)
    query = (
        "SELECT topic, queue_id, lag, oldest_unread_at_ms FROM lag"
        f" WHERE consumer_group = '{readers}'"
    )

    subscribed = endpoint.sql(query)
    got = endpoint.broker.receive(readers, name, limit=4)
    leased = endpoint.sql(query)
    endpoint.broker.ack(got.slice(0, 3))
    settled = endpoint.sql(query)

    row = {"topic": name, "queue_id": 0}
    assert subscribed == [{**row, "lag": 10, "oldest_unread_at_ms": start}]
    assert leased == [{**row, "lag": 10, "oldest_unread_at_ms": start}]
    assert settled == [{**row, "lag": 7, "oldest_unread_at_ms": start + 100}]


def test_lag_of_a_blocked_message_group_counts_what_waits_behind_it(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(20, groups=["a", "b"]))
    endpoint.broker.receive(readers, name, limit=1)
    endpoint.drain(name, readers)

    [row] = endpoint.sql(f"SELECT lag FROM lag WHERE consumer_group = '{readers}'")

    assert row["lag"] == 10


def test_no_lag_is_left_when_all_is_settled(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=3), group()
    endpoint.broker.send(name, messages(30))
    endpoint.drain(name, readers)

    rows = endpoint.sql(
        f"SELECT lag, oldest_unread_at_ms FROM lag WHERE consumer_group = '{readers}'"
    )

    assert all(row["lag"] == 0 and row["oldest_unread_at_ms"] is None for row in rows)


def test_the_trace_of_a_message_tells_its_story_in_order(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[1_000])
    endpoint.broker.send(name, messages(3, message_id=["m-0", "m-1", "m-2"]))
    endpoint.advance(10)
    got = endpoint.broker.receive(readers, name)
    endpoint.advance(10)
    fail(readers, got.slice(1, 1))
    endpoint.broker.ack(got.take([0, 2]))
    endpoint.advance(1_000)
    endpoint.broker.ack(endpoint.broker.receive(readers, name))

    rows = endpoint.sql("SELECT * FROM message_trace WHERE message_id = 'm-1' ORDER BY at_ms")

    told = " ".join(str(value) for row in rows for value in row.values()).lower()
    start = endpoint.clock.now_ms() - 1_020
    assert [row["at_ms"] - start for row in rows] == [0, 10, 20, 1_020, 1_020]
    assert all(word in told for word in ("stored", "lease", "retry", "ack"))
    assert all(row["topic"] == name for row in rows)


def test_windows_topics_and_groups_are_views(endpoint: Endpoint, topic: Make, group: Make) -> None:
    name, readers = topic(type="fifo", queues=3), group(order="message_group")
    opened = endpoint.broker.open_window("upkeep/seal", owner="run-1", duration_ms=1_000)

    windows = endpoint.sql("SELECT * FROM windows")
    topics = endpoint.sql(f"SELECT * FROM topics WHERE topic = '{name}'")
    groups = endpoint.sql(f"SELECT * FROM consumer_groups WHERE consumer_group = '{readers}'")

    assert [(w["name"], w["owner"], w["epoch"]) for w in windows] == [
        ("upkeep/seal", "run-1", opened["epoch"])
    ]
    assert [(t["type"], t["queues"]) for t in topics] == [("fifo", 3)]
    assert len(groups) == 1


def test_messages_are_found_by_key_tag_and_time(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=2)
    endpoint.broker.send(
        name, messages(10, tag=["a", "b"] * 5, keys=[[f"k{i}", "all"] for i in range(10)])
    )

    by_key = endpoint.sql(
        f"SELECT tag FROM messages WHERE topic = '{name}' AND list_contains(keys, 'k3')"
    )
    by_tag = endpoint.sql(
        f"SELECT count(*) AS n FROM messages WHERE topic = '{name}' AND tag = 'a'"
    )

    assert by_key == [{"tag": "b"}]
    assert by_tag == [{"n": 5}]


def test_sql_sees_what_a_settle_did_in_one_step(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    source, onward, readers = topic(queues=1), topic(queues=1), group()
    query = (
        "SELECT (SELECT coalesce(sum(lag), 0) FROM lag) AS lag,"
        f" (SELECT count(*) FROM messages WHERE topic = '{onward}') AS published"
    )
    seen = set()
    endpoint.broker.subscribe(readers, source)

    for start in range(0, 50, 10):
        endpoint.broker.send(source, messages(10, start=start))
        got = endpoint.broker.receive(readers, source)
        watching = endpoint.pool.submit(endpoint.sql, query)
        endpoint.broker.settle(readers, outcomes(got, "ack"), publish={onward: messages(10)})
        [row] = watching.result(60)
        seen.add((row["lag"], row["published"] - start))
        [row] = endpoint.sql(query)
        seen.add((row["lag"], row["published"] - start))

    assert seen <= {(10, 0), (0, 10)}
