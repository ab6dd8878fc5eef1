"""A home of an older format opens, shows what it showed, is drained, and goes on."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import pytest

from rmq_pipeline import checked_parquet, schema
from rmq_pipeline.broker.broker import Broker
from rmq_pipeline.broker.work.home import FORMAT, FORMAT_FILE
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.lake import publication
from rmq_pipeline.settings import Settings
from tests.homes.write_home import GROUPS, SETTINGS, TYPES, rows_of
from tests.lake.test_delta import of_format_2

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Kinds of events that had another name when a home was written.
RENAMED_KINDS = {"condemn": "quarantine", "pardon": "lift"}
HOMES = sorted(Path(__file__).parent.glob("*.tar.xz"))


class Home:
    """An unpacked home, open by the code of now, and what the code that wrote it showed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "home"
        text = (folder / "shown.json").read_text()
        for before, now in RENAMED_KINDS.items():
            text = text.replace(f'"{before}"', f'"{now}"')
        shown = json.loads(text)
        self.views: dict[str, list[Any]] = shown["views"]
        self.moments: dict[str, dict[str, list[Any]]] = shown["moments"]
        self.clock = ManualClock(shown["now_ms"])

    def open(self) -> Broker:
        settings = Settings(**SETTINGS)
        self.broker = Broker.open(self.folder, clock=self.clock, upkeep="none", settings=settings)
        return self.broker

    def reopen(self) -> Broker:
        self.broker.close()
        return self.open()

    def check_moments(self) -> None:
        """The state as of each recorded moment is what was seen then."""
        for at_ms, views in self.moments.items():
            for view, expected in views.items():
                found = self.rows(f"FROM {view}_at({at_ms})", like=expected)
                assert found == expected, (view, at_ms)

    def rows(self, query: str, *, like: list[Any]) -> list[Any]:
        """The rows, with the columns that the older code had."""
        found = rows_of(self.broker, query)
        kept = [{k: v for k, v in row.items() if not like or k in like[0]} for row in found]
        return sorted(kept, key=lambda row: json.dumps(row, sort_keys=True))


@pytest.fixture(params=HOMES, ids=[path.name.partition(".")[0] for path in HOMES])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    found = Home(tmp_path)
    found.open()
    yield found
    found.broker.close()


def test_its_log_is_validated_on_reading_for_as_long_as_it_exists(home: Home) -> None:
    assert home.broker.engine.log.validates
    assert home.reopen().engine.log.validates


def test_it_shows_what_the_code_that_wrote_it_showed(home: Home) -> None:
    for view, expected in home.views.items():
        assert home.rows(f'FROM "{view}"', like=expected) == expected, view
    home.check_moments()
    # A version that does not know the format refuses the home from now on, by name.
    assert (home.folder / FORMAT_FILE).read_text() == f"{FORMAT}\n"


def test_its_database_is_made_again_from_its_log(home: Home) -> None:
    home.broker.close()
    for file in home.folder.glob("state.duckdb*"):
        file.unlink()
    home.open()

    for view, expected in home.views.items():
        assert home.rows(f'FROM "{view}"', like=expected) == expected, view
    home.check_moments()


def test_it_is_drained_and_goes_on(home: Home) -> None:
    broker = home.broker
    home.clock.advance(8_000_000)  # leases have ended, what was scheduled is due
    broker.revive()
    broker.deliver_scheduled()
    broker.check_transactions()
    for group in GROUPS:
        broker.unpark(group)
    read = {row["message_id"] for row in home.views["messages"]}

    drained = {received for group in GROUPS for received in _drain(home, group)}
    broker.send("fifo", table := _messages(6))
    home.clock.advance(120_000)
    broker.seal()
    broker = home.reopen()
    again = {received for group in GROUPS for received in _drain(home, group)}

    assert read >= drained
    assert len(drained) > 60
    assert again == set(table["message_id"].to_pylist())
    assert [row for row in rows_of(broker, "FROM lag") if row["lag"]] == []
    assert rows_of(broker, "FROM parked") == []
    home.check_moments()


def test_its_sink_becomes_a_delta_table_by_one_call(home: Home, tmp_path: Path) -> None:
    sink = tmp_path / "sink"
    files = home.broker.sink_files("windows").select(schema.SINK_FILE.names)
    for path in files["path"].to_pylist():
        (sink / path).parent.mkdir(parents=True, exist_ok=True)
        checked_parquet.write(pa.table({"path": [path]}), sink / path)
    of_format_2(sink, files.cast(schema.SINK_FILE), version=3)

    done = publication.convert(home.broker, sink=sink)

    assert (done.state, done.group, done.files) == ("converted", "windows", files.num_rows)
    uris = deltalake.DeltaTable(sink).file_uris()
    # The address of a file in a table has its signs quoted.
    assert sorted(Path(uri).name for uri in uris) == sorted(
        Path(path).name for path in files["path"].to_pylist()
    )


def _messages(n: int) -> pa.Table:
    columns = {
        "body": [b"body"] * n,
        "message_id": [f"new-{i}" for i in range(n)],
        "message_group": [f"g-{i % 3}" for i in range(n)],
    }
    return pa.table(columns, schema=pa.schema([schema.SEND.field(name) for name in columns]))


def _drain(home: Home, group: str) -> Iterator[str]:
    for topic in (*TYPES, "once"):
        client = "alice" if topic == "lite" else ""
        if client and group != "none":
            continue  # alice of this group has subscribed to the lite topics
        while (got := home.broker.receive(group, topic, limit=100, client_id=client)).num_rows:
            home.broker.ack(got)
            yield from got["message_id"].to_pylist()
