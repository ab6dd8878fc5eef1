"""How a task of a replay arranges messages of many groups in little memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_pipeline.spark.replay.reading import (
    WALKED,
    by_group,
    partition,
    shares,
    sort_by_group,
    tables_of,
)
from rmq_pipeline.spark.replay.tasks import ROWS_PER_TASK, Part, by_length, by_queue, share_out
from rmq_pipeline.spark.replay.topic_log import Stored

Place = tuple[str | None, int, int, int]


def messages(*places: Place) -> pa.Table:
    """Messages of (message_group, stored_at_ms, queue_id, queue_offset)."""
    names = ("message_group", "stored_at_ms", "queue_id", "queue_offset")
    columns: dict[str, Any] = dict(zip(names, zip(*places, strict=True), strict=True))
    columns["body"] = [b"x" * 100] * len(places)
    arrays = [pa.array(columns.get(f.name, [None] * len(places)), f.type) for f in WALKED]
    return pa.table(arrays, schema=WALKED)


def places(*tables: pa.Table) -> list[Place]:
    found = pa.concat_tables(tables)
    names = ("message_group", "stored_at_ms", "queue_id", "queue_offset")
    return list(zip(*(found[name].to_pylist() for name in names), strict=True))


def assert_arranged(found: Sequence[Place], given: Sequence[Place]) -> None:
    """The same messages; a group's are side by side, in the order they were stored."""
    assert sorted(map(str, found)) == sorted(map(str, given))
    groups = [place[0] for place in found]
    starts = [g for i, g in enumerate(groups) if g is not None and (not i or groups[i - 1] != g)]
    assert len(starts) == len(set(starts))
    for group in set(starts):
        mine = [place[1:] for place in found if place[0] == group]
        assert mine == sorted(mine)


@pytest.mark.parametrize("most", [1 << 30, 20_000, 1])
def test_groups_are_side_by_side_and_in_order_however_little_memory(
    tmp_path: Path, most: int
) -> None:
    # g0 is as large as all others together, and some messages have no group.
    names = [None if i % 50 == 0 else f"g{0 if i % 2 else i % 23}" for i in range(2_000)]
    given = [(name, i, 1, i) for i, name in enumerate(names)]
    parts = [messages(*given[at : at + 130]) for at in range(0, len(given), 130)]

    found = list(sort_by_group(iter(parts), folder=tmp_path, most=most))

    assert_arranged(places(*found), given)
    assert not list(tmp_path.iterdir())
    assert most > 20_000 or len(found) > 5


@pytest.mark.parametrize("most", [1 << 30, 1])
def test_a_group_that_changed_its_queue_goes_on_behind_what_it_left(
    tmp_path: Path, most: int
) -> None:
    old = [("moved", 10 + i, 5, i) for i in range(40)]
    others = [("other", i, 2, i) for i in range(60)]
    new = [("moved", 60 + i, 2, 60 + i) for i in range(40)]
    # The file of the new queue begins with messages older than any of the old one.
    parts = [messages(*others, *new), messages(*old)]

    found = list(sort_by_group(iter(parts), folder=tmp_path, most=most))

    assert_arranged(places(*found), old + others + new)


def test_messages_are_dealt_out_by_group_and_strangers_anywhere(tmp_path: Path) -> None:
    given = [(None if i % 2 else f"g{i % 40}", i, 0, i) for i in range(1_000)]

    dealt = partition([messages(*given)], folder=tmp_path, files=4)

    kept = {share: places(*tables_of(each.path)) for share, each in dealt.items()}
    assert sorted(kept) == [0, 1, 2, 3]
    everything = [place for mine in kept.values() for place in mine]
    assert sorted(map(str, everything)) == sorted(map(str, given))
    for share, mine in kept.items():
        assert [place[3] for place in mine] == sorted(place[3] for place in mine)
        for other in kept.keys() - {share}:
            groups = {place[0] for place in mine} & {place[0] for place in kept[other]}
            assert groups <= {None}
    assert all(sum(place[0] is None for place in mine) > 50 for mine in kept.values())


def test_groups_of_one_share_are_parted_when_they_are_dealt_out_again() -> None:
    table = messages(*((f"g{i}", i, 0, i) for i in range(4_000)))
    first = table.filter(pa.array(shares(table, 16) == 3))

    again = shares(first, 16, depth=1)

    assert len(set(again.tolist())) == 16


def test_messages_of_one_queue_keep_its_order_whatever_the_clock_said() -> None:
    found = by_group(messages(("a", 9, 0, 0), ("b", 5, 0, 1), ("a", 3, 0, 2)))

    assert pc.equal(found["queue_offset"], pa.array([0, 2, 1])).to_pylist() == [True] * 3


def stored_files(*rows: int, queues: int) -> list[Stored]:
    return [Stored(f"{i}", i % queues, 0, n) for i, n in enumerate(rows)]


def test_tasks_take_queues_unless_a_group_may_be_in_two() -> None:
    files = stored_files(*[100_000] * 8, queues=8)

    assert share_out(files, one_queue_a_group=True, parallelism=2) == 0
    assert share_out(files, one_queue_a_group=False, parallelism=2) == 2
    assert share_out(files, one_queue_a_group=True, parallelism=16) == 16
    assert share_out(files[:1], one_queue_a_group=True, parallelism=2) == 2
    assert share_out(stored_files(300, queues=1), one_queue_a_group=True, parallelism=2) == 0
    long = stored_files(4 * ROWS_PER_TASK, 1_000, queues=2)
    assert share_out(long, one_queue_a_group=True, parallelism=2) == 5


def test_parts_have_the_files_of_one_queue_in_their_order() -> None:
    files = [Stored("b", 0, 300_000, 600_000), Stored("a", 0, 0, 300_000), Stored("c", 1, 0, 10)]

    assert by_queue(files) == [Part((files[1], files[0])), Part((files[2],))]
    assert by_length([*files, Stored("d", 0, 600_000, 600_001)]) == [
        Part((files[1], files[0])),
        Part((Stored("d", 0, 600_000, 600_001),)),
        Part((files[2],)),
    ]
