"""Redriving in the large: chosen by SQL, at a rate, stopped when too many fail again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import (
    ConsumerGroupNotFoundError,
    FilterExpressionError,
    QueryError,
    RequestError,
)
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.redriving import Plan, Report, manifest, redrive
from rmq_pipeline.settings import Settings

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
TOPIC, GROUP = "orders", "billing"


class Consumer:
    """Consumes while the redrive waits, on a clock that its waiting moves."""

    def __init__(self, client: Client, *, fails: Callable[[str], bool] = lambda _: False) -> None:
        self.client, self.fails = client, fails
        self.seconds = 0.0
        self.came: list[str] = []
        #: Most messages at once.
        self.at_once = 0
        self.works = True

    def now(self) -> float:
        return self.seconds

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.seconds += seconds
        if self.works:
            self.consume()

    def consume(self) -> None:
        got = self.client.receive(GROUP, TOPIC, limit=10_000)
        if not got.num_rows:
            return
        ids = got["message_id"].to_pylist()
        self.at_once = max(self.at_once, len(ids))
        self.came += ids
        outcome = ["dead_letter" if self.fails(i) else "ack" for i in ids]
        rows = {"receipt_handle": got["receipt_handle"], "outcome": outcome}
        self.client.settle(GROUP, pa.table(rows))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with (
        Broker.open(
            tmp_path / "home", clock=ManualClock(), upkeep="none", settings=SMALL
        ) as broker,
        FlightServer(broker) as server,
        Client(server.address) as client,
    ):
        yield client


@pytest.fixture
def dead(client: Client) -> Callable[..., list[str]]:
    """``dead(n, groups=4)``: n dead letters; their ids in the order they were sent."""
    numbers = count()
    client.create_topic(TOPIC, type="fifo", queues=2)
    client.create_group(GROUP, order="message_group", max_attempts=1)

    def make(n: int, groups: int = 4) -> list[str]:
        at = [next(numbers) for _ in range(n)]
        rows = {
            "body": [b"x"] * n,
            "message_id": [f"m-{i}" for i in at],
            "message_group": [f"g-{i % groups}" for i in at],
            "keys": [[f"k-{i}"] for i in at],
            "properties": pa.array([[("half", str(i % 2))] for i in at], schema.PROPERTIES),
        }
        client.send(TOPIC, pa.table(rows))
        left = n
        while left:
            got = client.receive(GROUP, TOPIC, limit=n)
            client.forward_to_dead_letter_queue(got, reason="no price")
            left -= got.num_rows
        return [f"m-{i}" for i in at]

    return make


def run(consumer: Consumer, *, redrive_id: str = "r", **plan: Any) -> Report:
    return redrive(
        consumer.client,
        Plan(group=GROUP, **plan),
        redrive_id=redrive_id,
        now=consumer.now,
        pause=consumer.pause,
    )


def test_all_dead_letters_come_again_in_order_within_each_group(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    ids = dead(200)
    consumer = Consumer(client)

    report = run(consumer)

    assert (report.status, report.chosen, report.redriven) == ("done", 200, 200)
    assert (report.decided, report.failed, report.outcomes) == (200, 0, {"acked": 200})
    for group in range(4):
        mine = [i for i in ids if int(i[2:]) % 4 == group]
        assert [i for i in consumer.came if i in set(mine)] == mine


@pytest.mark.parametrize(
    ("expression", "kind", "chosen"),
    [
        ("half = '1' AND KEYS IN ('k-1', 'k-5')", "sql92", {"m-1", "m-5"}),
        ("half > 0", "sql92", {"m-1", "m-3", "m-5"}),
        ("unknown IS NULL", "sql92", {f"m-{i}" for i in range(6)}),
        ("no || such", "tag", set()),
    ],
)
def test_a_filter_chooses_among_them(
    client: Client, dead: Callable[..., list[str]], expression: str, kind: str, chosen: set[str]
) -> None:
    dead(6)
    consumer = Consumer(client)

    run(consumer, filter=expression, filter_type=kind)

    assert set(consumer.came) == chosen


def test_a_filter_that_does_not_parse_shows_where_and_redrives_nothing(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    dead(3)

    with pytest.raises(FilterExpressionError, match=r"\^"):
        run(Consumer(client), filter="half = = 1")

    assert manifest(client, "r").num_rows == 0


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("'k-3' IN keys", {"m-3"}),
        ("properties['half'] = '1' AND attempts = 1", {"m-1", "m-3", "m-5"}),
        ("message_group = 'g-0' OR false -- not ) all", {"m-0", "m-4"}),
        ("signature = (SELECT min(signature) FROM dead_letters)", {f"m-{i}" for i in range(6)}),
        ("dead_lettered_at_ms > 4102444800000", set()),
    ],
)
def test_dead_letters_are_chosen_by_a_condition(
    client: Client, dead: Callable[..., list[str]], where: str, chosen: set[str]
) -> None:
    dead(6)
    consumer = Consumer(client)

    report = run(consumer, where=where)

    assert set(consumer.came) == chosen
    assert (report.status, report.chosen) == ("done", len(chosen))


@pytest.mark.parametrize(
    "where",
    [
        "attempts >",
        "1 = 1; DROP TABLE x",
        "1 = 1) OR (1 = 1",
        "1 = 1) UNION SELECT 0, 0 FROM dead_letters WHERE (1 = 1",
        "no_such_column = 1",
        "attempts = (SELECT count(*) FROM store.events)",
        "reason = (SELECT content FROM read_text('/etc/passwd'))",
        "SELECT 1",
        "attempts = 1 LIMIT 1",
        "*",
        "-- nothing",
        "'",
    ],
)
def test_a_condition_that_is_wrong_or_no_condition_is_refused_and_nothing_is_redriven(
    client: Client, dead: Callable[..., list[str]], where: str
) -> None:
    dead(2)

    with pytest.raises(QueryError):
        run(Consumer(client), where=where)

    assert manifest(client, "r").num_rows == 0
    assert client.receive(GROUP, TOPIC).num_rows == 0


def test_a_redrive_run_twice_redrives_nothing_twice(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    dead(10)
    consumer = Consumer(client)
    run(consumer)

    again = run(consumer, redrive_id="r")
    other = run(consumer, redrive_id="s")

    assert (again.status, again.chosen, again.outcomes) == ("done", 10, {"acked": 10})
    assert (other.status, other.chosen) == ("done", 0)
    assert len(consumer.came) == 10


def test_a_redrive_that_was_cut_short_goes_on_under_its_id(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    dead(50)
    consumer = Consumer(client)

    def cut(report: Report) -> None:
        if report.redriven >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        redrive(
            client,
            Plan(group=GROUP, limit=40),
            redrive_id="r",
            on_progress=cut,
            now=consumer.now,
            pause=consumer.pause,
        )
    before = manifest(client, "r").num_rows
    report = run(consumer, limit=40)

    assert 20 <= before < 40
    assert (report.status, report.chosen, report.redriven) == ("done", 40, 40)
    assert sorted(consumer.came) == sorted(set(consumer.came))
    assert len(consumer.came) == 40


def test_it_stops_by_itself_when_too_many_fail_again(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    dead(500)
    consumer = Consumer(client, fails=lambda i: int(i[2:]) % 2 == 0)

    report = run(consumer, max_failed_share=0.3, minimum=10)

    assert report.status == "stopped"
    assert report.failed > 0.3 * report.decided
    assert 10 <= report.redriven <= 60
    assert manifest(client, "r").num_rows == report.redriven


def test_it_goes_on_while_no_more_than_that_share_fails(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    dead(200)
    consumer = Consumer(client, fails=lambda i: int(i[2:]) % 10 == 0)

    report = run(consumer, max_failed_share=0.2, minimum=10)

    assert (report.status, report.redriven, report.failed) == ("done", 200, 20)
    assert report.outcomes == {"acked": 180, "dead_lettered": 20}
    assert run(consumer, redrive_id="s", where="redrive_id IS NULL").chosen == 20


def test_a_few_failures_before_the_minimum_do_not_stop_it(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    dead(5)

    report = run(Consumer(client, fails=lambda _: True), max_failed_share=0.0, minimum=6)

    assert (report.status, report.failed_share) == ("done", 1.0)


@pytest.mark.parametrize(
    ("n", "rate", "seconds"), [(15, 10.0, 1.4), (4, 0.5, 6.0), (30, 1000.0, 0.0)]
)
def test_it_keeps_to_its_rate(
    client: Client, dead: Callable[..., list[str]], n: int, rate: float, seconds: float
) -> None:
    dead(n)
    consumer = Consumer(client)

    report = run(consumer, rate_per_s=rate, minimum=100)

    assert report.status == "done"
    assert consumer.seconds >= seconds
    assert consumer.seconds <= seconds * 1.2 + 1
    assert consumer.at_once <= max(1, rate)


def test_few_are_redriven_before_the_first_outcomes_are_known(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    dead(300)
    consumer = Consumer(client)
    waiting = []

    redrive(
        client,
        Plan(group=GROUP, minimum=10, ahead=50),
        redrive_id="r",
        on_progress=lambda report: waiting.append(report.outcomes.get("waiting", 0)),
        now=consumer.now,
        pause=consumer.pause,
    )

    assert waiting[0] == 10
    assert max(waiting) == 50
    assert len(consumer.came) == 300


def test_it_ends_when_no_consumer_settles(client: Client, dead: Callable[..., list[str]]) -> None:
    dead(30)
    consumer = Consumer(client)
    consumer.works = False

    report = run(consumer, minimum=20, patience_s=5)

    assert (report.status, report.redriven, report.decided) == ("waiting", 20, 0)
    assert 5 <= consumer.seconds < 6


def test_the_manifest_has_a_row_for_every_message(
    client: Client, dead: Callable[..., list[str]]
) -> None:
    ids = dead(4)
    run(Consumer(client, fails=lambda i: i == ids[1]))

    rows = manifest(client, "r").to_pylist()

    assert sorted((row["message_id"], row["outcome"]) for row in rows) == [
        (i, "dead_lettered" if i == ids[1] else "acked") for i in ids
    ]
    assert {row["redrive_id"] for row in rows} == {"r"}
    assert manifest(client, "r", limit=2).num_rows == 2


@pytest.mark.parametrize(
    "plan",
    [
        {"max_failed_share": 1.1},
        {"max_failed_share": -0.1},
        {"rate_per_s": -1.0},
        {"limit": -1},
        {"minimum": 0},
    ],
)
def test_a_plan_out_of_range_is_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Plan(group=GROUP, **plan)


def test_a_group_that_does_not_exist_is_refused(client: Client) -> None:
    with pytest.raises(ConsumerGroupNotFoundError):
        run(Consumer(client))
