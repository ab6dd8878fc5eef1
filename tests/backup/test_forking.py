"""``rmq fork``: the state of a live home, now or at a moment, as a home of its own."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.backup.forking import fork
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import ConflictError, RequestError, StorageError
from tests.broker.sealed_home import (
    assert_folders_hold,
    fill,
    messages,
    open_broker,
    seal_all,
    stored,
)
from tests.cli.conftest import RMQ, end, process, serve
from tests.incident_night import NIGHT, Night, live_through

VIEWS = ("in_flight", "retrying", "scheduled", "half", "parked", "progress", "waiting", "lag")


def asked(broker: Broker, source: str) -> list[str]:
    rows = broker.sql(f"SELECT * FROM {source}").to_pylist()
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in rows)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Broker]:
    """A broker with sealed and unsealed messages, whose log has lost its beginning."""
    clock = ManualClock()
    with open_broker(tmp_path / "home", clock, snapshot_events=100) as broker:
        fill(broker)
        for _ in range(8):
            broker.send("plain", messages(40, body_bytes=40_000))
        clock.advance(60_000)
        seal_all(broker)
        broker.send("plain", messages(30))
        broker.sql("SELECT 1")  # waits for dispatch, so that a copied state names the files
        yield broker


def test_a_fork_of_now_shares_the_files_and_goes_its_own_way(live: Broker, tmp_path: Path) -> None:
    assert live.engine.log.first > 0
    expected, views = stored(live), {view: asked(live, view) for view in VIEWS}
    now_ms = live.engine.clock.now_ms()

    done = fork(tmp_path / "home", tmp_path / "fork", at_ms=None, ask_broker=live.copy_state)

    assert done.shared > 10
    assert done.copied == 0
    with open_broker(tmp_path / "fork", ManualClock(now_ms)) as forked:
        assert stored(forked) == expected
        assert {view: asked(forked, view) for view in VIEWS} == views
        forked.send("plain", messages(9))
        forked.delete_topic("ordered")
        seal_all(forked)
        forked.compact()
        forked.expire()
    assert stored(live) == expected
    seal_all(live)
    assert_folders_hold(tmp_path / "home", expected)
    assert not list((tmp_path / "home").glob(".state-*/*"))


def test_a_fork_of_now_has_no_records_of_sinks(live: Broker, tmp_path: Path) -> None:
    file = {"path": "h1/a", "rows": 1, "bytes": 10, "partition": "h1", "offsets": None}
    files = pa.Table.from_pylist([file], schema=schema.SINK_FILE)
    live.settle("readers", schema.OUTCOME.empty_table(), sink_files=files)
    live.sql("SELECT 1")  # waits for dispatch

    fork(tmp_path / "home", tmp_path / "fork", at_ms=None, ask_broker=live.copy_state)

    assert live.sink_files("readers").num_rows == 1
    with open_broker(tmp_path / "fork", ManualClock(live.engine.clock.now_ms())) as forked:
        assert forked.sink_files("readers").num_rows == 0


def test_a_file_that_stays_away_is_named(live: Broker, tmp_path: Path) -> None:
    for gone in (tmp_path / "home" / "events").iterdir():
        gone.unlink()

    with pytest.raises(StorageError, match=r"parquet of .* is missing, and the state names it"):
        fork(tmp_path / "home", tmp_path / "fork", at_ms=None, ask_broker=live.copy_state)

    assert not list((tmp_path / "fork").iterdir())


def test_a_fork_of_a_moment_is_what_the_source_says_of_it(tmp_path: Path) -> None:
    night = Night(tmp_path / "home")
    live_through(night)
    at = NIGHT + timedelta(minutes=133)
    at_ms = int(at.timestamp() * 1000)

    fork(tmp_path / "home", tmp_path / "fork", at_ms=at_ms, ask_broker=_never_asked)

    with open_broker(tmp_path / "fork", ManualClock(at_ms)) as forked:
        for view in VIEWS:
            then = f"{view}_at(TIMESTAMPTZ '{at.isoformat()}')"
            assert asked(forked, view) == asked(night.broker, then), view
    night.broker.close()


def test_what_cannot_be_forked_is_refused_and_leaves_nothing(live: Broker, tmp_path: Path) -> None:
    target = tmp_path / "fork"
    with pytest.raises(ConflictError, match="first files were sealed and dropped") as caught:
        fork(tmp_path / "home", target, at_ms=1, ask_broker=live.copy_state)
    assert "rmq restore DEST TARGET --to-time" in caught.value.remedy
    assert not list(target.iterdir())
    with pytest.raises(RequestError, match="is no home of a broker"):
        fork(tmp_path / "nothing", target, at_ms=None, ask_broker=_never_asked)
    (target / "file").touch()
    with pytest.raises(ConflictError, match="is not empty"):
        fork(tmp_path / "home", target, at_ms=None, ask_broker=live.copy_state)
    assert [path.name for path in target.iterdir()] == ["file"]


def test_the_command_forks_a_live_home_without_its_users(tmp_path: Path) -> None:
    from rmq_pipeline.flight.client import Client

    served = serve(tmp_path / "home", "--grpc", "none", "--set", "delay_max_ms=5000")
    try:
        with Client(home=served.home) as client:
            client.create_topic("orders", queues=1)
            client.create_user("root", type="super", password="root-password")
            client.send("orders", messages(7))
        done = process(RMQ, "fork", str(served.home), str(tmp_path / "fork"), "--json")
    finally:
        end(served)

    assert json.loads(done.stdout)["home"] == str(tmp_path / "fork"), done.stderr
    settings = json.loads((tmp_path / "fork" / "settings.json").read_text())
    assert settings["settings"]["delay_max_ms"] == 5000
    assert "flight" not in settings
    with open_broker(tmp_path / "fork") as forked:
        assert forked.read("orders", 0, offset=0, limit=10).num_rows == 7
        assert forked.list_users().num_rows == 0


def _never_asked() -> dict[str, Any]:
    raise AssertionError("the state is not copied for a fork of the log")
