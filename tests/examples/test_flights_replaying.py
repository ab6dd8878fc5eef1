"""Two hours of aircraft_rotations are mended by a backfill, launched as the UI does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.examples.flights import verify
from rmq_pipeline.examples.flights.dataset import departures
from rmq_pipeline.examples.flights.pipeline import AIRCRAFT_ROTATIONS, DEPARTURES, LATE_SUMMARY
from rmq_pipeline.examples.flights.replaying import (
    FROM_MS,
    HOURS,
    PIPELINE,
    TO_MS,
    consume,
    launch,
    mistaken,
)
from rmq_pipeline.examples.flights.rotations import ROTATION
from rmq_pipeline.examples.flights.summary import INCREMENT
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.handling.sink import read_sink, sink_files
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.dev_server import DevServer
from rmq_pipeline.orchestration.project import CodeLocation
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark import session
from tests.broker.sealed_home import seal_all
from tests.conftest import Eventually
from tests.free_address import free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # tests/orchestration/test_replay.py has the same runs, without a UI
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(900),
]

DAYS = 3
SINK = "aircraft_rotations"
#: A delayed evening: those of the range are told to passengers a few seconds later.
LATE_HOURS = ("2013-01-02-21:00", "2013-01-02-22:00")
PARTITIONS = {"2013-01-03T14", "2013-01-03T15"}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20, seal_after_ms=0)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        yield broker


@pytest.fixture
def address(broker: Broker) -> Iterator[str]:
    with FlightServer(broker) as server:
        yield server.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client


@pytest.fixture
def spark() -> Iterator[SparkSession]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        started = session.start()
        yield started
        started.stop()


def files(sinks: Path) -> dict[str, list[bytes]]:
    """What is in the files that count, by partition."""
    found: dict[str, list[bytes]] = {}
    for row in sink_files(sinks / SINK).to_pylist():
        content = (sinks / SINK / row["path"]).read_bytes()
        found.setdefault(row["partition"], []).append(content)
    return found


def progress(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.sql("SELECT * FROM progress ORDER BY ALL").to_pylist()
    return found


def of_hours(rows: pa.Table) -> pd.DataFrame:
    """Those rows of the sink that are of the hours replayed, in one order."""
    frame = rows.to_pandas(types_mapper={pa.int32(): pd.Int64Dtype()}.get)
    frame = frame[(frame["born_at_ms"] >= FROM_MS) & (frame["born_at_ms"] < TO_MS)]
    return frame.sort_values(["tail", "leg"]).reset_index(drop=True)


def listed(rows: pd.DataFrame) -> set[str]:
    """Rows as texts."""
    return {repr(tuple(row)) for row in rows[ROTATION.names].itertuples(index=False)}


@pytest.fixture
def sinks(
    client: Client,
    broker: Broker,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> Path:
    """Days of departures that were consumed with the mistake, and sealed."""
    sinks = tmp_path / "sinks"
    monkeypatch.setenv("RMQ_FLIGHTS", str(tmp_path / "airline"))
    PIPELINE.ensure(client)
    client.send(DEPARTURES.name, departures(DAYS))
    # Cancelled departures are retried, and end as dead letters; late aircraft are told later.
    report = consume(AIRCRAFT_ROTATIONS, client, sinks=sinks, spark=lambda: spark, handler=mistaken)
    dead = verify.expected(DAYS).dead_letters
    assert (report.dead_lettered, report.retried) == (dead, 2 * dead)
    eventually(lambda: client.deliver_scheduled(wait_ms=1_000)["next_due_ms"] is None)
    consume(LATE_SUMMARY, client, sinks=sinks, spark=lambda: spark)
    seal_all(broker)
    spark.stop()
    return sinks


class Ui:
    """The webserver with the code that is right."""

    def __init__(self, dagster: DevServer, eventually: Eventually) -> None:
        self._graphql, self._eventually = dagster.graphql, eventually

    def wait_for_grid(self) -> None:
        """Until the topic's log shows that the hours have data."""
        hours = set(HOURS)
        self._eventually(lambda: hours <= self.partitions("topic_log", "departures"), within_s=120)

    def launch(self, consumer: Consumer, **config: Any) -> tuple[str, str]:
        """Launch a backfill, which begins at the daemon's next look, within half a minute."""
        return f"replay_{consumer.spec.name}", launch(self._graphql, consumer, **config)

    def finished(self, launched: tuple[str, str]) -> dict[str, Any]:
        """What the materialization of a backfill says; of a dry run, its observation."""
        name, backfill = launched
        self._eventually(lambda: self._is_over(backfill), within_s=400)
        _, (run,) = self._graphql.backfill(backfill)
        return self._said(name, run["runId"])

    def again(self, launched: tuple[str, str]) -> dict[str, Any]:
        """Execute the run of a backfill that has ended again."""
        name, backfill = launched
        self._eventually(
            lambda: self._graphql.backfill(backfill)[0].startswith("COMPLETED"), within_s=120
        )
        _, (run,) = self._graphql.backfill(backfill)
        again = self._graphql.reexecute(run["runId"])
        self._eventually(lambda: self._graphql.status(again) == "SUCCESS", within_s=120)
        return self._said(name, again)

    def _said(self, name: str, run_id: str) -> dict[str, Any]:
        events = [*self._graphql.materializations([name]), *self._graphql.observations([name])]
        [said, *_] = [each["metadata"] for each in events if each["runId"] == run_id]
        return dict(said)

    def partitions(self, *asset: str) -> set[str]:
        return {each["partition"] for each in self._graphql.materializations(asset, limit=500)}

    def _is_over(self, backfill: str) -> bool:
        _, runs = self._graphql.backfill(backfill)
        assert all(each["status"] not in ("FAILURE", "CANCELED") for each in runs)
        return len(runs) == 1 and runs[0]["status"] == "SUCCESS"


@pytest.fixture
def ui(address: str, sinks: Path, tmp_path: Path, eventually: Eventually) -> Iterator[Ui]:
    environment = {
        "RMQ_FLIGHT": address,
        "RMQ_SINKS": str(sinks),
        "RMQ_FLIGHTS": str(tmp_path / "airline"),
    }
    code = CodeLocation.find("rmq_pipeline.examples.flights.replaying_definitions")
    home = tmp_path / "dagster_home"
    with DevServer(home, port=free_port(), env=environment, code=code) as dagster:
        yield Ui(dagster, eventually)


def test_a_mistake_in_two_hours_is_mended_from_the_ui(ui: Ui, client: Client, sinks: Path) -> None:
    before, stands = files(sinks), progress(client)
    wrong = of_hours(read_sink(sinks / SINK))

    ui.wait_for_grid()
    both = (
        ui.launch(AIRCRAFT_ROTATIONS, mode="dry_run"),
        ui.launch(LATE_SUMMARY, hours=LATE_HOURS, mode="dry_run", partitions_match=True),
    )
    dry, late = map(ui.finished, both)
    untouched = files(sinks)
    seen_as_replayed = ui.partitions("replay_aircraft_rotations")
    replacing = ui.launch(AIRCRAFT_ROTATIONS, mode="replace")
    done = ui.finished(replacing)
    again = ui.again(replacing)

    # Only those two partitions are other ones, and they are right, row by row.
    after, mended = files(sinks), of_hours(read_sink(sinks / SINK))
    assert untouched == before
    assert {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)} == PARTITIONS
    assert progress(client) == stands
    assert not seen_as_replayed
    assert (again["replay_id"], again["repeated"]) == (replacing[1], True)
    assert ui.partitions("replay_aircraft_rotations") == set(HOURS)
    assert differences(mended) == []
    # The dry run had listed exactly the rows that changed.
    added, removed = rows_of_report(dry["rows_report"])
    assert removed == listed(wrong) - listed(mended)
    assert added == listed(mended) - listed(wrong)
    assert dry["rows_added"] == dry["rows_removed"] == len(added) > 20
    assert (dry["outcomes_changed"], dry["states_differ"]) == (0, 0)
    # Cancelled departures are in the range, and fail again.
    assert dry["messages"] == done["messages"] == len(mended) + dry["failed"]
    assert dry["failed"] == 3
    # Scheduled messages are in the range of their copies. Nothing is wrong with those: where calls
    # were cut there are other increments, of the same sums.
    assert late["messages"] == 20
    assert late["outcomes_changed"] == 0
    assert not late["rows_added"] or increments(late["rows_report"]) == 0


def differences(mended: pd.DataFrame) -> list[str]:
    """What is wrong with the rows of the hours, compared with the CSV."""
    right = verify.expected(DAYS).rotations
    right = right[(right["born_at_ms"] >= FROM_MS) & (right["born_at_ms"] < TO_MS)]
    found = pa.Table.from_pandas(mended.drop(columns=list(verify.PLACE)), preserve_index=False)
    return verify._differences(right, found, key=("tail", "leg"))


def increments(path: str) -> int:
    """How much sums would change with the rows a dry run lists, all differences together."""
    report = pq.read_table(path).to_pandas()
    sign = report["change"].map({"added": 1, "removed": -1}) * report["copies"]
    keys = ["flight_hour_ms", "carrier"]
    counted = [name for name in INCREMENT.names if name not in keys]
    changes = report[counted].mul(sign, axis=0).groupby([report[key] for key in keys]).sum()
    return int(changes.abs().to_numpy().sum())


def rows_of_report(path: str) -> tuple[set[str], set[str]]:
    """The rows that a dry run lists as added, and as removed."""
    report = pq.read_table(path)
    of_change = {
        change: listed(of_hours(report.filter(pc.equal(report["change"], change))))
        for change in ("added", "removed")
    }
    return of_change["added"], of_change["removed"]
