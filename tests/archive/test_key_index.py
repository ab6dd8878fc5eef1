"""An index leads to every row group with a key or an id, and to few others."""

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline import schema
from rmq_pipeline.archive import key_index
from rmq_pipeline.archive.key_index import Collector, KeyIndexes
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.storage.local import LocalRoot

TEXTS = st.text(max_size=3)
Rows = list[tuple[str, list[str] | None]]
SEGMENT = Segment("t", 7, 0, 0, 100)


def indexed(folder: Path, groups: list[Rows], *, together: int = 2) -> KeyIndexes:
    """The index of row groups with these ids and keys, taken in so many at a time."""
    collector, root = Collector(), LocalRoot(folder)
    for first in range(0, len(groups), together):
        some = groups[first : first + together]
        cuts = [0]
        for rows in some:
            cuts.append(cuts[-1] + len(rows))
        flat = [row for rows in some for row in rows]
        ids, keys = [each for each, _ in flat], [each for _, each in flat]
        columns = {"message_id": pa.array(ids, pa.string()), "keys": pa.array(keys, schema.KEYS)}
        collector.add(pa.table(columns), cuts=cuts, row_group=first)
    key_index.write(root, SEGMENT.index, index=collector.table())
    return KeyIndexes(root)


@given(
    groups=st.lists(
        st.lists(st.tuples(TEXTS, st.none() | st.lists(TEXTS, max_size=3)), min_size=1, max_size=5),
        min_size=1,
        max_size=6,
    ),
    ascending=st.booleans(),
)
def test_every_row_group_with_a_text_is_found(
    tmp_path_factory: pytest.TempPathFactory, groups: list[Rows], *, ascending: bool
) -> None:
    if ascending:
        numbers = iter(range(1000))
        groups = [[(f"{next(numbers):04d}", keys) for _, keys in rows] for rows in groups]
    found = indexed(tmp_path_factory.mktemp("index"), groups)

    for at, rows in enumerate(groups):
        for message_id, keys in rows:
            by_id = found.row_groups(SEGMENT, key=None, message_id=message_id)
            assert by_id is not None
            assert at in by_id
            for key in keys or ():
                both = found.row_groups(SEGMENT, key=key, message_id=message_id)
                assert both is not None
                assert at in both


def test_ids_that_ascend_take_no_entries(tmp_path: Path) -> None:
    groups: list[Rows] = [[(f"{10 * g + i:03d}", None) for i in range(10)] for g in range(6)]

    found = indexed(tmp_path, groups)

    assert [found.row_groups(SEGMENT, key=None, message_id=f"{i:03d}") for i in (0, 9, 10, 59)] == [
        [0],
        [0],
        [1],
        [5],
    ]
    assert found.row_groups(SEGMENT, key=None, message_id="060") == []
    index = pa.ipc.open_file((tmp_path / SEGMENT.index).read_bytes()).read_all()
    assert index.num_rows == 0


def test_hashes_lead_to_few_other_row_groups(tmp_path: Path) -> None:
    groups: list[Rows] = [[(f"{-i}", [f"{g}-{i}"]) for i in range(500)] for g in range(40)]

    found = indexed(tmp_path, groups, together=40)

    hits = [found.row_groups(SEGMENT, key=f"{g}-7", message_id=None) for g in range(40)]
    assert hits == [[g] for g in range(40)]
    assert found.row_groups(SEGMENT, key="nowhere", message_id=None) == []
    entries = pa.ipc.open_file((tmp_path / SEGMENT.index).read_bytes()).read_all()
    assert all(a <= b for a, b in pairwise(entries["hash"].to_pylist()))


@pytest.mark.parametrize("content", [None, b"", b"torn", bytes(200)])
def test_without_a_sound_index_nothing_is_known(tmp_path: Path, content: bytes | None) -> None:
    found = KeyIndexes(LocalRoot(tmp_path))
    if content is not None:
        path = tmp_path / SEGMENT.index
        path.parent.mkdir(parents=True)
        path.write_bytes(content)

    assert found.row_groups(SEGMENT, key="a", message_id=None) is None
