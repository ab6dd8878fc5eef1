"""Small files of an hour become one: every row once, before, meanwhile and after."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import FencedError
from rmq_pipeline.handling import sink
from rmq_pipeline.lake import compaction, manifest
from rmq_pipeline.lake.compaction import DamagedSinkError
from rmq_pipeline.lake.publication import publish_version, replace
from rmq_pipeline.lake.readers import sink_table
from rmq_pipeline.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from rmq_pipeline.lake.compaction import Compacted

GROUP, WINDOW = "readers", "upkeep/compact_sinks"
HOUR_MS = 3_600_000
FIVE, SIX = "2013-01-01T05", "2013-01-01T06"
FIVE_MS = 1_357_016_400_000
RULES = compaction.Rules(target_bytes=100_000, least_files=4, quiet_ms=60_000, grace_ms=5_000)
ROW = pa.schema([("n", pa.int64()), ("born_at_ms", pa.int64())])
Settle = Callable[..., pa.Table]
Compact = Callable[..., "Compacted"]


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
def folder(tmp_path: Path, broker: Broker) -> Path:
    (tmp_path / "sink").mkdir()
    manifest.publish(tmp_path / "sink", broker.sink_files(GROUP), known=manifest.NOTHING)
    return tmp_path / "sink"


@pytest.fixture
def settle(broker: Broker, folder: Path) -> Settle:
    """``settle(*numbers, hour=…)``: one file with these rows, as a window settles it."""

    def settle(*numbers: int, hour: int = 0, rows: pa.Table | None = None) -> pa.Table:
        if rows is None:
            times = [FIVE_MS + hour * HOUR_MS] * len(numbers)
            rows = pa.table([list(numbers), times], schema=ROW)
        given = pa.table({"queue_id": [0] * len(numbers), "queue_offset": list(numbers)})
        files = sink.stage(
            folder, rows, partition_time="born_at_ms", epoch=1, batch=0, messages=given
        )
        nothing = schema.OUTCOME.empty_table()
        version = broker.settle(GROUP, nothing, sink_files=files)["sink_version"]
        publish_version(broker, GROUP, sink=folder, version=version, add=files, remove=[])
        return files

    return settle


@pytest.fixture
def window(broker: Broker) -> Callable[[], tuple[str, int]]:
    """A new epoch of the compaction's window."""

    def opened() -> tuple[str, int]:
        answer = broker.open_window(WINDOW, owner="run", duration_ms=60_000, takeover=True)
        return WINDOW, answer["epoch"]

    return opened


@pytest.fixture
def compact(broker: Broker, folder: Path, window: Callable[[], tuple[str, int]]) -> Compact:
    def compact(**how: Any) -> Compacted:
        given = {"window": window(), "rules": RULES, **how}
        return compaction.compact(broker, GROUP, sink=folder, **given)

    return compact


def numbers(folder: Path, partition: str | None = None) -> list[int]:
    chosen = None if partition is None else [partition]
    table = sink_table(folder, partitions=chosen, sink_schema=ROW)
    return list(table["n"].to_pylist())


def on_disk(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("hour=*/*.parquet")}


def test_a_quiet_hour_becomes_one_file(
    broker: Broker, folder: Path, settle: Settle, compact: Compact, clock: ManualClock
) -> None:
    for n in range(3):
        settle(2 * n, 2 * n + 1)
    settle(9, hour=1)
    clock.advance(RULES.quiet_ms)

    done = compact()

    assert (done.merged_files, done.made_files, done.rows) == (3, 1, 6)
    assert numbers(folder, FIVE) == [0, 1, 2, 3, 4, 5]
    assert numbers(folder, SIX) == [9]
    listed = broker.sink_files(GROUP).to_pylist()
    assert [file["partition"] for file in listed] == [SIX, FIVE]
    assert listed[1]["offsets"] == [{"queue_id": 0, "base": 0, "end": 6}]
    assert manifest.read(folder).files["path"].to_pylist() == [file["path"] for file in listed]
    (replaced,) = broker.sql("SELECT reason, len(removed) AS n FROM sink_replacements").to_pylist()
    assert replaced == {"reason": "compaction", "n": 3}


def test_a_busy_hour_is_merged_when_many_files_are_alike(
    folder: Path, settle: Settle, compact: Compact
) -> None:
    for n in range(RULES.least_files - 1):
        settle(n)
    before = compact().made_files
    settle(3)

    done = compact()

    assert (before, done.made_files, done.merged_files) == (0, 1, 4)
    assert numbers(folder) == [0, 1, 2, 3]
    assert compact().made_files == 0


def test_large_files_are_left_alone_and_none_becomes_too_large() -> None:
    def file(name: str, size: int) -> dict[str, Any]:
        known = {"path": name, "rows": 1, "bytes": size, "partition": FIVE, "offsets": None}
        return {**known, "at_ms": 0}

    sizes = {"a": 40_000, "large": 50_000, "b": 40_000, "c": 40_000, "d": 10_000}
    listed = pa.Table.from_pylist([file(*each) for each in sizes.items()])
    listed = listed.replace_schema_metadata({"at_ms": str(RULES.quiet_ms)})

    merges = compaction.plan(listed, rules=RULES)

    assert [merge.paths for merge in merges] == [["a", "b"], ["c", "d"]]


def test_replaced_files_stay_for_a_grace(
    broker: Broker, folder: Path, settle: Settle, compact: Compact, clock: ManualClock
) -> None:
    for n in range(4):
        settle(n)
    compact()
    clock.advance(RULES.grace_ms - 1)
    early = compact().deleted_files
    due_before = compaction.is_due(broker, GROUP, sink=folder, rules=RULES)
    clock.advance(1)
    due = compaction.is_due(broker, GROUP, sink=folder, rules=RULES)

    done = compact()

    assert (early, due_before, due, done.deleted_files) == (0, False, True, 4)
    assert on_disk(folder) == set(broker.sink_files(GROUP)["path"].to_pylist())
    assert numbers(folder) == [0, 1, 2, 3]
    assert not compaction.is_due(broker, GROUP, sink=folder, rules=RULES)


def test_a_window_does_not_sweep_replaced_files_within_their_grace(
    broker: Broker, folder: Path, settle: Settle, compact: Compact
) -> None:
    from rmq_pipeline.handling.window import Publication

    for n in range(4):
        settle(n)
    compact()

    swept = Publication(broker, group=GROUP, folder=folder).finish_previous(epoch=7)

    assert swept == 0
    assert len(on_disk(folder)) == 5


class KilledError(Exception):
    """Stands for the end of the process at this point."""


@pytest.mark.parametrize("at", ["replace_sink_files", "publish_version", "delete_replaced"])
def test_a_killed_compaction_is_finished_by_the_next(
    broker: Broker,
    folder: Path,
    settle: Settle,
    compact: Compact,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    from rmq_pipeline.lake import publication

    for n in range(4):
        settle(n)

    def die(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        if at == "replace_sink_files":
            patch.setattr(broker, at, die)
        else:
            patch.setattr(publication, at, die)
            patch.setattr(compaction, at, die, raising=False)
        with pytest.raises(KilledError):
            compact()
    seen = numbers(folder)

    done = compact()

    assert seen == [0, 1, 2, 3]
    assert done.made_files == (1 if at == "replace_sink_files" else 0)
    assert done.swept_files == (1 if at == "replace_sink_files" else 0)
    assert numbers(folder) == [0, 1, 2, 3]
    assert (
        manifest.read(folder).files["path"].to_pylist()
        == broker.sink_files(GROUP)["path"].to_pylist()
    )


def test_a_compaction_that_was_taken_over_replaces_nothing(
    broker: Broker,
    folder: Path,
    settle: Settle,
    compact: Compact,
    window: Callable[[], tuple[str, int]],
) -> None:
    for n in range(4):
        settle(n)
    old = window()
    window()

    with pytest.raises(FencedError):
        compact(window=old)

    assert len(broker.sink_files(GROUP)) == 4
    assert compact().swept_files == 1
    assert numbers(folder) == [0, 1, 2, 3]


def test_a_merge_is_dropped_if_its_hour_is_replayed_meanwhile(
    broker: Broker,
    folder: Path,
    settle: Settle,
    compact: Compact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = pa.concat_tables([settle(n) for n in range(4)])
    other = pa.table([[100], [FIVE_MS]], schema=ROW)
    replay = sink.stage(
        folder, other, partition_time="born_at_ms", epoch=0, batch=0, prefix="replay"
    )
    stage = compaction.stage

    def meanwhile(*args: Any, **named: Any) -> pa.Table:
        staged = stage(*args, **named)
        replace(
            broker,
            GROUP,
            sink=folder,
            replacement_id="replay",
            add=replay,
            remove=files["path"].to_pylist(),
            partitions=[FIVE],
        )
        return staged

    monkeypatch.setattr(compaction, "stage", meanwhile)

    done = compact()

    assert (done.given_up, done.made_files) == (1, 0)
    assert numbers(folder) == [100]
    assert on_disk(folder) == {*files["path"].to_pylist(), *replay["path"].to_pylist()}


def test_files_of_older_columns_are_merged(folder: Path, settle: Settle, compact: Compact) -> None:
    settle(0)
    wider = pa.table([[1], [FIVE_MS], ["x"]], names=["n", "born_at_ms", "note"])
    settle(1, rows=wider)
    settle(2)
    settle(3)

    compact()

    table = sink_table(folder)
    assert table["n"].to_pylist() == [0, 1, 2, 3]
    assert table["note"].to_pylist() == [None, "x", None, None]


def test_a_file_that_is_not_what_was_settled_is_not_merged(
    folder: Path, settle: Settle, compact: Compact
) -> None:
    (path,) = settle(0)["path"].to_pylist()
    for n in range(1, 4):
        settle(n)
    pq.write_table(pa.table([[], []], schema=ROW), folder / path)

    with pytest.raises(ValueError, match="3 rows, not 4"):
        compact()

    assert not [path for path in on_disk(folder) if "merged" in path]


@pytest.mark.parametrize("where", ["page", "footer"])
def test_a_damaged_file_is_named_and_not_merged_and_other_hours_are(
    folder: Path, settle: Settle, compact: Compact, where: str
) -> None:
    paths = [path for n in range(4) for path in settle(n)["path"].to_pylist()]
    for n in range(4, 8):
        settle(n, hour=1)
    column = pq.read_metadata(folder / paths[0]).row_group(0).column(0)
    content = bytearray((folder / paths[0]).read_bytes())
    # The last byte of the page: one of the number, which only the checksum of the page knows.
    place = column.data_page_offset + column.total_compressed_size - 1 if where == "page" else -1
    content[place] ^= 0x10
    (folder / paths[0]).write_bytes(content)

    with pytest.raises(DamagedSinkError, match=re.escape(f"{folder / paths[0]} is damaged")):
        compact()

    files = set(manifest.read(folder).files["path"].to_pylist())
    assert files >= set(paths)
    assert len(files) == len(paths) + 1
    assert numbers(folder, SIX) == [4, 5, 6, 7]
    assert len([path for path in on_disk(folder) if "merged" in path]) == 1


def test_a_disk_that_fails_is_no_damage(folder: Path, settle: Settle, compact: Compact) -> None:
    paths = [path for n in range(4) for path in settle(n)["path"].to_pylist()]
    (folder / paths[0]).unlink()

    with pytest.raises(FileNotFoundError):
        compact()
