"""Samples have the values of what the broker has done."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work import measuring
from rmq_pipeline.broker.work.meter import body_bytes
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.metrics.declared import BY_NAME, METRICS, SAMPLES
from rmq_pipeline.settings import Settings
from tests.metrics.samples import bodies, counted, has, value, work
from tests.waiting import until

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
GROUP = {"consumer_group": "g", "topic": "t", "is_system": "false"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(home: Path, clock: ManualClock) -> Iterator[Broker]:
    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as broker:
        yield broker


def test_sends_and_deliveries_count_by_message_and_by_byte(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g")
    broker.send("t", bodies(b"a", b"bb"))
    broker.send("t", bodies(b"ccc"))

    broker.receive("g", "t", limit=2)

    kind = {"topic": "t", "message_type": "normal", "is_system": "false"}
    found = counted(broker, "rocketmq_messages_out_total", 2, **GROUP)
    assert found.schema == SAMPLES
    assert value(found, "rocketmq_messages_in_total", **kind) == 3
    assert value(found, "rocketmq_throughput_in_total", **kind) == 6
    assert value(found, "rocketmq_throughput_out_total", **GROUP) == 3
    assert value(found, "rmq_messages", topic="t") == 3


def test_a_message_counts_once_however_it_reaches_its_topic(
    broker: Broker, clock: ManualClock
) -> None:
    work(broker, clock)

    found = counted(broker, "rmq_scheduled_delivered_total", 2)
    sent = "rocketmq_messages_in_total"
    assert value(found, sent, topic="later", message_type="delay") == 3
    assert value(found, sent, topic="pays", message_type="transaction") == 3
    assert value(found, sent) == 4 + 3 + 3, "neither deliveries nor dead letters are sends"
    assert value(found, "rocketmq_throughput_in_total", topic="orders") == 10
    assert value(found, "rocketmq_commit_messages_total") == 1
    assert value(found, "rocketmq_rollback_messages_total") == 1
    assert value(found, "rocketmq_half_messages") == 1
    assert value(found, "rmq_scheduled_messages") == 1
    assert value(found, "rmq_scheduled_overdue_milliseconds") == 0
    assert value(found, "rocketmq_messages_out_total", consumer_group="", topic="orders") == 4


def test_ends_of_deliveries_and_dead_letters_count(broker: Broker, clock: ManualClock) -> None:
    work(broker, clock)

    orders = {"consumer_group": "billing", "topic": "orders"}
    ended = "rmq_deliveries_ended_total"
    counted(broker, ended, 1, **orders, outcome="ack")
    found = counted(broker, ended, 1, **orders, outcome="dead_letter")
    assert value(found, "rocketmq_send_to_dlq_messages_total", **orders) == 1
    assert value(found, "rmq_dead_letters_open", consumer_group="billing") == 1
    audit = {"consumer_group": "audit", "topic": "orders"}
    found = counted(broker, ended, 1, **audit, outcome="park")
    assert value(found, "rmq_parked_messages", **audit) == 1
    assert value(found, "rocketmq_consumer_lag_messages", **audit) == 4


def test_a_redriven_dead_letter_is_open_no_longer(broker: Broker, clock: ManualClock) -> None:
    work(broker, clock)
    counted(broker, "rmq_dead_letters_open", 1, consumer_group="billing")
    letters = broker.sql("SELECT queue_id, queue_offset FROM messages WHERE topic = '%DLQ%billing'")

    broker.redrive("billing", letters, redrive_id="r")

    found = counted(broker, "rmq_dead_letters_open", 0, consumer_group="billing")
    assert value(found, "rmq_messages", topic="%DLQ%billing") == 1


def test_lag_agrees_with_the_verb_lag(broker: Broker, clock: ManualClock) -> None:
    broker.create_topic("t", queues=3)
    broker.create_group("g")
    broker.send("t", bodies(*[b"x"] * 30))
    clock.advance(4_000)
    got = broker.receive("g", "t", limit=12)
    broker.ack(got["receipt_handle"].to_pylist()[:5])

    found = broker.metrics()

    lag = broker.lag("g")
    for name, column in (
        ("rocketmq_consumer_lag_messages", "lag"),
        ("rocketmq_consumer_inflight_messages", "in_flight"),
        ("rmq_retrying_messages", "retrying"),
        ("rmq_parked_messages", "parked"),
    ):
        assert value(found, name, **GROUP) == sum(lag[column].to_pylist()), name
    assert value(found, "rocketmq_consumer_ready_messages", **GROUP) == 18
    assert value(found, "rocketmq_consumer_lag_latency_milliseconds", **GROUP) == 4_000
    assert value(found, "rocketmq_consumer_queueing_latency_milliseconds", **GROUP) == 4_000


def test_waiting_message_groups_are_lag_and_ended_leases_are_ready(
    broker: Broker, clock: ManualClock
) -> None:
    broker.create_topic("t", type="fifo", queues=1)
    broker.create_group("g", order="message_group")
    broker.send("t", bodies(*[b"x"] * 4, message_group=["a", "a", "b", "a"]))
    broker.receive("g", "t", limit=1, invisible_duration_ms=10_000)
    broker.receive("g", "t", limit=10, invisible_duration_ms=10_000)

    before = broker.metrics()
    clock.advance(10_001)
    after = broker.metrics()

    assert value(before, "rocketmq_consumer_lag_messages", **GROUP) == 4
    assert value(before, "rocketmq_consumer_inflight_messages", **GROUP) == 2
    assert value(before, "rocketmq_consumer_ready_messages", **GROUP) == 2
    assert value(after, "rocketmq_consumer_ready_messages", **GROUP) == 4


def test_ages_survive_a_restart(home: Path, broker: Broker, clock: ManualClock) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g")
    broker.send("t", bodies(b"x"))
    broker.receive("g", "t", invisible_duration_ms=1_000)
    clock.advance(60_000)
    broker.close()

    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as again:
        found = again.metrics()

    assert value(found, "rocketmq_consumer_lag_latency_milliseconds", **GROUP) == 60_000
    assert value(found, "rocketmq_consumer_lag_messages", **GROUP) == 1
    assert not has(found, "rocketmq_messages_in_total"), "a counter begins at 0 with each start"


def test_after_a_restart_an_age_is_of_an_old_message_or_absent(
    home: Path, broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_LOOKUPS", 2)
    monkeypatch.setattr(measuring, "_KEPT_FOR", 0)
    for name in ("a", "b", "c"):
        broker.create_topic(name, queues=4)
        broker.create_group(name)
        broker.receive(name, name)
        broker.send(name, bodies(b"0", b"1"))
        clock.advance(60_000)
        broker.send(name, bodies(b"2", b"3"))
    lag, unread = (f"rocketmq_consumer_{part}_latency_milliseconds" for part in ("lag", "queueing"))
    before = {name: value(broker.metrics(), lag, consumer_group=name) for name in "abc"}
    broker.close()

    clock.advance(60_000)
    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as again:
        again.send("c", bodies(b"new"))
        scrapes = [again.metrics() for _ in range(6)]

    ages = [
        {name: value(each, lag, consumer_group=name) for name in "abc" if _has_age(each, name)}
        for each in scrapes
    ]
    assert [list(each) for each in ages[:2]] == [["a", "b"], ["a", "b", "c"]]
    assert all(age >= 60_000 for each in ages for age in each.values())
    assert ages[-1] == {name: age + 60_000 for name, age in before.items()}
    assert {name: value(scrapes[-1], unread, consumer_group=name) for name in "abc"} == ages[-1]
    assert has(scrapes[0], "rocketmq_consumer_lag_messages", consumer_group="c")


def test_groups_that_move_through_old_messages_keep_their_ages(
    home: Path, broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_LOOKUPS", 1)
    monkeypatch.setattr(measuring, "_KEPT_FOR", 0)
    for name in ("a", "b", "c"):
        broker.create_topic(name, queues=1)
        broker.create_group(name)
        broker.send(name, bodies(*[b"x"] * 20))
    broker.close()

    clock.advance(60_000)
    counts: list[int] = []
    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as again:
        for _ in range(8):
            for name in ("a", "b", "c"):
                again.ack(again.receive(name, name, limit=1)["receipt_handle"].to_pylist())
            found = again.metrics()
            lag = "rocketmq_consumer_lag_latency_milliseconds"
            ages = [value(found, lag, consumer_group=n) for n in "abc" if _has_age(found, n)]
            assert ages == [60_000] * len(ages)
            counts.append(len(ages))

    assert counts == [1, 2, 3, 3, 3, 3, 3, 3]


def _has_age(found: pa.Table, group: str) -> bool:
    return has(found, "rocketmq_consumer_lag_latency_milliseconds", consumer_group=group)


def test_metrics_of_a_deleted_topic_go(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g")
    broker.send("t", bodies(b"x"))
    got = broker.receive("g", "t")
    broker.ack(got["receipt_handle"].to_pylist())
    counted(broker, "rmq_deliveries_ended_total", 1, **GROUP, outcome="ack")

    broker.delete_topic("t", force=True)

    assert not has(broker.metrics(), "rocketmq_messages_in_total", topic="t")
    assert not has(broker.metrics(), "rocketmq_throughput_out_total", topic="t")
    assert not has(broker.metrics(), "rmq_messages", topic="t")


def test_counters_of_a_deleted_topic_or_group_go_without_a_scrape(broker: Broker) -> None:
    counts = broker.engine.meter._counts
    before = len(counts.sent), len(counts.events), len(counts.read_bytes)
    for name in ("one", "two", "three"):
        broker.create_topic(name, queues=1)
        broker.create_group(name)
        broker.send(name, bodies(b"x"))
        broker.ack(broker.receive(name, name)["receipt_handle"].to_pylist())
        until(lambda: len(counts.events) > before[1])

        broker.delete_group(name, force=True)
        until(lambda: (len(counts.events), len(counts.read_bytes)) == before[1:])
        assert len(counts.sent) > before[0]
        broker.delete_topic(name, force=True)

        until(lambda: (len(counts.sent), len(counts.events), len(counts.read_bytes)) == before)


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_bodies_are_measured_whatever_the_length_of_arrows_buffer(padding: int) -> None:
    offsets = pa.py_buffer(np.array([0, 2, 5, 9], np.int32).tobytes() + bytes(padding))
    column = pa.Array.from_buffers(pa.binary(), 3, [None, offsets, pa.py_buffer(b"aabbbcccc")])

    assert body_bytes(column) == 9
    assert body_bytes(column.slice(1, 1)) == 3
    assert body_bytes(column.slice(3)) == 0


def test_every_sample_is_declared_and_metrics_are_together(
    broker: Broker, clock: ManualClock
) -> None:
    work(broker, clock)

    found = broker.metrics()

    for row in found.to_pylist():
        metric = BY_NAME[row["name"]]
        labels = [label for label, _ in row["labels"] if label != "le"]
        assert (row["type"], row["unit"], row["help"]) == (metric.type, metric.unit, metric.help)
        assert tuple(labels) == metric.labels
    order = list(dict.fromkeys(found["name"].to_pylist()))
    assert order == [metric.name for metric in METRICS if metric.name in set(order)]
    keys = [(r["name"], r["part"], tuple(r["labels"])) for r in found.to_pylist()]
    assert len(set(keys)) == len(keys), "a series has one sample"


def test_frames_are_timed(broker: Broker) -> None:
    broker.create_topic("t")

    found = counted(broker, "rocketmq_topic_number", 4)

    frames = value(found, "rmq_frame_write_seconds", part="count")
    assert frames >= 1
    assert value(found, "rmq_frame_write_seconds", part="bucket", le="+Inf") == frames
    assert value(found, "rmq_log_written_bytes_total") > 0
