"""Sealing with a log in PostgreSQL: successors on empty homes and standbys have what was sealed."""

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment_file import Merger
from rmq_pipeline.archive.shared_history import FOLDER
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work import shared_files
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.seal import seal
from rmq_pipeline.broker.work.verification import verify
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import (
    ArchiveError,
    LogStoreError,
    OperatorError,
    RequestError,
    StorageError,
)
from tests.broker.archived_log import (
    HOUR_MS,
    Open,
    files,
    history,
    prepared,
    seal_all,
    settle_some,
    states,
    stop,
    wake,
    with_bodies,
)
from tests.broker.sealed_home import MIB, messages, stored
from tests.postgres_server import PostgresServer
from tests.waiting import until


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
