"""Changes of crews: a message is delivered if, and only if, the desk's ledger confirms it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline.cli.supervisor import Supervisor
from rmq_pipeline.examples.flights import crews, dataset, facts, operations, verify
from rmq_pipeline.examples.flights.crew_desk import BATCH_ROWS, CrewDesk
from rmq_pipeline.examples.flights.ledger import NOTE, Ledger
from rmq_pipeline.flight.client import Client
from tests.conftest import Eventually

#: Opens the ledger, says so, and keeps it until its stdin ends.
HOLDER = """
import sys, duckdb
books = duckdb.connect(sys.argv[1])
print("in", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def week() -> pa.Table:
    return crews.changes(dataset.departures(7))


@pytest.fixture(scope="module")
def day() -> pa.Table:
    """Four batches; of the last one only a part."""
    return crews.changes(dataset.departures(1))


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("RMQ_FLIGHTS", str(tmp_path))
    return crews.ledger()


@pytest.fixture
def broker(home: Path) -> Iterator[Supervisor]:
    with Supervisor(home) as supervisor:
        yield supervisor


@pytest.fixture
def client(broker: Supervisor) -> Iterator[Client]:
    with Client(home=broker.home, retry_s=90) as client:
        client.create_topic(crews.TOPIC, type="transaction", queues=2)
        yield client


def named(changes: pa.Table, *ids: str) -> pa.Table:
    return changes.slice(0, len(ids)).set_column(0, NOTE.field(0), pa.array(ids))


def open_halves(client: Client) -> int:
    n: int = client.sql("SELECT count(*) AS n FROM half")["n"][0].as_py()
    return n


def all_ended(client: Client) -> bool:
    """Do what a window of checks does; whether no half message is open then."""
    client.check_transactions()
    while (checks := client.fetch_checks(topics=[crews.TOPIC])).num_rows:
        ends = {"transaction_id": checks["transaction_id"], "resolution": crews.check(checks)}
        client.end_transactions(pa.table(ends))
    return open_halves(client) == 0


def test_crew_changes_on_the_first_departure_of_an_aircraft_on_a_day(week: pa.Table) -> None:
    of_one = [row for row in week.to_pylist() if row["tail"] == "N730MQ"]

    assert week.schema.equals(NOTE)
    assert len({row["crew"] for row in week.to_pylist()}) == week.num_rows == 4_642
    assert len(of_one) == 7
    assert verify.compare_crews(verify.expected(7), week) == []


def test_ledger_keeps_what_is_noted_first(ledger: Ledger, day: pa.Table) -> None:
    asked = ledger.ask(pa.chunked_array([["before", "other"]]))
    noted = ledger.note(named(day, "before", "after"))
    again = ledger.ask(pa.chunked_array([["after", "before"]]))

    assert asked.to_pylist() == ["abandoned", "abandoned"]
    assert noted.to_pylist() == ["abandoned", "confirmed"]
    assert again.to_pylist() == ["confirmed", "abandoned"]
    rows = {row["change_id"]: row["asked"] for row in ledger.changes().to_pylist()}
    assert rows == {"before": 2, "other": 1, "after": 1}


def test_ledger_is_waited_for_while_another_process_has_it(
    ledger: Ledger, tmp_path: Path, day: pa.Table
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / operations.LEDGER)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"in\n"
    with pytest.raises(duckdb.IOException, match="lock"):
        Ledger(tmp_path / operations.LEDGER, patience_s=0).changes()

    holder.stdin.close()

    assert ledger.note(named(day, "one")).to_pylist() == ["confirmed"]
    holder.wait()
    holder.stdout.close()


def test_every_confirmed_change_is_delivered_once_and_no_other(
    client: Client, ledger: Ledger, day: pa.Table, eventually: Eventually
) -> None:
    told: list[int] = []
    desk = CrewDesk(client, ledger)

    desk.work(day, on_noted=told.append)
    left_open = set(desk.left_open)
    early = facts.bodies(client, crews.TOPIC).num_rows
    eventually(lambda: all_ended(client))

    expected = verify.expected(1)
    noted = ledger.changes()
    assert told[-1] == day.num_rows
    assert len(left_open) == 2 * BATCH_ROWS
    assert early < len(expected.crews_confirmed)
    assert verify.compare_crews(expected, noted) == []
    assert verify.compare_crew_messages(noted, facts.bodies(client, crews.TOPIC)) == []
    asked = {row["change_id"] for row in noted.to_pylist() if row["asked"]}
    assert left_open <= asked


def test_a_change_that_the_checker_abandoned_is_made_again(
    client: Client, ledger: Ledger, day: pa.Table
) -> None:
    few = day.slice(0, 3)
    # The checker was asked before the desk came to note these.
    ledger.ask(pa.chunked_array([[f"{crew}/1" for crew in few["crew"][:2].to_pylist()]]))

    CrewDesk(client, ledger).work(few)

    states = {row["change_id"]: row["state"] for row in ledger.changes().to_pylist()}
    one, two, three = few["crew"].to_pylist()
    assert states == {
        f"{one}/1": "abandoned",
        f"{two}/1": "abandoned",
        f"{three}/1": "confirmed",
        f"{one}/2": "confirmed",
        f"{two}/2": "confirmed",
    }
    assert open_halves(client) == 2


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.long
def test_crews_are_right_when_the_broker_is_killed(
    broker: Supervisor, client: Client, ledger: Ledger, week: pa.Table, eventually: Eventually
) -> None:
    kill_after = [1_000, 2_000, 3_500]

    def kill_now_and_then(count: int) -> None:
        if kill_after and count >= kill_after[0]:
            kill_after.pop(0)
            # It may not be back yet from the last time.
            eventually(lambda: broker.endpoint.is_alive())  # noqa: PLW0108 - another each time
            os.kill(broker.endpoint.pid, signal.SIGKILL)

    CrewDesk(client, ledger).work(week, on_noted=kill_now_and_then)
    eventually(lambda: all_ended(client), within_s=60)

    # A client may find the broker before its supervisor has heard of it.
    eventually(lambda: broker.restarts == 3, within_s=60)
    noted = ledger.changes()
    assert verify.compare_crews(verify.expected(7), noted) == []
    assert verify.compare_crew_messages(noted, facts.bodies(client, crews.TOPIC)) == []
