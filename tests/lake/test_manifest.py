"""A version of a sink's manifest is seen whole or not at all, however often it is written."""

from __future__ import annotations

import errno
import json
import os
import threading
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.lake import manifest
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import StorageRootError

if TYPE_CHECKING:
    from pathlib import Path


def files(*paths: str) -> pa.Table:
    return manifest.as_files(
        [
            {
                "path": path,
                "rows": 1,
                "bytes": 10,
                "partition": "h",
                "offsets": [{"queue_id": 0, "base": 1, "end": 2}],
            }
            for path in paths
        ]
    )


def listed(version: int, *paths: str) -> pa.Table:
    """What the broker answers."""
    return files(*paths).replace_schema_metadata({"version": str(version)})


def publish(sink: Path, version: int, *paths: str) -> None:
    manifest.publish(sink, listed(version, *paths), known=manifest.read(sink))


def counting(sink: Path) -> tuple[int, list[str]]:
    snapshot = manifest.read(sink)
    return snapshot.version, snapshot.files["path"].to_pylist()


def names(sink: Path) -> list[str]:
    return sorted(path.name.lstrip("0") for path in (sink / manifest.LOG).iterdir())


def test_versions_follow_each_other(tmp_path: Path) -> None:
    publish(tmp_path, 0)

    manifest.record(tmp_path, 1, add=files("a", "b"))
    manifest.record(tmp_path, 2, add=files("c"), remove=["a"])
    manifest.record(tmp_path, 3, add=files("ab"), remove=["b", "c"])

    assert counting(tmp_path) == (3, ["ab"])
    assert manifest.read(tmp_path).files.equals(files("ab"))


def test_a_version_replaces_files_of_the_checkpoint(tmp_path: Path) -> None:
    publish(tmp_path, 7, "a", "b")

    assert manifest.record(tmp_path, 8, add=files("c"), remove=["a"])

    assert counting(tmp_path) == (8, ["b", "c"])


def test_nothing_is_seen_beyond_a_version_that_is_missing(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    manifest.record(tmp_path, 1, add=files("a"))

    seen = manifest.record(tmp_path, 3, add=files("c"))

    assert not seen
    assert counting(tmp_path) == (1, ["a"])
    assert manifest.record(tmp_path, 2, add=files("b"))
    assert counting(tmp_path) == (2, ["a", "b"])
    assert manifest.record(tmp_path, 3, add=files("c"))
    assert counting(tmp_path) == (3, ["a", "b", "c"])


def test_the_brokers_list_closes_a_gap(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    manifest.record(tmp_path, 3, add=files("c"))

    publish(tmp_path, 3, "a", "b", "c")

    assert counting(tmp_path) == (3, ["a", "b", "c"])
    assert manifest.record(tmp_path, 4, add=files("d"))


def test_writing_a_version_again_or_late_changes_nothing(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    for version, path in ((1, "a"), (2, "b"), (1, "a"), (2, "b")):
        manifest.record(tmp_path, version, add=files(path))
    publish(tmp_path, 2, "a", "b")

    manifest.record(tmp_path, 1, add=files("a"))
    # What a slow publisher was told before version 2.
    manifest.publish(tmp_path, listed(1, "a"), known=manifest.Snapshot(1, files("a")))

    assert counting(tmp_path) == (2, ["a", "b"])


def test_many_versions_are_kept_in_few_files(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    versions = 6 * manifest.CHECKPOINT_VERSIONS + 3

    for version in range(1, versions + 1):
        manifest.record(tmp_path, version, add=files(f"f{version}"))

    assert counting(tmp_path) == (versions, [f"f{v}" for v in range(1, versions + 1)])
    left = names(tmp_path)
    kept = manifest.KEPT_VERSIONS // manifest.CHECKPOINT_VERSIONS + 1
    assert sum(name.endswith(".checkpoint.parquet") for name in left) == kept
    assert len(left) <= kept * (manifest.CHECKPOINT_VERSIONS + 1) + 3


def test_a_large_sink_is_not_rewritten_every_64_versions(tmp_path: Path) -> None:
    many = [f"f{i}" for i in range(16 * 200)]
    publish(tmp_path, 1, *many)

    for version in range(2, 150):
        manifest.record(tmp_path, version, add=files(f"g{version}"))

    checkpoints = [name for name in names(tmp_path) if name.endswith(".checkpoint.parquet")]
    assert checkpoints == ["1.checkpoint.parquet"]
    assert len(counting(tmp_path)[1]) == len(many) + 148


def test_a_reader_never_sees_half_a_version(tmp_path: Path) -> None:
    # Each version replaces both files: a reader would notice one of another version.
    publish(tmp_path, 1, "a1", "b1")
    done = threading.Event()
    wrong: list[tuple[int, list[str]]] = []

    def look() -> None:
        while not done.is_set():
            version, paths = counting(tmp_path)
            if paths != [f"a{version}", f"b{version}"]:
                wrong.append((version, paths))

    reader = threading.Thread(target=look)
    reader.start()
    for version in range(2, 400):
        before = [f"a{version - 1}", f"b{version - 1}"]
        manifest.record(tmp_path, version, add=files(f"a{version}", f"b{version}"), remove=before)
    done.set()
    reader.join()

    assert wrong == []
    assert counting(tmp_path)[0] == 399


def test_a_manifest_of_another_life_of_the_sink_is_given_up(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    for version in range(1, 9):
        manifest.record(tmp_path, version, add=files(f"old{version}"))

    publish(tmp_path, 2, "a", "b")

    assert counting(tmp_path) == (2, ["a", "b"])
    publish(tmp_path, 2, "c")
    assert counting(tmp_path) == (2, ["c"])
    assert manifest.record(tmp_path, 3, add=files("d"))
    assert counting(tmp_path) == (3, ["c", "d"])


def test_a_manifest_of_format_1_is_read_and_replaced(tmp_path: Path) -> None:
    described = [{"path": "a", "rows": 1, "bytes": 10, "partition": "h"}]
    old = {"format": 1, "files": described}
    (tmp_path / manifest.NAME).write_text(json.dumps(old), encoding="utf-8")
    before = counting(tmp_path)

    seen = manifest.record(tmp_path, 5, add=files("b"))
    publish(tmp_path, 5, "a", "b")

    assert before == (0, ["a"])
    assert not seen
    assert counting(tmp_path) == (5, ["a", "b"])
    assert json.loads((tmp_path / manifest.NAME).read_text())["format"] == 3


def test_a_manifest_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / manifest.NAME).write_text(json.dumps({"format": 99}), encoding="utf-8")

    with pytest.raises(ValueError, match="newer version"):
        manifest.read(tmp_path)


def test_what_a_crash_left_unfinished_is_not_read(tmp_path: Path) -> None:
    publish(tmp_path, 1, "a")
    log = tmp_path / manifest.LOG
    (log / f".{2:020}.json.abc.tmp").write_text('{"version"', encoding="utf-8")
    (tmp_path / f"{manifest.NAME}.abc.tmp").write_text("{", encoding="utf-8")

    assert counting(tmp_path) == (1, ["a"])


def test_without_a_manifest_there_are_no_files(tmp_path: Path) -> None:
    assert manifest.read(tmp_path / "nowhere").files.equals(schema.SINK_FILE.empty_table())


def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)

    with pytest.raises(StorageRootError, match="no hard links") as told:
        at(tmp_path).check_put_if_absent()

    assert "file system with hard links, or an object store" in str(told.value.remedy)
    assert not list(tmp_path.iterdir())
