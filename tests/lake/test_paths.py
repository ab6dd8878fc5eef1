"""Files of a sink lie below it: nothing else is read, merged or deleted for it."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline import errors, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.handling.window import Publication
from rmq_pipeline.lake import compaction, manifest
from rmq_pipeline.lake.publication import delete_staged, publish, replace
from rmq_pipeline.lake.readers import sink_table
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage.local import LocalRoot

OUTSIDE = [
    "",
    "../other/a.parquet",
    "hour=1/../../other/a.parquet",
    "/etc/passwd",
    "hour=1\\..\\a",
    "hour=1/a\0.parquet",
    "./a.parquet",
    "hour=1//a.parquet",
    "hour=1/",
    "_manifest.json",
    "_manifest-1a2b3c4d/00000000000000000001.json",
    "a\nb",
    "a" * 5000,
]
GROUP = "readers"
NO_OUTCOMES = schema.OUTCOME.empty_table()
RULES = compaction.Rules(target_bytes=100_000, least_files=2, quiet_ms=1, grace_ms=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(tmp_path: Path, clock: ManualClock) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1024 * 1024)
    with Broker.open(tmp_path / "home", clock=clock, upkeep="none", settings=settings) as broker:
        broker.create_group(GROUP)
        yield broker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sink" / "hour=1").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    return tmp_path / "sink"


def described(*names: str) -> pa.Table:
    rows = [{"path": name, "rows": 1, "bytes": 10, "partition": "1"} for name in names]
    return pa.Table.from_pylist(rows, schema=schema.SINK_FILE)


def written(path: Path, n: int) -> Path:
    pq.write_table(pa.table({"n": [n]}), path)
    return path


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_out_of_the_sink_is_refused(broker: Broker, path: str) -> None:
    with pytest.raises(errors.RequestError, match=r"Row 1 of the sink files: .*not a file below"):
        broker.settle(GROUP, NO_OUTCOMES, sink_files=described("hour=1/a.parquet", path))
    with pytest.raises(errors.RequestError, match="not a file below"):
        broker.replace_sink_files(GROUP, replacement_id="r", add=described(path), remove=[])

    assert broker.sink_files(GROUP).num_rows == 0


def test_a_link_leads_out_of_the_sink(folder: Path) -> None:
    (folder / "hour=2").symlink_to(folder.parent / "other")

    assert manifest.within(folder, "hour=1/a.parquet") == folder / "hour=1" / "a.parquet"
    with pytest.raises(ValueError, match="through a link"):
        manifest.within(folder, "hour=2/a.parquet")


def test_foreign_paths_of_an_older_broker_do_no_harm(
    broker: Broker, clock: ManualClock, folder: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    mine = [written(folder / "hour=1" / f"{name}.parquet", n) for n, name in enumerate("ab")]
    theirs = [written(folder.parent / "other" / f"{name}.parquet", 7) for name in "cd"]
    named = [str(path.relative_to(folder)) for path in mine]
    foreign = [f"../other/{path.name}" for path in theirs]
    with monkeypatch.context() as older:
        older.setattr(manifest, "fault_of", lambda _: None)
        broker.settle(GROUP, NO_OUTCOMES, sink_files=described(*named, *foreign))
        gone = described("../other/gone.parquet")
        broker.replace_sink_files(GROUP, replacement_id="r", add=gone, remove=foreign[:1])
    epoch = broker.open_window("upkeep/x", owner="me", duration_ms=60_000)["epoch"]
    clock.advance(30_000)

    done = compaction.compact(broker, GROUP, sink=folder, window=("upkeep/x", epoch), rules=RULES)
    clock.advance(30_000)
    deleted = compaction.compact(
        broker, GROUP, sink=folder, window=("upkeep/x", epoch), rules=RULES
    ).deleted_files

    assert (done.merged_files, deleted) == (2, 2)
    assert all(path.exists() for path in theirs)
    assert sink_table(folder)["n"].to_pylist() == [0, 1]
    assert broker.sink_files(GROUP).num_rows == 1
    assert "ignoring files whose paths lead out of the sink" in caplog.text
    # The remedy: they may be taken off the list.
    broker.replace_sink_files(GROUP, replacement_id="s", add=described(), remove=foreign[1:])


def test_files_without_sizes_are_not_merged(broker: Broker, clock: ManualClock) -> None:
    broker.settle(GROUP, NO_OUTCOMES, sink_files=pa.table({"path": ["a", "b"]}))
    clock.advance(60_000)

    assert compaction.plan(broker.sink_files(GROUP), rules=RULES) == []


def test_no_file_outside_is_read_or_deleted_by_name(broker: Broker, folder: Path) -> None:
    kept = written(folder.parent / "other" / "a.parquet", 1)
    publish(broker, GROUP, sink=folder)

    for act in (
        lambda: delete_staged(folder, described("../other/a.parquet"), named=[]),
        lambda: compaction.stage(
            folder, compaction.Merge("1", described("../other/a.parquet").to_pylist()), epoch=1
        ),
    ):
        with pytest.raises(ValueError, match="not a valid path in the sink"):
            act()
    with pytest.raises(errors.RequestError):
        replace(
            broker, GROUP, sink=folder, replacement_id="r", add=described("/a"), remove=[]
        )  # fmt: skip

    assert kept.exists()
    assert manifest.read(folder).files.num_rows == 0


def test_a_store_that_is_away_keeps_staged_files(
    broker: Broker, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise OSError("the store is away")

    monkeypatch.setattr(LocalRoot, "delete", away)

    Publication(broker, group=GROUP, folder=folder).discard(described("hour=1/a.parquet"))

    assert "the store is away" in caplog.text
