"""Segments may be in a root of their own, local or of another file system."""

import errno
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq
import pytest

from rmq_pipeline import errors
from rmq_pipeline.archive import manifest
from rmq_pipeline.archive.segment_file import Merger
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.seal import note_away
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.topic_log import hours_of
from rmq_pipeline.spark.replay.topic_log import TopicLog
from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.storage.place import opened
from rmq_pipeline.storage.remote import RemoteRoot
from tests.broker import archive_home
from tests.broker.archive_home import HOUR_MS, everything, fill
from tests.broker.sealed_home import messages
from tests.object_store import KEY, SECRET, ObjectStore
from tests.waiting import until


@pytest.mark.parametrize("as_uri", [True, False])
def test_another_local_root_has_the_segments(home: Path, tmp_path: Path, as_uri: bool) -> None:
    place = tmp_path / "elsewhere"
    address = place.as_uri() if as_uri else str(place)
    clock = ManualClock()
    with archive_home.opened(home, clock, archive_root=address) as broker:
        fill(broker)
        broker.compact()
        before = everything(broker)
        assert broker.archive()["rows"] == 480

    assert not list((home / "topics").rglob("*.parquet"))
    shown = sorted(place.glob("t/*/queue_id=*/*.parquet"))
    assert sum(pq.read_metadata(path).num_rows for path in shown) == 480
    with archive_home.opened(home, clock, archive_root=address) as again:
        assert everything(again).equals(before)
        assert again.find("t", key="u3-3").num_rows == 1


def test_a_home_is_not_opened_with_another_root(home: Path, tmp_path: Path) -> None:
    with archive_home.opened(home) as broker:
        fill(broker, turns=1)

    with pytest.raises(errors.ArchiveError, match="its own folder"):
        archive_home.opened(home, archive_root=str(tmp_path / "elsewhere"))

    with archive_home.opened(home) as broker:
        assert len(everything(broker)) == 40


def test_a_root_belongs_to_one_home(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    archive_home.opened(home, archive_root=str(place)).close()
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").touch()

    for wrong, why in ((place, "another home"), (full, "not empty")):
        with pytest.raises(errors.ArchiveError, match=why):
            archive_home.opened(tmp_path / f"of-{wrong.name}", archive_root=str(wrong))
    with pytest.raises(errors.ArchiveError, match="nowhere"):
        archive_home.opened(tmp_path / "third", archive_root="nowhere://x")

    assert (full / "precious").exists()


def test_a_file_system_of_pyarrow_has_the_segments(home: Path) -> None:
    clock = ManualClock()
    # Kept in memory by pyarrow: without links, as an object store is.
    with archive_home.opened(home, clock, archive_root="mock:///bucket") as broker:
        root = broker.engine.segments.root
        assert isinstance(root, RemoteRoot)
        fill(broker)
        before = everything(broker)
        (topic_id,) = root.folders("t")
        old = manifest.read(root, f"t/{topic_id}").files

        assert broker.compact()["compactions"] > 0

        listed = manifest.read(root, f"t/{topic_id}").files
        assert everything(broker).equals(before)
        assert {entry["path"] for entry in listed} == {entry["name"] for entry in listed}
        assert _offsets(root, f"t/{topic_id}", listed) == _offsets(root, f"t/{topic_id}", old)
        assert broker.find("t", key="u3-3").num_rows == 1
        broker.alter_topic("t", retention_ms=HOUR_MS)
        clock.advance(HOUR_MS)
        assert broker.expire()["rows"] == 480
        clock.advance(60_000)
        assert broker.expire()["deleted_files"] > 0
        assert not [path for path in root.files("t") if path.endswith((".parquet", ".index"))]
        broker.delete_topic("t")
        broker.seal()
        assert root.files("t") == {}


def _offsets(root: RemoteRoot, folder: str, files: list[dict[str, int]]) -> list[int]:
    found: list[int] = []
    for entry in files:
        with root.open(f"{folder}/{entry['path']}") as file:
            found += pq.read_table(file)["queue_offset"].to_pylist()
    return sorted(found)


def test_a_root_without_links_shows_what_it_has(tmp_path: Path) -> None:
    root = opened(tmp_path)
    assert isinstance(root, LocalRoot)
    assert root.has_links
    root.replace("a/b", b"1")
    root.link("a/b", "c/d")
    root.rename("a/b", "a/e")

    assert root.files("") == {"a/e": 1, "c/d": 1}
    assert root.folders("") == ["a", "c"]
    assert (root.read("c/d"), root.size("a/e"), root.load("a/e").to_pybytes()) == (b"1", 1, b"1")
    root.delete("a/e")
    root.delete("a/e")
    root.delete_folder("c")
    assert root.files("") == {}
    with pytest.raises(FileNotFoundError):
        root.read("a/e")


def test_a_merger_crosses_the_endpoint(tmp_path: Path) -> None:
    home, clock = tmp_path / "home", ManualClock()
    with archive_home.opened(home, clock) as broker:
        fill(broker)
        planned = broker.plan_compaction()

    again = [Merger.from_json(json.loads(json.dumps(plan))) for plan in planned]

    assert [each.to_json() for each in again] == planned
    assert {plan["root"] for plan in planned} == {str(home / "topics")}


def test_one_of_several_homes_gets_an_empty_bucket(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    address, barrier = object_store.uri("claimed"), threading.Barrier(4)

    def claim(number: int) -> bool:
        barrier.wait()
        try:
            archive_home.opened(tmp_path / f"home-{number}", archive_root=address).close()
        except errors.ArchiveError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        claimed = list(pool.map(claim, range(4)))

    assert sum(claimed) == 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    (tmp_path / "store").mkdir()
    store = ObjectStore(tmp_path / "store")
    yield store
    store.stop()


def is_sealed(broker: Broker) -> bool:
    try:
        broker.seal()
    except errors.StorageError:  # the store finds its volumes again some time after its start
        return False
    return True


def test_a_broker_works_while_the_store_is_away(home: Path, store: ObjectStore) -> None:
    clock = ManualClock()
    address = store.address("segments")
    with archive_home.opened(home, clock, archive_root=address) as broker:
        fill(broker, turns=2)
    store.stop()

    with archive_home.opened(home, clock, archive_root=address) as broker:
        broker.send("t", messages(40, start=80, body_bytes=1000))
        clock.advance(HOUR_MS)
        with pytest.raises(errors.StorageError, match="Sealing failed"):
            broker.seal()
        for verb in (broker.compact, broker.expire):
            with pytest.raises(errors.StorageError, match="cannot be reached"):
                verb()
        waiting = broker.due()["jobs"]["seal"]
        assert "segments?scheme=http" in waiting["waits"]
        assert "cannot be reached" in waiting["waits"]
        assert waiting["due"] == 0
        assert waiting["next_due_ms"] == clock.now_ms() + 30_000
        assert SECRET not in json.dumps(broker.due())
        assert SECRET not in json.dumps(broker.status()["settings"])
        store.start()
        clock.advance(30_000)
        assert broker.due()["jobs"]["seal"]["due"] > 0

        until(lambda: is_sealed(broker))
        note_away(broker.engine, OSError(errno.ENOSPC, "the disk of the log is full"))

        assert "waits" not in broker.due()["jobs"]["seal"]
        assert broker.archive()["rows"] == 120
        assert SECRET not in broker.archive()["root"]
        assert len(everything(broker)) == 120


def test_other_credentials_of_a_root_are_no_other_root(
    home: Path, object_store: ObjectStore
) -> None:
    address = object_store.address("rotated")
    archive_home.opened(home, archive_root=address).close()

    # Without credentials in the URI, those of the environment are used.
    bare = address.replace(f"{KEY}:{SECRET}@", "")
    with archive_home.opened(home, archive_root=bare) as broker:
        assert broker.status()["settings"]["archive_root"] == bare
    assert SECRET not in (home / "archive.json").read_text()


def test_a_new_home_needs_its_store(home: Path) -> None:
    address = f"s3://key:{SECRET}@bucket/x?scheme=http&endpoint_override=127.0.0.1:1&region=x"

    with pytest.raises(errors.ArchiveError, match="cannot be used") as told:
        archive_home.opened(home, archive_root=address)

    assert SECRET not in str(told.value)


def test_an_archive_with_options_in_its_address_is_read(
    home: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    endpoint = object_store.endpoint.removeprefix("http://")
    address = f"{object_store.uri('options')}?scheme=http&endpoint_override={endpoint}"
    with archive_home.opened(home, ManualClock(), archive_root=address) as broker:
        fill(broker)
        broker.compact()
        log = TopicLog(cast(Client, broker), "t")

        hours = [hours_of(log, each, partition_time="stored") for each in log.segments]

    assert sum(sum(each.values()) for each in hours) == 480
