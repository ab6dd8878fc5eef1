"""Forks of the night of an incident: each is what the source says of that moment."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.dagster import Outcome, python_consumer, topic
from rmq_pipeline.errors import ConflictError, RequestError
from rmq_pipeline.limits import MIB
from rmq_pipeline.settings import Settings
from rmq_pipeline.testing import TestBroker
from tests.broker.sealed_home import seal_all
from tests.incident_night import NIGHT, Night, live_through

#: The views that have an ``*_at`` twin.
VIEWS = (
    "in_flight",
    "retrying",
    "scheduled",
    "half",
    "parked",
    "quarantined_groups",
    "progress",
    "waiting",
    "lag",
)
Fork = Callable[..., TestBroker]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    """The night, whose broker is still open."""
    night = Night(tmp_path_factory.mktemp("night") / "home")
    live_through(night)
    yield night
    night.broker.close()


def home_of(night: Night) -> Path:
    return Path(night.broker.status()["home"])


def of_night(hours: int, minutes: int, seconds: float = 0) -> datetime:
    return NIGHT + timedelta(hours=hours, minutes=minutes, seconds=seconds)


@pytest.mark.parametrize(
    ("hours", "minutes"),
    [(1, 0), (2, 0), (2, 13), (2, 20), (2, 35), (3, 5)],
)
def test_a_fork_is_what_the_source_says_of_that_moment(
    night: Night, rmq_fork: Fork, hours: int, minutes: int
) -> None:
    at = of_night(hours, minutes)

    fork = rmq_fork(home_of(night), at=at)

    assert fork.clock.now() == at
    earlier = min(at, of_night(2, 12))
    for view in VIEWS:
        then = asked(night.broker, f"{view}_at({sql(at)})")
        assert asked(fork.broker, view) == then, view
        assert asked(fork.broker, f"{view}_at({sql(at)})") == then, view
        before = asked(night.broker, f"{view}_at({sql(earlier)})")
        assert asked(fork.broker, f"{view}_at({sql(earlier)})") == before, view


def test_a_fork_has_the_messages_with_their_bodies(night: Night, rmq_fork: Fork) -> None:
    fork = rmq_fork(home_of(night), at=of_night(2, 5))

    found = fork.messages("orders")

    assert found["message_id"].to_pylist() == [f"order-{n}" for n in range(20)]
    assert set(found["body"].to_pylist()) == {b"{}"}
    fork.advance("20m")  # the three scheduled ones
    assert fork.messages("orders").num_rows == 23


def test_the_incident_is_handled_otherwise_in_a_fork(night: Night, rmq_fork: Fork) -> None:
    orders = topic("orders", type="mixed", queues=1)

    @python_consumer(topic=orders, group="shipping", max_attempts=2, backoff_ms=[300_000])
    def shipping(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
        """Ship everything at once."""
        return Outcome()

    before = asked(night.broker, "lag")
    fork = rmq_fork(home_of(night), at=of_night(2, 29))

    assert fork.drain(shipping).acked == 23
    of_shipping = "SELECT sum(lag) AS lag FROM lag WHERE consumer_group = 'shipping'"
    assert fork.sql(of_shipping).to_pylist() == [{"lag": 0}]
    assert asked(night.broker, "lag") == before


def test_the_source_is_unchanged_byte_for_byte(night: Night, rmq_fork: Fork) -> None:
    home = home_of(night)
    before = digests(home)

    fork = rmq_fork(home, at=of_night(2, 35))
    fork.broker.send("orders", pa.table({"body": [b"new"]}, schema=pa.schema([schema.SEND[0]])))
    fork.advance("2h")
    fork.broker.seal()

    assert digests(home) == before


def test_a_stopped_home_is_forked_at_its_last_moment(tmp_path: Path, rmq_fork: Fork) -> None:
    night = Night(tmp_path / "home")
    live_through(night)
    expected = {view: asked(night.broker, view) for view in VIEWS if view != "retrying"}
    night.broker.close()

    fork = rmq_fork(tmp_path / "home")

    last_ms = fork.clock.now_ms()
    assert last_ms == int(of_night(2, 50).timestamp() * 1000)
    fork.advance(timedelta(minutes=15))
    assert {view: asked(fork.broker, view) for view in expected} == expected
    assert not (tmp_path / "home" / "open.json").exists()


def test_a_fork_of_a_fork_and_two_forks_at_once(night: Night, rmq_fork: Fork) -> None:
    first, second = (rmq_fork(home_of(night), at=of_night(2, m)) for m in (20, 40))

    again = rmq_fork(Path(first.broker.status()["home"]), at=of_night(2, 13))

    assert asked(again.broker, "in_flight") == asked(
        second.broker, f"in_flight_at({sql(of_night(2, 13))})"
    )


def test_a_home_is_forked_while_its_broker_writes(tmp_path: Path, rmq_fork: Fork) -> None:
    """Small files, so that the log gets new ones; none is dropped, as nothing is sealed."""
    settings = Settings(log_file_bytes=MIB, reserve_bytes=MIB)
    clock = ManualClock()
    bodies = pa.table({"body": [b"x" * 10_000] * 20}, schema=pa.schema([schema.SEND[0]]))
    with Broker.open(tmp_path / "home", clock=clock, upkeep="none", settings=settings) as broker:
        broker.create_topic("orders", queues=1)
        broker.send("orders", bodies)
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                clock.advance(1)
                broker.send("orders", bodies)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            counts = []
            for _ in range(5):
                fork = rmq_fork(tmp_path / "home")
                found = fork.messages("orders")
                counts.append(found.num_rows)
                assert found["queue_offset"].to_pylist() == list(range(found.num_rows))
        finally:
            stop.set()
            sender.join()

    assert counts == sorted(counts)
    assert all(count % 20 == 0 for count in counts)


def test_a_moment_that_the_home_does_not_have_is_refused(night: Night, tmp_path: Path) -> None:
    home = home_of(night)
    for at, said in (
        (datetime(2999, 1, 1, tzinfo=UTC), "is in the future of"),
        (NIGHT, r"began at 2026-03-07T01:00:00.000\+00:00, after 2026-03-07T00:00:00"),
        (0, "after 1970"),
        (NIGHT.replace(tzinfo=None), "is no moment"),
        ("2026-03-07 02:00", "is no moment"),
        ("yesterday", "is no moment"),
        (-1, "is no moment"),
        (True, "is no moment"),
        (1.5, "is no moment"),
    ):
        moment: Any = at
        with pytest.raises(RequestError, match=said), TestBroker.fork(home, at=moment):
            pass
    for path in (tmp_path, tmp_path / "nothing", Path(__file__)):
        with pytest.raises(RequestError, match="is no home of a broker"), TestBroker.fork(path):
            pass
    (tmp_path / "format").write_text("99\n")
    (tmp_path / "log").mkdir()
    with pytest.raises(RequestError, match="has format '99'"), TestBroker.fork(tmp_path):
        pass
    (tmp_path / "format").write_text("5\n")
    with pytest.raises(RequestError, match="has no log yet"), TestBroker.fork(tmp_path):
        pass


def test_a_moment_may_be_text_or_milliseconds(night: Night, rmq_fork: Fork) -> None:
    at = of_night(2, 20)

    for same in (
        at.astimezone(timezone(timedelta(hours=2))),
        "2026-03-07T02:20:00Z",
        "2026-03-07T03:20:00+01:00",
        int(at.timestamp() * 1000),
    ):
        assert rmq_fork(home_of(night), at=same).clock.now() == at


def test_a_home_whose_log_lost_its_beginning_is_refused(tmp_path: Path) -> None:
    settings = Settings(log_file_bytes=MIB, reserve_bytes=MIB, seal_after_ms=0)
    bodies = pa.table({"body": [b"x" * 100_000] * 30}, schema=pa.schema([schema.SEND[0]]))
    home = tmp_path / "home"
    with Broker.open(home, clock=ManualClock(), upkeep="none", settings=settings) as broker:
        broker.create_topic("orders", queues=1)
        for _ in range(3):
            broker.send("orders", bodies)
        seal_all(broker)
        assert broker.status()["log_first"] > 0

        with (
            pytest.raises(ConflictError, match="its first files were sealed"),
            TestBroker.fork(home),
        ):
            pass


def sql(at: datetime) -> str:
    return f"TIMESTAMP '{at.astimezone(UTC).replace(tzinfo=None).isoformat(sep=' ')}'"


def asked(broker: Broker, view: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = broker.sql(f"FROM {view}").to_pylist()
    return sorted(rows, key=str)


def digests(folder: Path) -> dict[str, str]:
    """The content of all files, once nothing is behind."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
