"""Sealing with a log in PostgreSQL: successors on empty homes and standbys have what was sealed."""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment_file import Merger
from rmq_pipeline.archive.shared_history import FOLDER
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work import shared_files, shared_state
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.seal import seal
from rmq_pipeline.broker.work.verification import verify
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import (
    ArchiveError,
    LogFencedError,
    LogStoreError,
    OperatorError,
    RequestError,
    StandbyError,
    StorageError,
)
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage.place import at
from rmq_pipeline.store.database import FILE_NAME
from rmq_pipeline.store.log.catching_up import DivergedLogError
from rmq_pipeline.store.state_history import PLACES
from tests.broker.sealed_home import MIB, fill, messages, stored
from tests.object_store import ObjectStore
from tests.postgres_server import PostgresServer
from tests.waiting import until

Open = Callable[..., Broker]
LEASE_MS = 1500  # a renewal has half of this time, on a busy machine
HOUR_MS = 3_600_000


@pytest.fixture(params=["folder", "bucket"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty archive."""
    if request.param == "folder":
        return str(tmp_path / "archive")
    store: ObjectStore = request.getfixturevalue("object_store")
    return store.address(f"archive-{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_broker(tmp_path: Path, database: str, clock: ManualClock) -> Iterator[Open]:
    opened: list[Broker] = []

    def open_it(home: str, archive: str | None, *, standby: bool = False, **changed: Any) -> Broker:
        settings = Settings(
            archive_root=archive,
            **{
                "log_store": database,
                "log_file_bytes": MIB,
                "reserve_bytes": MIB,
                "log_lease_ms": LEASE_MS,
                "log_timeout_ms": 1000,
                "seal_after_ms": 0,
                "snapshot_events": 50,
                "compact_min_inputs": 2,
                "replaced_grace_ms": 0,
                **changed,
            },
        )
        opened.append(
            Broker.open(
                tmp_path / home, clock=clock, upkeep="none", settings=settings, standby=standby
            )
        )
        return opened[-1]

    yield open_it
    for broker in opened:
        wake(broker)
        broker.close()


def stop(broker: Broker) -> None:
    """Keep a broker from renewing its lease or asking for it, as SIGSTOP and kill -9 do."""
    replication = broker.engine.replication
    assert replication is not None
    replication._renew = lambda **_: None  # type: ignore[method-assign]


def wake(broker: Broker) -> None:
    """Let it go on, as SIGCONT does."""
    replication = broker.engine.replication
    if replication is not None and replication.__dict__.pop("_renew", None):
        replication._fresh_until = 0.0


def seal_all(broker: Broker) -> None:
    while broker.seal(limit_bytes=4 * MIB)["segments"]:
        pass


def seal_until(broker: Broker, fault: Callable[[str], None]) -> None:
    while seal(broker.engine, limit_bytes=1 << 30, window=None, fault=fault)["segments"]:
        pass


def files(archive: str) -> dict[str, int]:
    return at(archive).files("")


def rows(broker: Broker, sql: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = broker.sql(sql).to_pylist()
    return found


def history(broker: Broker) -> list[dict[str, Any]]:
    return rows(
        broker,
        "SELECT position, kind, consumer_group, topic, queue_id, queue_offset FROM events"
        " WHERE kind NOT IN ('founded', 'segment', 'event_segment', 'snapshot')"
        ' ORDER BY position, "row"',
    )


def with_bodies(broker: Broker) -> list[dict[str, Any]]:
    return rows(
        broker,
        "SELECT topic, queue_id, queue_offset, body FROM messages WHERE topic = 'plain'"
        " ORDER BY ALL",
    )


def prepared(broker: Broker) -> None:
    fill(broker)
    broker.create_group("folding", order="message_group")
    broker.subscribe("folding", "ordered")
    settle_some(broker, "first")


def settle_some(broker: Broker, said: str) -> None:
    got = broker.receive("folding", "ordered", limit=7)
    state = pa.table({"message_group": got["message_group"], "said": [said] * got.num_rows})
    handles, acks = got["receipt_handle"], ["ack"] * got.num_rows
    outcomes = pa.table([handles, acks], names=["receipt_handle", "outcome"])
    broker.settle("folding", outcomes, state=state, topic="ordered")


def states(broker: Broker) -> list[dict[str, Any]]:
    places = pa.table([["g0", "g1"], *[[0, 0]] * (len(PLACES) - 1)], names=PLACES.names)
    found: list[dict[str, Any]] = broker.keyed_state_history(
        "folding", topic="ordered", places=places
    ).to_pylist()
    return found


def test_a_successor_on_an_empty_home_has_what_was_sealed(open_broker: Open, archive: str) -> None:
    first = open_broker("first", archive)
    prepared(first)
    seal_all(first)
    assert first.status()["log_first"] > 0
    settle_some(first, "later")
    before, events = stored(first), history(first)
    bodies = with_bodies(first)
    assert bodies
    kept_states = states(first)
    stop(first)

    second = open_broker("second", archive)

    assert stored(second) == before
    assert history(second) == events
    assert with_bodies(second) == bodies
    assert states(second) == kept_states
    seal_all(second)
    assert second.status()["log_first"] > 0
    assert stored(second) == before
    assert history(second) == events
    assert with_bodies(second) == bodies
    assert states(second) == kept_states
    assert second.archive()["rows"] >= len(bodies)
    second.close()
    assert not [each for each in verify(second.engine.home.path) if each.damage]


def test_a_standby_reads_and_drops_what_was_sealed(open_broker: Open, archive: str) -> None:
    leader = open_broker("first", archive, log_lease_ms=60_000)
    standby = open_broker("second", archive, standby=True, log_lease_ms=60_000)
    prepared(leader)
    seal_all(leader)
    until(lambda: standby.engine.log.end == leader.engine.log.end)

    assert history(standby) == history(leader)
    assert stored(standby) == stored(leader)
    shared_files.follow(standby.engine)

    assert standby.status()["log_first"] > 0
    assert stored(standby) == stored(leader)
    assert history(standby) == history(leader)
    assert states(standby) == states(leader)
    ((left,),) = standby.engine.database._root.sql(
        f"SELECT count(*) FROM store.events WHERE position < {standby.engine.segments.sealed_to}"
    ).fetchall()
    assert left == 0
    leader.close()
    until(lambda: not standby.is_standby)
    settle_some(standby, "of the second")
    seal_all(standby)
    third = open_broker("third", archive, standby=True, log_lease_ms=60_000)
    assert stored(third) == stored(standby)
    assert states(third) == states(standby)


def test_files_of_a_restarted_standby_are_fetched_again(open_broker: Open, folder: str) -> None:
    leader = open_broker("first", folder, log_lease_ms=60_000)
    standby = open_broker("second", folder, standby=True, log_lease_ms=60_000)
    prepared(leader)
    seal_all(leader)
    until(lambda: standby.engine.log.end == leader.engine.log.end)
    shared_files.follow(standby.engine)
    standby.close()
    for file in (standby.engine.home.events).glob("0*"):
        file.unlink()

    standby = open_broker("second", folder, standby=True, log_lease_ms=60_000)

    assert history(standby) == history(leader)


def test_a_leader_that_stood_still_changes_no_file_of_its_successor(
    open_broker: Open, folder: str, clock: ManualClock
) -> None:
    first = open_broker("first", folder)
    prepared(first)
    seal_all(first)
    first.send("plain", messages(20, body_bytes=1000))
    stop(first)
    second = open_broker("second", folder)
    second.create_topic("new", queues=1)
    second.send("new", messages(20, body_bytes=1000))
    second.send("plain", messages(20, body_bytes=1000))
    seal_all(second)
    second.compact(limit_bytes=1 << 40)
    clock.advance(HOUR_MS)
    before, left = files(folder), stored(second)

    # As if the old leader had been stopped after each of its checks: none refuses its steps here.
    first.engine.check_leads = lambda: None  # type: ignore[method-assign]
    root, engine = first.engine.segments.root, first.engine
    registered = [s for t in engine.segments.topics_sealed() for s in engine.segments.of_topic(t)]
    with pytest.raises(OperatorError, match="later leader"):
        manifest.tidy(
            root,
            registered,
            exists=engine.state.topics.__contains__,
            now_ms=clock.now_ms(),
            epoch=engine.epoch,
        )
    for topic_id, topic in ((t, s.topic.name) for t, s in second.engine.state.topics.items()):
        manifest.delete_replaced(
            root, topic=topic, topic_id=topic_id, is_over=lambda _: True, epoch=engine.epoch
        )
        if topic_id not in engine.state.topics:
            manifest.remove_topic(root, topic=topic, topic_id=topic_id, epoch=engine.epoch)
    assert engine.shared_history is not None
    engine.shared_history.sweep((), epoch=engine.epoch, grace_s=0)

    second.engine.segments.loaded = second.engine.segments.tidy = False
    counted = shared_files._registered(second.engine)
    later = {f"{FOLDER}/{path}" for path in counted if int(path.rpartition("-")[2][:-8]) > 1}
    assert later <= files(folder).keys()
    newer = {path for path in before if "-2." in path and FOLDER not in path}
    assert newer <= files(folder).keys()
    assert stored(second) == left


def test_a_fenced_leader_registers_nothing(open_broker: Open, folder: str) -> None:
    first = open_broker("first", folder)
    prepared(first)
    seconds: list[Broker] = []

    def fault(step: str) -> None:
        """Stop it between the files and their registration; another broker leads meanwhile."""
        if step == "events_renamed" and not seconds:
            stop(first)
            seconds.append(open_broker("second", folder))
            seal_all(seconds[0])
            wake(first)

    with pytest.raises(OperatorError):
        seal(first.engine, limit_bytes=MIB, window=None, fault=fault)

    (second,) = seconds
    before, events = stored(second), history(second)
    second.close()
    third = open_broker("third", folder)
    seal_all(third)
    assert stored(third) == before
    assert history(third) == events
    assert not [path for path in files(folder) if "-1." in path and FOLDER not in path]


def test_a_merge_that_an_earlier_leader_planned_is_refused(open_broker: Open, folder: str) -> None:
    first = open_broker("first", folder)
    first.create_topic("plain", queues=1)
    for _ in range(3):
        first.send("plain", messages(20, body_bytes=1000))
        seal_all(first)
    (plan,) = first.plan_compaction()
    added = Merger.from_json(plan).run()
    stop(first)
    second = open_broker("second", folder)

    with pytest.raises(RequestError, match="epoch"):
        second.replace_segments(plan["inputs"], added=added.relative)

    (plan,) = second.plan_compaction()
    added = Merger.from_json(plan).run()
    assert second.replace_segments(plan["inputs"], added=added.relative)["inputs"] == 3
    assert len(stored(second)["plain"][0]) == 60


def test_a_merge_in_doubt_is_not_tidied_away(
    open_broker: Open, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_broker("first", folder)
    first.create_topic("plain", queues=1)
    for _ in range(3):
        first.send("plain", messages(20, body_bytes=1000))
        seal_all(first)
    settled = shared_files.settled_topics

    def no_answer() -> None:
        raise LogStoreError("The answer was lost.")

    def merge_meanwhile(engine: Engine) -> Collection[int]:
        monkeypatch.undo()
        with monkeypatch.context() as during:
            during.setattr(engine, "confirm", no_answer)
            with pytest.raises(LogStoreError):
                first.compact(limit_bytes=1 << 40)
        return settled(engine)

    monkeypatch.setattr(shared_files, "settled_topics", merge_meanwhile)
    first.engine.segments.tidy = False
    seal_all(first)

    assert [path for path in files(folder) if path.endswith(f"{0:020d}-{60:020d}-1.kept")]
    assert len(first.sql("SELECT * FROM segments")) == 1


def test_a_merged_file_that_cannot_be_read_now_is_kept(
    open_broker: Open, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier call may have registered it, without an answer."""
    broker = open_broker("first", folder)
    broker.create_topic("plain", queues=1)
    for _ in range(3):
        broker.send("plain", messages(20, body_bytes=1000))
        seal_all(broker)
    (plan,) = broker.plan_compaction()
    added = Merger.from_json(plan).run()

    def away(_root: object, segment: object) -> None:
        raise StorageError(f"{segment} cannot be read.")

    with monkeypatch.context() as during:
        during.setattr(manifest, "entry_of", away)
        with pytest.raises(StorageError, match="cannot be read"):
            broker.replace_segments(plan["inputs"], added=added.relative)

    assert broker.replace_segments(plan["inputs"], added=added.relative)["inputs"] == 3
    assert len(stored(broker)["plain"][0]) == 60


def test_expired_messages_are_gone_for_the_successor(
    open_broker: Open, archive: str, clock: ManualClock
) -> None:
    first = open_broker("first", archive)
    first.create_topic("plain", queues=1)
    for _ in range(3):
        first.send("plain", messages(20, body_bytes=1000))
        clock.advance(HOUR_MS)
        seal_all(first)
    first.alter_topic("plain", retention_ms=90 * 60_000)
    report = first.expire()
    assert (report["segments"], report["deleted_files"]) == (2, 2)
    stop(first)

    second = open_broker("second", archive)

    assert stored(second)["plain"][0]["queue_offset"].to_pylist() == list(range(40, 60))
    assert second.describe_topic("plain")["offsets"][0]["min_offset"] == 40


def test_files_stay_until_the_store_knows_that_they_may_go(
    open_broker: Open, folder: str, clock: ManualClock
) -> None:
    """With async the store lags: a leader must not delete what its successor still counts."""
    first = open_broker("first", folder, replication="async")
    replication = first.engine.replication
    assert replication is not None
    first.create_topic("plain", queues=1)
    for _ in range(3):
        first.send("plain", messages(20, body_bytes=1000))
        clock.advance(HOUR_MS)
        until(lambda: replication.confirmed == first.engine.log.end)
        seal_all(first)
    first.alter_topic("plain", retention_ms=90 * 60_000)
    until(lambda: replication.confirmed == first.engine.log.end)
    hung = replication._closing.wait
    replication._append_one = lambda *_: hung(3600)  # type: ignore[method-assign]

    with pytest.raises(StorageError, match="behind"):
        first.expire()

    assert sum(path.endswith(".kept") for path in files(folder)) == 3
    assert sum("queue_id" in path and path.endswith(".parquet") for path in files(folder)) == 3


def test_a_deleted_topic_goes_from_the_archive(open_broker: Open, folder: str) -> None:
    first = open_broker("first", folder)
    prepared(first)
    seal_all(first)
    first.delete_topic("plain")
    first.send("ordered", messages(1, message_group=["g"]))

    seal_all(first)

    assert not [path for path in files(folder) if path.startswith("plain/")]


def test_a_log_with_an_archive_needs_it(open_broker: Open, folder: str, tmp_path: Path) -> None:
    first = open_broker("first", folder)
    prepared(first)
    seal_all(first)
    first.close()

    with pytest.raises(ArchiveError, match="archive_root is not set"):
        open_broker("second", None)
    with pytest.raises(ArchiveError, match="not the archive of this log"):
        open_broker("third", str(tmp_path / "another"))
    (tmp_path / "moved").symlink_to(folder)
    assert stored(open_broker("fourth", str(tmp_path / "moved")))["plain"]


def test_an_archive_of_another_log_is_refused(
    open_broker: Open, folder: str, postgres: PostgresServer
) -> None:
    first = open_broker("first", folder)
    prepared(first)
    seal_all(first)
    other = open_broker("other", folder, log_store=postgres.new_database())
    other.create_topic("plain", queues=1)
    other.send("plain", messages(1))

    with pytest.raises(ArchiveError, match="another home"):
        other.seal(limit_bytes=MIB)


def test_a_home_that_sealed_nothing_begins_with_an_archive(open_broker: Open, folder: str) -> None:
    first = open_broker("first", None)
    prepared(first)
    seal_all(first)
    before = stored(first)
    first.close()

    again = open_broker("first", folder)
    seal_all(again)

    assert again.status()["log_first"] > 0
    assert stored(again) == before
    said = json.loads((Path(folder) / "_archive.json").read_text())
    assert again.engine.replication is not None
    assert said["id"] == again.engine.replication.store.id


# ------------------------------------------------------------------------------ trimming the store


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
    assert standby.engine.followed is not None
    with monkeypatch.context() as during:
        during.setattr(standby.engine.followed, "missing", lambda *_, **__: [])
        trimmed(leader)
    until(lambda: "away for too long" in (standby.engine.followed.failing or ""))
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
