"""What a task of a replay takes of the files it reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline import schema
from rmq_pipeline.errors import ArchiveError, IllegalOffsetError
from rmq_pipeline.spark.arrow_transport import write
from rmq_pipeline.spark.replay.reading import Wanted, hours_behind, in_range, walked
from rmq_pipeline.spark.replay.sinks import HOUR_MS
from rmq_pipeline.spark.replay.topic_log import PLACE, Range, Stored
from rmq_pipeline.spark.replay.walk import BEHIND, RANGE, ROLE, STRETCH, WARM_UP
from rmq_pipeline.storage.root import StorageRootError

ROWS_A_GROUP = 10
COLUMNS = pa.schema([field for field in schema.READ if field.name != "queue_id"])


def stored(folder: Path, n: int, *, queue_id: int = 0, **columns: list[Any]) -> Stored:
    """Messages 0 to n of a queue and of one group, stored and born at the ms of their offset."""
    given: dict[str, list[Any]] = {
        "queue_offset": list(range(n)),
        "message_group": ["g"] * n,
        "born_at_ms": list(range(n)),
        "stored_at_ms": list(range(n)),
        **columns,
    }
    arrays = [pa.array(given.get(f.name, [None] * n), f.type) for f in COLUMNS]
    path = folder / f"{queue_id}.parquet"
    pq.write_table(pa.table(arrays, schema=COLUMNS), path, row_group_size=ROWS_A_GROUP)
    return Stored(str(path), queue_id, 0, n)


def wanted(folder: Path, *, by: str = "stored", end: int = 100, **changes: Any) -> Wanted:
    range_ = Range(topic="t", from_ms=20, to_ms=40, partition_time=by)
    return Wanted(range_, str(folder), **{"cursors": {0: end, 1: end}, **changes})


def offsets(file: Stored, asked: Wanted) -> list[int]:
    found = [
        t["queue_offset"].to_pylist() for t in in_range([file], asked, columns=["queue_offset"])
    ]
    return [offset for some in found for offset in some]


def test_what_is_settled_in_the_range_is_taken(tmp_path: Path) -> None:
    file = stored(tmp_path, 100)
    left = pa.table([pa.array([0, 0, 1], pa.int32()), [21, 33, 25]], schema=PLACE)
    path = write(left, tmp_path / "open.arrow")

    assert offsets(file, wanted(tmp_path)) == list(range(20, 40))
    assert offsets(file, wanted(tmp_path, end=30)) == list(range(20, 30))
    assert offsets(file, wanted(tmp_path, cursors={})) == []
    some = offsets(file, wanted(tmp_path, open=path))
    assert some == [offset for offset in range(20, 40) if offset not in (21, 33)]


def test_row_groups_outside_the_range_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = pq.ParquetFile.read_row_groups

    def noted(self: Any, groups: list[int], **named: Any) -> Any:
        read.extend(groups)
        return real(self, groups, **named)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", noted)

    list(walked([stored(tmp_path, 100)], wanted(tmp_path)))

    assert read == [2, 3]


def test_the_time_may_be_a_property_and_what_has_none_is_left_out(tmp_path: Path) -> None:
    texts = ["20", " 39 ", "40", "x", "1.5", "", None, "+21", "9" * 30]
    properties = [None if text is None else [("at", text)] for text in texts]
    file = stored(tmp_path, len(texts), properties=properties)

    assert offsets(file, wanted(tmp_path, by="at")) == [0, 1, 7]


def stretch(**changes: Any) -> pa.Table:
    row = {
        "message_group": "g",
        "several": False,
        "low_stored": -1,
        "low_queue": 0,
        "low": 9,
        "high": 45,
        "last_stored": 39,
        "last_queue": 0,
        "last": 39,
    }
    return pa.Table.from_pylist([{**row, **changes}], schema=STRETCH)


def roles(file: Stored, asked: Wanted) -> dict[int, tuple[int, int]]:
    """Role -> the first and the last offset that has it."""
    found = pa.concat_tables(walked([file], asked))
    of = {}
    for role in np.unique(found[ROLE].to_numpy()).tolist():
        mine = found["queue_offset"].to_numpy()[found[ROLE].to_numpy() == role]
        assert len(mine) == mine[-1] - mine[0] + 1
        of[role] = int(mine[0]), int(mine[-1])
    return of


def test_messages_that_lead_to_the_range_and_on_have_their_roles(tmp_path: Path) -> None:
    path = write(stretch(), tmp_path / "stretches.arrow")

    found = roles(stored(tmp_path, 100), wanted(tmp_path, stretches=path))

    assert found == {WARM_UP: (10, 19), RANGE: (20, 39), BEHIND: (40, 45)}


def test_a_group_in_several_queues_is_led_there_by_time(tmp_path: Path) -> None:
    several = stretch(several=True, low_stored=5, low_queue=1, low=7, last_queue=1, last=3)
    path = write(several, tmp_path / "stretches.arrow")
    asked = wanted(tmp_path, stretches=path)

    assert roles(stored(tmp_path, 100), asked) == {WARM_UP: (6, 19), RANGE: (20, 39)}
    other = stored(tmp_path, 100, queue_id=1)
    assert roles(other, asked) == {WARM_UP: (6, 19), RANGE: (20, 39)}


def test_other_groups_are_in_the_range_alone(tmp_path: Path) -> None:
    path = write(stretch(message_group="other"), tmp_path / "stretches.arrow")

    found = roles(stored(tmp_path, 100), wanted(tmp_path, stretches=path))

    assert found == {RANGE: (20, 39)}


def test_the_hours_in_which_a_group_goes_on_are_found(tmp_path: Path) -> None:
    times = [30, 39, 50, HOUR_MS - 1, 3 * HOUR_MS, 3 * HOUR_MS + 5, 7 * HOUR_MS, 9 * HOUR_MS]
    groups = ["g"] * 6 + ["other", "g"]
    file = stored(tmp_path, 8, stored_at_ms=times, message_group=groups)
    ends = pa.table({"message_group": ["g"], "last_queue": [0], "last": [2]})

    assert hours_behind([file], wanted(tmp_path, end=7), ends=ends).tolist() == [0, 3]
    assert hours_behind([file], wanted(tmp_path), ends=ends).tolist() == [0, 3, 9]


def test_an_archive_out_of_reach_is_not_said_to_have_expired(tmp_path: Path) -> None:
    missing = Stored(str(tmp_path / "0.parquet"), 0, 0, 9)

    with pytest.raises(ArchiveError, match=r"no _manifest\.json on this machine"):
        list(walked([missing], wanted(tmp_path)))

    scratch = Stored("/nowhere/tail.parquet", 0, 0, 9)
    with pytest.raises(StorageRootError, match="the driver wrote it"):
        list(walked([scratch], wanted(tmp_path)))

    (tmp_path / "_manifest.json").write_text('{"format": 2, "files": []}')
    with pytest.raises(IllegalOffsetError, match="Offset 0 of queue 0 has expired"):
        list(walked([missing], wanted(tmp_path)))
