"""Side sinks: the rows of an hour are there once, whichever ranges filled it, and in what order."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.errors import BusyError, RequestError, SinkChangedError
from rmq_pipeline.handling import sink
from rmq_pipeline.lake import manifest
from rmq_pipeline.spark.replay import sinks
from rmq_pipeline.spark.replay.sinks import HOUR_MS, SideRange
from rmq_pipeline.storage.place import Place, at
from rmq_pipeline.storage.remote import ObjectRoot
from tests.object_store import ObjectStore

SINK = pa.schema([("text", pa.string()), ("born_at_ms", pa.int64())])
#: Longer than anything here takes.
LONG_S = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "side"


def hours(first: int, end: int, *, group: str = "walkers") -> SideRange:
    return SideRange(group, first * HOUR_MS, end * HOUR_MS)


def stage(folder: Place, mine: SideRange, *, text: str, label: str = "") -> pa.Table:
    """A row for each hour of a range, in files that do not count yet."""
    rows = [[text, ms] for ms in range(mine.from_ms, mine.to_ms, HOUR_MS)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    return sink.stage(
        folder,
        pa.table(columns, schema=SINK),
        partition_time="born_at_ms",
        epoch=0,
        batch=0,
        prefix=sinks.prefix(label or mine.label),
    )


def fill(folder: Place, mine: SideRange, *, text: str, **label: str) -> int:
    return sinks.publish_side_sink(folder, stage(folder, mine, text=text, **label), mine=mine)


def rows(folder: Place) -> list[tuple[int, str]]:
    """Hour and text of what counts."""
    found: list[dict[str, Any]] = sink.read_sink(folder).to_pylist()
    return sorted((row["born_at_ms"] // HOUR_MS, row["text"]) for row in found)


def files(folder: Path) -> int:
    return len(list(folder.glob("hour=*/*.parquet")))


@pytest.mark.parametrize("first", [(5, 7), (5, 6), (6, 7), (5, 8)])
def test_a_range_replaces_all_ranges_in_it(folder: Path, first: tuple[int, int]) -> None:
    fill(folder, hours(*first), text="old")

    gone = fill(folder, hours(5, 8), text="new")

    assert gone == first[1] - first[0]
    assert rows(folder) == [(5, "new"), (6, "new"), (7, "new")]
    assert files(folder) == 3


def test_ranges_side_by_side_stay(folder: Path) -> None:
    for first, end in [(5, 7), (7, 8), (3, 5)]:
        assert fill(folder, hours(first, end), text="x") == 0

    assert [hour for hour, _ in rows(folder)] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("mine", "would_do"),
    [((6, 7), (5, 8)), ((5, 7), (5, 8)), ((4, 6), (4, 8)), ((7, 9), (5, 9))],
)
def test_a_part_of_what_was_filled_at_once_is_refused(
    folder: Path, mine: tuple[int, int], would_do: tuple[int, int]
) -> None:
    fill(folder, hours(5, 8), text="old")

    with pytest.raises(RequestError) as checked:
        sinks.check_side_sink(folder, hours(*mine))
    with pytest.raises(RequestError):
        fill(folder, hours(*mine), text="new")
    before = rows(folder), files(folder)
    fill(folder, hours(*would_do), text="new")

    assert before == ([(5, "old"), (6, "old"), (7, "old")], 3)
    assert f"Replay {hours(*would_do)}, or" in str(checked.value)
    assert rows(folder) == [(hour, "new") for hour in range(*would_do)]


def test_other_groups_have_rows_of_their_own(folder: Path) -> None:
    fill(folder, hours(5, 7), text="walkers")

    fill(folder, hours(6, 7, group="riders"), text="riders")

    assert rows(folder) == [(5, "walkers"), (6, "riders"), (6, "walkers")]


def test_files_whose_names_do_not_say_their_range_are_replaced_by_the_same_one(
    folder: Path,
) -> None:
    # The beginning of the SHA-256 of "walkers//18000000/25200000".
    fill(folder, hours(5, 7), text="old", label="7d67ab36a189fb35")

    fill(folder, hours(5, 7), text="new")

    assert rows(folder) == [(5, "new"), (6, "new")]


def test_runs_that_publish_at_the_same_time_keep_the_files_of_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folder, hours(0, 1), text="before")
    both_have_read = threading.Barrier(2)
    read = manifest.read

    def meet(path: Path) -> manifest.Snapshot:
        found = read(path)
        # As long as one has the lock the other cannot come: it waits in vain.
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_read.wait(timeout=0.5)
        return found

    ranges = [hours(5, 6), hours(7, 8)]
    made = [(each, stage(folder, each, text="x")) for each in ranges]
    monkeypatch.setattr(manifest, "read", meet)
    threads = [
        threading.Thread(target=sinks.publish_side_sink, args=(folder, each), kwargs={"mine": mine})
        for mine, each in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    monkeypatch.undo()

    assert rows(folder) == [(0, "before"), (5, "x"), (7, "x")]


def test_of_two_replays_of_one_range_the_slower_one_changes_nothing(folder: Path) -> None:
    mine = hours(5, 6)
    slower = stage(folder, mine, text="slower")
    fill(folder, mine, text="faster")

    with pytest.raises(SinkChangedError):
        sinks.publish_side_sink(folder, slower, mine=mine)

    assert rows(folder) == [(5, "faster")]


def test_files_whose_names_do_not_say_their_range_are_told_of(folder: Path) -> None:
    """Those of an older version: their rows would be there beside the new ones."""
    fill(folder, hours(0, 2), text="old", label="0123456789abcdef")

    with pytest.raises(RequestError, match=r"2 files in the hours .* another folder"):
        sinks.check_side_sink(folder, hours(0, 4))
    with pytest.raises(RequestError, match="1 files in the hours"):
        fill(folder, hours(1, 2), text="new")
    fill(folder, hours(2, 4), text="new")

    assert rows(folder) == [(0, "old"), (1, "old"), (2, "new"), (3, "new")]


@pytest.fixture
def bucket(object_store: ObjectStore, request: pytest.FixtureRequest) -> str:
    """A folder without a lock: the faster one of several publishers wins."""
    return object_store.uri(request.node.name.replace("[", "-").rstrip("]"))


def in_bucket(folder: str) -> list[str]:
    return sorted(path for path in at(folder).files("") if path.startswith("hour="))


def test_a_commit_whose_answer_got_lost_is_found(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket, hours(5, 6), text="old")
    real = ObjectRoot.put_if_absent
    monkeypatch.setattr(ObjectRoot, "put_if_absent", lambda *args: real(*args) and False)

    gone = fill(bucket, hours(5, 7), text="new")

    assert gone == 1
    assert rows(bucket) == [(5, "new"), (6, "new")]
    assert in_bucket(bucket) == sorted(manifest.read(bucket).files["path"].to_pylist())


@pytest.mark.parametrize("new", [["new"], []])
def test_a_replay_that_two_others_overtook_publishes_again(
    bucket: str, monkeypatch: pytest.MonkeyPatch, new: list[str]
) -> None:
    fill(bucket, hours(5, 6), text="old")
    publish = manifest.publish

    def late(*args: Any, **options: Any) -> bool:
        monkeypatch.setattr(manifest, "publish", publish)
        for first in (3, 7):
            fill(bucket, hours(first, first + 1), text="x")
        return publish(*args, **options)

    made = stage(bucket, hours(5, 6), text="new") if new else manifest.NOTHING.files
    monkeypatch.setattr(manifest, "publish", late)

    assert sinks.publish_side_sink(bucket, made, mine=hours(5, 6)) == 1
    assert rows(bucket) == [(3, "x"), *((5, text) for text in new), (7, "x")]
    assert in_bucket(bucket) == sorted(manifest.read(bucket).files["path"].to_pylist())


def test_a_replay_that_others_overtake_each_time_ends(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket, hours(5, 6), text="old")
    monkeypatch.setattr(manifest, "publish", lambda *_, **__: False)

    with pytest.raises(BusyError, match="were faster"):
        fill(bucket, hours(5, 6), text="new")

    assert rows(bucket) == [(5, "old")]
