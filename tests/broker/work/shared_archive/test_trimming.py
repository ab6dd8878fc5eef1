"""Trimming a log in PostgreSQL: homes begin with a copy of the state in the archive."""

from pathlib import Path

import pytest

from rmq_pipeline.archive.shared_history import FOLDER
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work import shared_files, shared_state
from rmq_pipeline.errors import (
    LogFencedError,
    OperatorError,
    StandbyError,
    StorageError,
)
from rmq_pipeline.storage.place import at
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.log.catching_up import DivergedLogError
from tests.broker.archived_log import (
    Open,
    history,
    prepared,
    seal_all,
    seal_until,
    settle_some,
    states,
    stop,
    with_bodies,
)
from tests.broker.sealed_home import MIB, messages, stored
from tests.postgres_server import PostgresServer
from tests.waiting import until


def frames_in(postgres: PostgresServer, database: str) -> tuple[int, int]:
    """Position of the first frame in the store, and the bytes of all."""
    ((first, size),) = postgres.execute(
        "SELECT min(position), sum(length)::bigint FROM rmq_log.frames", url=database
    )
    return int(first), int(size)


def trimmed(broker: Broker) -> None:
    """Fill a broker and seal it, until its store is trimmed."""
    prepared(broker)
    for _ in range(2):  # the log is trimmed up to the last copy but one
        broker.send("plain", messages(1500, start=1000, body_bytes=5000))
        seal_all(broker)
    broker.send("plain", messages(5, start=9000, body_bytes=100))
    settle_some(broker, "after the copy")


def test_an_empty_home_begins_with_the_copy_of_a_trimmed_store(
    open_broker: Open, archive: str, postgres: PostgresServer, database: str
) -> None:
    first = open_broker("first", archive)
    trimmed(first)
    begins_at, _ = frames_in(postgres, database)
    assert begins_at > 4 * MIB
    before, events, bodies = stored(first), history(first), with_bodies(first)
    kept_states = states(first)
    stop(first)

    second = open_broker("second", archive)

    assert second.status()["log_first"] >= begins_at
    assert stored(second) == before
    assert history(second) == events
    assert with_bodies(second) == bodies
    assert states(second) == kept_states
    seal_all(second)
    second.close()
    assert stored(open_broker("second", archive)) == before


def test_a_new_standby_begins_with_the_copy(
    open_broker: Open, folder: str, postgres: PostgresServer, database: str
) -> None:
    leader = open_broker("first", folder, log_lease_ms=60_000)
    trimmed(leader)
    assert frames_in(postgres, database)[0] > 0

    standby = open_broker("second", folder, standby=True, log_lease_ms=60_000)

    until(lambda: standby.engine.log.end == leader.engine.log.end)
    assert stored(standby) == stored(leader)
    assert history(standby) == history(leader)
    assert states(standby) == states(leader)
    leader.close()
    until(lambda: not standby.is_standby)
    standby.send("plain", messages(1))
    settle_some(standby, "of the new leader")


def test_a_standby_that_lags_by_one_copy_catches_up(
    open_broker: Open, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = open_broker("first", folder, log_lease_ms=60_000)
    prepared(leader)
    standby = open_broker("second", folder, standby=True, log_lease_ms=60_000)
    with monkeypatch.context() as during:
        during.setattr(standby.engine.followed, "missing", lambda *_, **__: [])
        leader.send("plain", messages(1500, start=1000, body_bytes=5000))
        seal_all(leader)
        assert leader.engine.leads is not None
        assert leader.engine.leads.copy is not None

    until(lambda: standby.engine.log.end == leader.engine.log.end)
    assert stored(standby) == stored(leader)


def test_a_standby_that_lags_too_far_does_not_begin_to_lead(
    open_broker: Open, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = open_broker("first", folder, log_lease_ms=60_000)
    standby = open_broker("second", folder, standby=True, log_lease_ms=60_000)
    followed = standby.engine.followed
    assert followed is not None
    with monkeypatch.context() as during:
        during.setattr(followed, "missing", lambda *_, **__: [])
        trimmed(leader)
    until(lambda: "away for too long" in (followed.failing or ""))
    leader.close()

    with pytest.raises(OperatorError, match="away for too long"):
        standby.promote()

    assert standby.is_standby


@pytest.mark.parametrize("step", ["state_copied", "state_noted", "store_trimmed"])
def test_a_leader_may_die_at_each_step_of_a_trim(
    open_broker: Open, folder: str, postgres: PostgresServer, database: str, step: str
) -> None:
    first = open_broker("first", folder)
    prepared(first)
    first.send("plain", messages(1500, start=1000, body_bytes=5000))

    def fault(name: str) -> None:
        if name == step:
            raise OSError("died")

    with pytest.raises(StorageError, match="died"):
        seal_until(first, fault)
    before, kept_states = stored(first), states(first)
    stop(first)

    second = open_broker("second", folder)
    assert stored(second) == before
    for _ in range(2):
        second.send("plain", messages(1500, start=3000, body_bytes=5000))
        seal_all(second)

    assert frames_in(postgres, database)[0] > 4 * MIB
    assert states(second) == kept_states
    third = open_broker("third", folder, standby=True)
    assert stored(third) == stored(second)


def test_a_fenced_leader_trims_nothing(
    open_broker: Open, folder: str, postgres: PostgresServer, database: str
) -> None:
    first = open_broker("first", folder)
    prepared(first)
    first.send("plain", messages(1500, start=1000, body_bytes=5000))
    seconds: list[Broker] = []

    def fault(name: str) -> None:
        if name == "state_copied":
            stop(first)
            seconds.append(open_broker("second", folder))

    with pytest.raises(OperatorError, match="leads"):
        seal_until(first, fault)

    replication = first.engine.replication
    assert replication is not None
    with pytest.raises(LogFencedError):
        replication.store.trim(1 << 40)
    assert frames_in(postgres, database)[0] == 0
    for _ in range(2):
        seconds[0].send("plain", messages(1500, start=3000, body_bytes=5000))
        seal_all(seconds[0])
    before = stored(seconds[0])
    assert frames_in(postgres, database)[0] > 0
    assert stored(open_broker("third", folder, standby=True)) == before


def test_a_copy_is_not_written_over_another_one(tmp_path: Path, folder: str) -> None:
    """The store may name a copy, although its leader got no answer."""
    database, root = tmp_path / FILE_NAME, at(folder)
    database.write_bytes(b"one")
    first = shared_state.store(root, home=tmp_path, database=database, at=(64, 32), epoch=1)
    database.write_bytes(b"another")

    shared_state.store(root, home=tmp_path, database=database, at=(64, 32), epoch=1)

    assert root.read(f"{FOLDER}/state/{first.folder}/{FILE_NAME}") == b"one"
    shared_state.delete_others(root, {first.folder}, epoch=1)
    assert [path.split("/")[2] for path in root.files(f"{FOLDER}/state")] == [first.folder]


def test_a_home_that_was_away_for_too_long_is_refused(open_broker: Open, folder: str) -> None:
    first = open_broker("first", folder)
    first.create_topic("other", queues=1)
    first.close()
    trimmed(open_broker("second", folder, log_lease_ms=60_000))

    with pytest.raises(DivergedLogError, match="away for too long"):
        open_broker("first", folder, standby=True)


def test_a_begin_that_was_interrupted_starts_over(
    open_broker: Open, folder: str, tmp_path: Path
) -> None:
    first = open_broker("first", folder)
    trimmed(first)
    before = stored(first)
    copy = max(Path(folder).glob(".history/state/*/state.duckdb"))
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    stop(first)

    with pytest.raises(StorageError, match="damaged"):
        open_broker("second", folder)

    copy.write_bytes(content)
    (tmp_path / "second" / "log").mkdir(exist_ok=True)
    (tmp_path / "second" / "log" / f"{0:020d}.log").write_bytes(b"half a file")
    assert stored(open_broker("second", folder)) == before


def test_a_store_is_not_trimmed_while_the_archive_lacks_a_file(
    open_broker: Open, folder: str, postgres: PostgresServer, database: str
) -> None:
    first = open_broker("first", folder)
    first.create_topic("plain", queues=1)
    first.send("plain", messages(100, body_bytes=1000))
    seal_all(first)
    (gone,) = Path(folder).glob("plain/*/.segments/*/*.kept")
    gone.unlink()
    first.send("plain", messages(1500, start=1000, body_bytes=5000))

    with pytest.raises(StorageError, match="is not in"):
        seal_all(first)

    assert frames_in(postgres, database)[0] == 0


def test_no_copy_is_made_when_the_disk_is_nearly_full(
    open_broker: Open, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_broker("first", folder)
    prepared(broker)
    broker.send("plain", messages(1500, start=1000, body_bytes=5000))
    monkeypatch.setattr(shared_files, "free_bytes", lambda _: 9 * MIB // 2)

    seal_all(broker)

    assert not list(Path(folder).glob(".history/state/*"))
    monkeypatch.undo()
    seal_all(broker)
    assert list(Path(folder).glob(".history/state/*"))


def test_a_successor_seals_without_the_history(
    open_broker: Open, folder: str, tmp_path: Path
) -> None:
    first = open_broker("first", folder)
    prepared(first)
    seal_all(first)
    old = {path.name for path in (tmp_path / "first" / "events").glob("0*")}
    assert old
    stop(first)
    second = open_broker("second", folder)
    second.send("plain", messages(20, body_bytes=1000))

    seal_all(second)

    here = {path.name for path in (tmp_path / "second" / "events").glob("0*")}
    assert here
    assert not here & old
    assert history(second)


def test_a_standby_changes_no_archive(open_broker: Open, folder: str) -> None:
    open_broker("first", folder, log_lease_ms=60_000)
    standby = open_broker("second", folder, standby=True, log_lease_ms=60_000)

    with pytest.raises(StandbyError):
        standby.engine.segments.claim()
