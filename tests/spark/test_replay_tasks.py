"""What a task of a replay carries from one table of messages to the next."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.spark.arrow_transport import unpack, write
from rmq_pipeline.spark.replay.reading import WALKED, Wanted, chunks
from rmq_pipeline.spark.replay.tasks import Assignment, _Task
from rmq_pipeline.spark.replay.topic_log import Range
from rmq_pipeline.spark.replay.walk import RANGE, ReplayRules

SINK = pa.schema(
    [("message_group", pa.string()), ("total", pa.int64()), ("born_at_ms", pa.int64())]
)
STATE = pa.schema([("total", pa.int64())])
#: Messages of a table, at most.
MOST = 4


def totals(given: pa.Table, state: pa.Table) -> Outcome:
    """A row a call: how many messages of the group there were up to it."""
    total = (state["total"][0].as_py() if state.num_rows else 0) + given.num_rows
    row = {"message_group": given["message_group"][0].as_py(), "total": total, "born_at_ms": 0}
    return Outcome(
        rows=pa.Table.from_pylist([row], schema=SINK),
        state=pa.table({"total": [total]}, schema=STATE),
    )


def messages(*stretches: tuple[str | None, int, str]) -> pa.Table:
    """Messages of the range, as many of a group and a tag as each stretch says."""
    each = [(group, tag) for group, n, tag in stretches for _ in range(n)]
    columns: dict[str, list[Any]] = {
        "queue_id": [0] * len(each),
        "queue_offset": list(range(len(each))),
        "message_group": [group for group, _ in each],
        "tag": [tag for _, tag in each],
        "role": [RANGE] * len(each),
    }
    arrays = [pa.array(columns.get(f.name, [None] * len(each)), f.type) for f in WALKED]
    return pa.table(arrays, schema=WALKED)


def states(folder: Path, name: str, **groups: int) -> str:
    rows = [{"message_group": group, "total": total} for group, total in groups.items()]
    types = pa.schema([("message_group", pa.string()), *STATE])
    return write(pa.Table.from_pylist(rows, schema=types), folder / f"{name}.arrow")


def walked(
    folder: Path, given: pa.Table, *, wants: str = "*", most: int = MOST, **after: int
) -> tuple[dict[str, int], list[str]]:
    """The last total of each group that began with 100 for a and 1,000 for b, and who differs."""
    range_ = Range(topic="t", from_ms=0, to_ms=3_600_000, partition_time="stored")
    this = Assignment(
        ReplayRules(
            Rules(totals, state_schema=STATE, sink_schema=SINK, partition_time="born_at_ms")
        ),
        Wanted(range_, "", {0: given.num_rows}),
        filter=wants,
        filter_type="tag",
        sink=folder / "sink",
        scratch=folder,
        label="test",
        before=states(folder, "before", a=100, b=1_000),
        after=states(folder, "after", **after),
    )
    task = _Task(this)
    for table, goes_on in chunks([given], rows=most):
        task.take(table, goes_on=goes_on)
    found = {each.kind: unpack(each.payload, each.path) for each in task.answers()}
    last: dict[str, int] = {}
    for path in found["files"]["path"].to_pylist():
        with pq.ParquetFile(folder / "sink" / path) as file:
            for row in file.read().to_pylist():
                last[row["message_group"]] = max(row["total"], last.get(row["message_group"], 0))
    return last, sorted(found["differ"]["message_group"].to_pylist())


@pytest.mark.parametrize("n", [MOST - 1, MOST, MOST + 1, 2 * MOST, 3 * MOST + 1])
def test_a_group_begins_from_its_own_state_wherever_the_one_before_it_ends(
    tmp_path: Path, n: int
) -> None:
    given = messages(("a", n, "kept"), ("b", 3, "kept"))

    last, differ = walked(tmp_path, given, a=100 + n, b=1_003)

    assert last == {"a": 100 + n, "b": 1_003}
    assert differ == []


@pytest.mark.parametrize("dropped", [1, MOST, MOST + 1, 2 * MOST])
def test_a_filter_may_drop_all_that_a_group_goes_on_with(tmp_path: Path, dropped: int) -> None:
    given = messages(("a", MOST, "kept"), ("a", dropped, "no"), ("b", 3, "kept"))

    last, differ = walked(tmp_path, given, wants="kept", a=100 + MOST, b=1_003)

    assert last == {"a": 100 + MOST, "b": 1_003}
    assert differ == []


@pytest.mark.parametrize("dropped", [1, MOST, MOST + 1])
def test_a_filter_may_drop_what_a_long_group_begins_with(tmp_path: Path, dropped: int) -> None:
    given = messages(("a", dropped, "no"), ("a", MOST, "kept"), ("b", 3, "kept"))

    last, _ = walked(tmp_path, given, wants="kept")

    assert last == {"a": 100 + MOST, "b": 1_003}


@pytest.mark.parametrize("following", [0, 3])
def test_the_state_of_a_group_that_ends_with_a_table_is_compared(
    tmp_path: Path, following: int
) -> None:
    given = messages(("a", MOST, "kept"), ("b", following, "kept"))

    _, differ = walked(tmp_path, given, a=7, b=1_003)

    assert differ == ["a"]


def test_messages_without_a_group_carry_nothing(tmp_path: Path) -> None:
    # Each is a group of its own, and fails: it has no state to keep.
    given = messages((None, 2, "kept"), ("a", 2, "kept"), (None, 1, "kept"), ("b", 1, "kept"))

    last, _ = walked(tmp_path, given, most=1)

    assert last == {"a": 102, "b": 1_001}
