"""Destinations: objects that are gone, in the way of others, or no longer named."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem

from rmq_pipeline.backup.destination import DamagedBackupError, Destination
from rmq_pipeline.backup.restoring import RESTORING
from rmq_pipeline.backup.taking import back_up
from rmq_pipeline.broker.work.home import FORMAT_FILE
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import (
    ConflictError,
    HomeFormatError,
    RequestError,
)
from rmq_pipeline.storage.remote import RemoteRoot
from tests.backup.backups import names, never_asked, restored, taken
from tests.broker.sealed_home import (
    fill,
    messages,
    open_broker,
    seal_all,
    stored,
)


def test_old_backups_go_with_the_files_that_only_they_name(tmp_path: Path) -> None:
    with open_broker(tmp_path / "home") as broker:
        fill(broker, rounds=1)
        for _ in range(3):
            broker.send("plain", messages(3))
            taken(broker, tmp_path / "backup", keep="9")
        (tmp_path / "backup" / "objects" / "left.tmp").write_bytes(b"of a kill")
        report = taken(broker, tmp_path / "backup", keep="2", unnamed_ms=0)
        with pytest.raises(RequestError, match="says neither"):
            taken(broker, tmp_path / "backup", keep="0")

    kept = Destination.open(str(tmp_path / "backup")).manifests()
    assert [each.number for each in kept] == [3, 4]
    assert report.deleted_backups == 2
    assert names(tmp_path / "backup") == kept[0].objects() | kept[1].objects()


def test_secrets_are_for_the_owner_only(tmp_path: Path) -> None:
    with open_broker(tmp_path / "home") as broker:
        broker.create_user("ann", type="super", password="a-long-password")
        taken(broker, tmp_path / "backup")

    restored(tmp_path / "backup", tmp_path / "again")

    for folder in ("objects", "manifests"):
        assert stat.S_IMODE((tmp_path / "backup" / folder).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "again" / "access.json").stat().st_mode) == 0o600
    with open_broker(tmp_path / "again") as broker:
        assert broker.list_users()["name"].to_pylist() == ["ann"]


def test_damage_of_a_backup_is_found_and_the_home_does_not_start(tmp_path: Path) -> None:
    with open_broker(tmp_path / "home") as broker:
        fill(broker, rounds=1)
        report = taken(broker, tmp_path / "backup")
    (part, *_) = report.manifest.log
    path = tmp_path / "backup" / "objects" / part.sha256[:2] / part.sha256
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    with pytest.raises(DamagedBackupError, match="does not match its checksum"):
        restored(tmp_path / "backup", tmp_path / "again")

    assert (tmp_path / "again" / FORMAT_FILE).read_bytes() == RESTORING
    with pytest.raises(HomeFormatError, match="restoring"):
        open_broker(tmp_path / "again")
    path.unlink()
    with pytest.raises(DamagedBackupError, match="is missing"):
        restored(tmp_path / "backup", tmp_path / "third")


def test_days_are_counted_by_the_log_and_by_the_store(tmp_path: Path) -> None:
    folder, clock = tmp_path / "backup", ManualClock()
    with open_broker(tmp_path / "home", clock) as broker:
        broker.create_topic("plain", queues=1)
        taken(broker, folder)
        clock.advance(30 * 86_400_000)  # a clock that was wrong for a moment
        broker.send("plain", messages(1))
        assert taken(broker, folder, keep="14d").deleted_backups == 0
        old_s = time.time() - 15 * 86_400
        os.utime(folder / "manifests" / f"{1:020d}.json", (old_s, old_s))
        assert taken(broker, folder, keep="14d").deleted_backups == 1


def test_objects_that_are_gone_are_stored_again(tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    with open_broker(tmp_path / "home") as broker:
        fill(broker, rounds=1)
        seal_all(broker)
        first = taken(broker, folder).manifest
        segment = next(each.sha256 for each in first.files if each.path.startswith("topics/"))
        for gone in (first.files[0].sha256, first.log[0].sha256, segment):
            (folder / "objects" / gone[:2] / gone).unlink()
        broker.send("plain", messages(3))
        taken(broker, folder)
        expected = stored(broker)

    assert segment in names(folder)
    restored(folder, tmp_path / "again")
    with open_broker(tmp_path / "again") as broker:
        assert stored(broker) == expected


def test_a_backup_whose_objects_go_meanwhile_publishes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "backup"

    def lose(path: str, _size: int) -> None:
        if path.startswith("log/"):  # the last ones before the manifest
            for each in (folder / "objects").glob("*/*"):
                each.unlink()

    with open_broker(tmp_path / "home") as broker:
        fill(broker, rounds=1)
        with pytest.raises(ConflictError, match=r"has lost \d+ objects"):
            taken(broker, folder, tell=lose)
        assert not list((folder / "manifests").iterdir())
        taken(broker, folder)

    restored(folder, tmp_path / "again")


def test_two_homes_with_one_id_take_turns_and_delete_nothing_young(tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    with open_broker(tmp_path / "home") as broker:
        fill(broker, rounds=1)
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    refused = []

    def other(path: str, _size: int) -> None:
        if path == "state.duckdb":
            destination = Destination.open(str(folder))
            with pytest.raises(ConflictError, match="Another backup to") as caught:
                back_up(tmp_path / "copy", destination, ask_broker=never_asked)
            refused.append(caught.value)

    back_up(tmp_path / "home", Destination.open(str(folder)), ask_broker=never_asked, tell=other)
    manifest = folder / "manifests" / f"{1:020d}.json"
    (folder / "manifests" / f"{7:020d}.json").write_bytes(b"damaged")
    (folder / "objects" / "left.tmp").touch()
    report = back_up(
        tmp_path / "copy", Destination.open(str(folder)), ask_broker=never_asked, unnamed_ms=0
    )

    assert len(refused) == 1
    assert report.deleted_objects == 0, "the damaged manifest may name any object"
    assert manifest.exists()


def test_a_file_that_changes_while_it_is_copied_leaves_no_object(tmp_path: Path) -> None:
    root = RemoteRoot(LocalFileSystem(), str(tmp_path), address="mock://x")
    pieces = iter((b"before", b"after"))

    with pytest.raises(OSError, match="changed while it was copied"):
        Destination(root).put(lambda: iter((next(pieces),)))

    assert names(tmp_path) == set()


def test_a_folder_of_something_else_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "backup" / "objects").mkdir(parents=True)
    (tmp_path / "backup" / "objects" / "file").touch()
    (tmp_path / "backup" / "objects").chmod(0o755)
    with open_broker(tmp_path / "home") as broker:
        broker.create_topic("plain", queues=1)
        with pytest.raises(ConflictError, match="is not empty, and no backup"):
            taken(broker, tmp_path / "backup")

    assert stat.S_IMODE((tmp_path / "backup" / "objects").stat().st_mode) == 0o755
    assert [path.name for path in (tmp_path / "backup").iterdir()] == ["objects"]
