"""Backups of live homes, and homes restored from them."""

from __future__ import annotations

import json
import os
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.backup.destination import Destination
from rmq_pipeline.backup.forking import fork
from rmq_pipeline.backup.log_files import LogFiles
from rmq_pipeline.backup.taking import Report, back_up
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import (
    BusyError,
    ConflictError,
    RequestError,
    StorageError,
)
from rmq_pipeline.store.connection import FileCopier
from rmq_pipeline.store.log.recovery import LostLogError
from rmq_pipeline.text import format_ms
from tests.backup.backups import names, never_asked, restored, taken
from tests.broker.sealed_home import (
    assert_folders_hold,
    fill,
    messages,
    open_broker,
    seal_all,
    stored,
)
from tests.incident_night import NIGHT, Night, live_through

#: The views that have an ``*_at`` twin.
VIEWS = (
    *("in_flight", "retrying", "scheduled", "half", "parked", "quarantined_groups", "progress"),
    *("waiting", "lag"),
)


def asked(broker: Broker, source: str) -> list[str]:
    rows = broker.sql(f"SELECT * FROM {source}").to_pylist()
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in rows)


def at_clock(home: Path, at_ms: int) -> Broker:
    return open_broker(home, ManualClock(at_ms))


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A night with a backup at its beginning and one at its end; its broker is still open."""
    folder = tmp_path_factory.mktemp("night")
    night = Night(folder / "home")
    first = taken(night.broker, folder / "backup")
    live_through(night)
    second = taken(night.broker, folder / "backup")
    assert (first.is_new_snapshot, second.is_new_snapshot) == (True, False)
    yield night
    night.broker.close()


@pytest.mark.parametrize("minute", [60, 120, 133, 140, 155])
def test_a_restored_home_is_what_the_source_says_of_that_moment(
    night: Night, tmp_path: Path, minute: int
) -> None:
    at = NIGHT + timedelta(minutes=minute)
    at_ms = int(at.timestamp() * 1000)
    folder = Path(night.broker.status()["home"]).parent / "backup"

    restored(folder, tmp_path / "home", at_ms)

    with at_clock(tmp_path / "home", at_ms) as broker:
        for view in VIEWS:
            moment = f"TIMESTAMPTZ '{at.isoformat()}'"
            assert asked(broker, view) == asked(night.broker, f"{view}_at({moment})"), view


def test_messages_segments_and_history_come_back(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_broker(tmp_path / "home", clock, snapshot_events=100) as broker:
        fill(broker)
        seal_all(broker)
        clock.advance(60_000)
        broker.send("plain", messages(30))
        report = taken(broker, tmp_path / "backup")
        expected = stored(broker)
        views = {view: asked(broker, view) for view in (*VIEWS, "dead_letters", "topics")}
        events = broker.sql("SELECT count(*) AS n FROM events").to_pylist()
        broker.send("plain", messages(5))
    assert report.is_new_snapshot

    restored(tmp_path / "backup", tmp_path / "again")

    with at_clock(tmp_path / "again", clock.now_ms()) as broker:
        assert stored(broker) == expected
        assert {view: asked(broker, view) for view in views} == views
        assert broker.sql("SELECT count(*) AS n FROM events").to_pylist() == events
        seal_all(broker)
        assert_folders_hold(tmp_path / "again", expected)


def test_a_second_backup_writes_only_what_is_new(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_broker(tmp_path / "home", clock) as broker:
        fill(broker)
        seal_all(broker)
        first = taken(broker, tmp_path / "backup")
        clock.advance(1000)
        broker.send("plain", messages(1, body_bytes=1000))
        second = taken(broker, tmp_path / "backup")

    assert first.written_bytes > 100_000
    assert 1000 < second.written_bytes < 20_000
    assert not second.is_new_snapshot
    assert first.spans == []
    assert second.spans == [(first.manifest.earliest_ms, second.manifest.latest_ms)]


def test_a_new_snapshot_is_taken_when_the_log_was_dropped(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_broker(tmp_path / "home", clock) as broker:
        fill(broker)
        taken(broker, tmp_path / "backup")
        for _ in range(8):
            broker.send("plain", messages(40, body_bytes=40_000))
        clock.advance(60_000)
        seal_all(broker)
        assert broker.engine.log.first > 0
        report = taken(broker, tmp_path / "backup")
        expected = stored(broker)

    assert report.is_new_snapshot
    assert len(report.manifest.log) < 8
    restored(tmp_path / "backup", tmp_path / "again")
    with at_clock(tmp_path / "again", clock.now_ms()) as broker:
        assert stored(broker) == expected


def test_a_stopped_home_is_backed_up_and_restored(tmp_path: Path) -> None:
    with open_broker(tmp_path / "home") as broker:
        fill(broker)
        seal_all(broker)
        expected = stored(broker)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("*.parquet")}

    back_up(tmp_path / "home", Destination.open(str(tmp_path / "backup")), ask_broker=never_asked)

    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "home").rglob("*.parquet")}
    assert left_of_copies(tmp_path / "home") == []
    restored(tmp_path / "backup", tmp_path / "again")
    with open_broker(tmp_path / "again") as broker:
        assert stored(broker) == expected


def test_an_interrupted_backup_leaves_the_older_one(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(path: str, _size: int) -> None:
        if path.startswith("topics/"):
            raise StoppedError

    with open_broker(tmp_path / "home") as broker:
        fill(broker, rounds=2)
        first = taken(broker, tmp_path / "backup")
        fill_more(broker)
        expected = stored(broker)
        with pytest.raises(StoppedError):
            taken(broker, tmp_path / "other", tell=stop)
        with pytest.raises(RequestError, match="There is no backup"):
            restored(tmp_path / "other", tmp_path / "again")
        left = names(tmp_path / "other")
        (tmp_path / "other" / "objects" / "left.tmp").write_bytes(b"of a kill")
        young = taken(broker, tmp_path / "other")
        assert (young.deleted_objects, left - names(tmp_path / "other")) == (0, set())
        whole = taken(broker, tmp_path / "other", unnamed_ms=0)
        assert left_of_copies(tmp_path / "home") == []

    assert left
    assert names(tmp_path / "other") == whole.manifest.objects() | young.manifest.objects()
    assert Destination.open(str(tmp_path / "backup")).manifests() == [first.manifest]
    restored(tmp_path / "backup", tmp_path / "again")
    restored(tmp_path / "other", tmp_path / "whole")
    with open_broker(tmp_path / "whole") as broker:
        assert stored(broker) == expected


def fill_more(broker: Broker) -> None:
    broker.send("plain", messages(60, body_bytes=4000))
    seal_all(broker)


def test_what_cannot_be_backed_up_or_restored_is_refused(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_broker(tmp_path / "home", clock) as broker:
        fill(broker, rounds=1)
        taken(broker, tmp_path / "backup")
        clock.advance(1000)
        broker.send("plain", messages(1))
        report = taken(broker, tmp_path / "backup")
        with pytest.raises(BusyError):
            back_up(
                tmp_path / "home",
                Destination.open(str(tmp_path / "other")),
                ask_broker=_no_endpoint,
            )
        with (
            open_broker(tmp_path / "stranger") as stranger,
            pytest.raises(ConflictError, match="backups of another home"),
        ):
            taken(stranger, tmp_path / "backup")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        with pytest.raises(ConflictError, match="is not empty, and no backup"):
            taken(broker, tmp_path / "full")
    with pytest.raises(ConflictError, match="is not empty"):
        restored(tmp_path / "backup", tmp_path / "full")
    with pytest.raises(RequestError, match="has no backup"):
        restored(tmp_path / "nothing", tmp_path / "new")
    earliest = format_ms(report.manifest.earliest_ms)
    with pytest.raises(RequestError, match=f"They restore {earliest} to "):
        restored(tmp_path / "backup", tmp_path / "new", report.manifest.earliest_ms - 1)
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(RequestError, match="is no home of a broker"):
            back_up(folder, Destination.open(str(tmp_path / "x")), ask_broker=never_asked)
    os.close(os.open(tmp_path / "home" / "log_store.json", os.O_CREAT))
    with pytest.raises(RequestError, match="is in log_store"):
        back_up(tmp_path / "home", Destination.open(str(tmp_path / "x")), ask_broker=never_asked)


def test_a_log_that_was_cut_gets_a_new_snapshot(tmp_path: Path) -> None:
    """A frame that was copied and is gone: the machine lost power before it was on disk."""
    with open_broker(tmp_path / "home") as broker:
        broker.create_topic("plain", queues=1)
        broker.send("plain", messages(3))
        end = broker.engine.log.end
        broker.send("plain", messages(4))
        first = taken(broker, tmp_path / "backup")
    log = tmp_path / "home" / "log"
    (path,) = log.glob("*.log")
    os.truncate(path, 4096 + end)
    os.truncate(path, 1 << 20)
    (log / "synced").unlink()
    (tmp_path / "home" / "state.duckdb").unlink()
    with open_broker(tmp_path / "home") as broker:
        broker.send("plain", messages(2, start=100))
        second = taken(broker, tmp_path / "backup")
        expected = stored(broker)

    assert (first.is_new_snapshot, second.is_new_snapshot) == (True, True)
    restored(tmp_path / "backup", tmp_path / "again")
    with open_broker(tmp_path / "again") as broker:
        assert stored(broker) == expected
        assert broker.read("plain", 0, offset=0, limit=10).num_rows == 5


def test_another_copy_of_the_state_waits_for_none(tmp_path: Path) -> None:
    with open_broker(tmp_path / "home") as broker:
        broker.create_topic("plain", queues=1)
        copier = broker.engine.database._copier
        refused = []

        def copy_twice(folder: Path) -> None:
            with pytest.raises(BusyError) as caught:
                broker.copy_state()
            refused.append(caught.value)
            FileCopier.copy(copier, folder)

        copier.copy = copy_twice  # type: ignore[method-assign]
        broker.copy_state()
        broker.send("plain", messages(3))

        assert len(refused) == 1
        assert broker.sql("SELECT count(*) AS n FROM messages").to_pylist() == [{"n": 3}]


def test_a_copy_that_another_caller_replaced_is_asked_for_again(tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []
    with open_broker(tmp_path / "home") as broker:
        fill(broker, rounds=1)

        def ask() -> dict[str, Any]:
            answers.append(broker.copy_state())
            if len(answers) == 1:  # another caller, before the backup reads the copy
                broker.send("plain", messages(3))
                broker.copy_state()
            return answers[-1]

        report = back_up(
            tmp_path / "home", Destination.open(str(tmp_path / "backup")), ask_broker=ask
        )
        assert len(answers) == 2
        assert report.manifest.snapshot.position == answers[-1]["position"]

        def lie() -> dict[str, Any]:
            return {**broker.copy_state(), "position": 64}

        with pytest.raises(StorageError, match="and the broker copied 64"):
            back_up(tmp_path / "home", Destination.open(str(tmp_path / "other")), ask_broker=lie)
        assert left_of_copies(tmp_path / "home") == []


def test_a_copy_that_no_backup_fetched_goes_with_the_next_start(tmp_path: Path) -> None:
    with open_broker(tmp_path / "home") as broker:
        broker.create_topic("plain", queues=1)
        broker.copy_state()
        (tmp_path / "home" / ".state-copy" / "notes").touch()
        assert len(left_of_copies(tmp_path / "home")) == 2

    with open_broker(tmp_path / "home"):
        assert left_of_copies(tmp_path / "home") == [".state-copy/notes"]


def left_of_copies(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.glob(".state-*/*"))


@pytest.mark.parametrize("name", ["backup", "a/b", "topics", ".", ".."])
def test_no_backup_and_no_fork_is_written_into_the_home(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    with open_broker(home) as broker:
        broker.create_topic("plain", queues=1)
        (home / "backup").mkdir()
        (home / "backup" / "precious").touch()
        (tmp_path / "link").symlink_to(home)

        for folder in (home / name, tmp_path / "link" / name):
            with pytest.raises(RequestError, match="is in the home"):
                taken(broker, folder)
            with pytest.raises(RequestError, match="is in the home"):
                fork(home, folder, at_ms=None, ask_broker=broker.copy_state)
        taken(broker, tmp_path / "backup")

    assert (home / "backup" / "precious").exists()


def test_no_moment_between_two_snapshots_is_missing(tmp_path: Path) -> None:
    folder, clock = tmp_path / "backup", ManualClock()
    expected: dict[int, int] = {}
    reports: list[Report] = []
    with open_broker(tmp_path / "home", clock) as broker:
        broker.create_topic("plain", queues=1)
        for _ in range(4):
            for _ in range(3):
                clock.advance(1000)
                broker.send("plain", messages(1, body_bytes=2000))
                expected[clock.now_ms() + 500] = broker.read(
                    "plain", 0, offset=0, limit=99
                ).num_rows
            reports.append(taken(broker, folder, log_bytes_max=4000))
            assert reports[-1].is_new_snapshot
            seal_all(broker)

    ((first_ms, last_ms),) = reports[-1].spans
    within = [at_ms for at_ms in expected if first_ms <= at_ms <= last_ms]
    assert len(within) >= 8, "all but those before the first and after the last backup"
    for at_ms in within[-8::2]:
        again = tmp_path / str(at_ms)
        restored(folder, again, at_ms)
        with at_clock(again, at_ms) as broker:
            assert broker.read("plain", 0, offset=0, limit=99).num_rows == expected[at_ms]


def test_a_span_ends_before_frames_that_may_have_company(tmp_path: Path) -> None:
    """The clock of the machine is years ahead of the broker's: it claims nothing."""
    folder, clock = tmp_path / "backup", ManualClock()
    with open_broker(tmp_path / "home", clock) as broker:
        broker.create_topic("plain", queues=1)
        clock.advance(1000)
        broker.send("plain", messages(2))
        sent_ms = clock.now_ms()
        broker.sql("SELECT 1")  # waits for dispatch
        taken(broker, folder)
        broker.send("plain", messages(5))  # in the same ms
        clock.advance(1000)
        broker.send("plain", messages(1))
        for at_ms in (sent_ms, sent_ms + 60_000):
            with pytest.raises(RequestError, match="cannot restore"):
                restored(folder, tmp_path / "never", at_ms)
        report = taken(broker, folder)
    assert report.spans == [(sent_ms, sent_ms + 999)]

    restored(folder, tmp_path / "again", sent_ms)
    with at_clock(tmp_path / "again", sent_ms) as broker:
        assert broker.read("plain", 0, offset=0, limit=99).num_rows == 7


def test_a_file_that_stays_away_is_named(tmp_path: Path) -> None:
    with open_broker(tmp_path / "home") as broker:
        fill(broker, rounds=1)
        seal_all(broker)
        broker.sql("SELECT 1")  # waits for dispatch, so that the state names the files
        for gone in (tmp_path / "home" / "events").iterdir():
            gone.unlink()

        with pytest.raises(StorageError, match=r"parquet of .* is missing, and the state names it"):
            taken(broker, tmp_path / "backup")


def test_a_log_that_ends_before_the_state_is_refused(tmp_path: Path) -> None:
    """A power cut may lose frames that dispatch has applied to a database that is on disk."""
    with open_broker(tmp_path / "home") as broker:
        broker.create_topic("plain", queues=1)
        end = broker.engine.log.end
        broker.send("plain", messages(4))
    (path,) = (tmp_path / "home" / "log").glob("*.log")
    os.truncate(path, 4096 + end)
    os.truncate(path, 1 << 20)

    with pytest.raises(LostLogError, match=f"ends at position {end}, and its state is of"):
        back_up(
            tmp_path / "home", Destination.open(str(tmp_path / "backup")), ask_broker=never_asked
        )

    assert not list((tmp_path / "backup" / "manifests").iterdir())


def test_a_log_file_that_is_replaced_under_its_name_is_read(tmp_path: Path) -> None:
    """A log file without a frame is replaced if the next frame does not fit."""
    with (
        open_broker(tmp_path / "home") as broker,
        closing(LogFiles.open(tmp_path / "home" / "log")) as log,
    ):
        broker.engine.log._roll(2 << 20, use_reserve=False)
        broker.create_topic("plain", queues=1)

        log.look()

        assert log.whole(0).end == broker.engine.log.end > 0


def test_expired_segments_are_not_shown_in_a_restored_home(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_broker(tmp_path / "home", clock) as broker:
        fill(broker, rounds=1)
        seal_all(broker)
        broker.sql("SELECT 1")  # waits for dispatch
        taken(broker, tmp_path / "backup")
        broker.alter_topic("plain", retention_ms=3_600_000)
        clock.advance(7_200_000)
        assert broker.expire()["segments"] > 0
        assert not taken(broker, tmp_path / "backup").is_new_snapshot

    restored(tmp_path / "backup", tmp_path / "again")

    assert list((tmp_path / "again").glob("topics/ordered/*/q*/*"))
    assert not list((tmp_path / "again").glob("topics/plain/*/q*/*"))


def _no_endpoint() -> dict[str, Any]:
    raise BusyError("no endpoint")
