"""Files of a sink are replaced by others in one step, beside whoever settles into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.broker.decide.sinks import ReplaceSinkFiles
from rmq_pipeline.broker.state.sink_versions import SinkVersion

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tests.behaviour.conftest import Door, Make

NONE = schema.SINK_FILE.empty_table()
RANGES = [{"queue_id": 0, "base": 3, "end": 7}]


@pytest.fixture
def readers(group: Make) -> str:
    return str(group())


def files(*paths: str, offsets: list[dict[str, int]] | None = None) -> pa.Table:
    """Files whose partition is the folder they lie in."""
    described = [
        {
            "path": path,
            "rows": 10,
            "bytes": 1_000,
            "partition": path.partition("/")[0],
            "offsets": offsets,
        }
        for path in paths
    ]
    return pa.Table.from_pylist(described, schema=schema.SINK_FILE)


def settle(door: Door, readers: str, *paths: str) -> dict[str, Any]:
    """Let files count, as a window does."""
    nothing = schema.OUTCOME.empty_table()
    return door.broker.settle(readers, nothing, sink_files=files(*paths))


def replace(
    door: Door, readers: str, name: str, *, add: list[str], remove: list[str], **more: Any
) -> dict[str, Any]:
    return door.broker.replace_sink_files(
        readers, replacement_id=name, add=files(*add), remove=remove, **more
    )


def counting(door: Door, readers: str) -> list[str]:
    return list(door.broker.sink_files(readers)["path"].to_pylist())


@pytest.mark.every_endpoint
def test_files_count_instead_of_others(door: Door, readers: str) -> None:
    settle(door, readers, "h1/a", "h1/b", "h2/c")
    door.advance(1_000)

    answer = replace(door, readers, "r-1", add=["h1/ab"], remove=["h1/a", "h1/b"], reason="tidy")

    assert answer == {"version": 2, "added": ["h1/ab"], "removed": ["h1/a", "h1/b"]}
    assert counting(door, readers) == ["h2/c", "h1/ab"]
    assert door.sql("SELECT path, version FROM sink_files ORDER BY version") == [
        {"path": "h2/c", "version": 1},
        {"path": "h1/ab", "version": 2},
    ]
    assert door.sql("SELECT * FROM sink_replacements") == [
        {
            "consumer_group": readers,
            "replacement_id": "r-1",
            "at_ms": door.clock.now_ms(),
            "reason": "tidy",
            **answer,
        }
    ]


def test_a_file_keeps_what_was_said_of_it(door: Door, readers: str) -> None:
    door.broker.replace_sink_files(
        readers, replacement_id="r", add=files("h1/a", offsets=RANGES), remove=[]
    )

    (listed,) = door.broker.sink_files(readers).to_pylist()

    said = files("h1/a", offsets=RANGES).to_pylist()[0]
    assert listed == {**said, "epoch": 0, "at_ms": door.clock.now_ms(), "version": 1}


def test_files_that_were_replaced_are_known_for_a_time(door: Door, readers: str) -> None:
    settle(door, readers, "h1/a")
    replace(door, readers, "r-1", add=["h1/b"], remove=["h1/a"])
    start = door.clock.now_ms()

    (gone,) = door.broker.sink_files(readers, removed=True).to_pylist()

    assert (gone["path"], gone["version"], gone["removed_version"]) == ("h1/a", 1, 2)
    assert gone["removed_at_ms"] == start
    door.advance(limits.SINK_HISTORY_MS + 1)
    replace(door, readers, "r-2", add=["h1/c"], remove=["h1/b"])
    known = door.broker.sink_files(readers, removed=True)["path"].to_pylist()
    assert known == ["h1/b"]


def test_a_replacement_is_made_once(door: Door, readers: str) -> None:
    settle(door, readers, "h1/a")

    answers = [replace(door, readers, "r-1", add=["h1/b"], remove=["h1/a"]) for _ in range(2)]
    other = replace(door, readers, "r-1", add=["h1/never"], remove=["h1/b"])

    assert answers[0] == answers[1] == other
    assert counting(door, readers) == ["h1/b"]


def test_a_replacement_is_made_once_over_a_restart(door: Door, readers: str) -> None:
    settle(door, readers, "h1/a")
    first = replace(door, readers, "r-1", add=["h1/b"], remove=["h1/a"])
    settle(door, readers, "h1/c")

    door.reopen()

    assert replace(door, readers, "r-1", add=["h1/b"], remove=["h1/a"]) == first
    assert counting(door, readers) == ["h1/b", "h1/c"]
    assert settle(door, readers, "h1/d")["sink_version"] == 4


def test_two_groups_use_the_same_id(door: Door, readers: str, group: Make) -> None:
    others = group()
    settle(door, readers, "h1/a")
    settle(door, others, "h1/a")

    replace(door, readers, "r-1", add=["h1/b"], remove=["h1/a"])
    replace(door, others, "r-1", add=["h1/c"], remove=["h1/a"])

    assert (counting(door, readers), counting(door, others)) == (["h1/b"], ["h1/c"])


CONFLICTS: dict[str, dict[str, Any]] = {
    "a removed file was never there": {"add": ["h1/x"], "remove": ["h1/a", "h1/never"]},
    "a removed file was replaced": {"add": ["h1/x"], "remove": ["h1/old"]},
    "an added file counts": {"add": ["h1/a"], "remove": ["h1/b"]},
    "an added file was replaced": {"add": ["h1/old"], "remove": ["h1/a"]},
    "another file of the partition counts": {
        "add": ["h1/x"],
        "remove": ["h1/a"],
        "partitions": ["h1"],
    },
}


@pytest.mark.every_endpoint
@pytest.mark.parametrize("case", CONFLICTS)
def test_a_replacement_of_another_sink_than_there_is_changes_nothing(
    door: Door, readers: str, case: str
) -> None:
    settle(door, readers, "h1/old", "h1/a", "h2/c")
    replace(door, readers, "r-1", add=["h1/b"], remove=["h1/old"])
    before = door.broker.sink_files(readers)

    with pytest.raises(errors.SinkChangedError):
        replace(door, readers, "r-2", **CONFLICTS[case])

    assert door.broker.sink_files(readers).equals(before, check_metadata=True)
    assert replace(door, readers, "r-2", add=["h1/x"], remove=["h1/a", "h1/b"])["version"] == 3


BAD: dict[str, dict[str, Any]] = {
    "no id": {"name": ""},
    "a long id": {"name": "r" * (limits.REPLACEMENT_ID_LENGTH + 1)},
    "nothing at all": {"add": [], "remove": []},
    "an empty path": {"add": [""]},
    "a file twice": {"add": ["h1/x", "h1/x"]},
    "a removed file twice": {"remove": ["h1/a", "h1/a"]},
}


@pytest.mark.parametrize("case", BAD)
def test_a_replacement_that_makes_no_sense_is_refused(door: Door, readers: str, case: str) -> None:
    settle(door, readers, "h1/a")

    with pytest.raises(errors.RequestError):
        replace(door, readers, **{"name": "r-1", "add": ["h1/x"], "remove": ["h1/a"], **BAD[case]})

    assert counting(door, readers) == ["h1/a"]


def test_files_without_their_paths_are_refused(door: Door, readers: str) -> None:
    with pytest.raises(errors.TableSchemaError):
        door.broker.replace_sink_files(
            readers, replacement_id="r", add=pa.table({"rows": [1]}), remove=[]
        )


def test_a_whole_partition_is_replaced(door: Door, readers: str) -> None:
    settle(door, readers, "h1/a", "h1/b", "h2/c")

    replace(door, readers, "r", add=["h1/x"], remove=["h1/a", "h1/b"], partitions=["h1"])
    replace(door, readers, "r-empty", add=[], remove=["h1/x"], partitions=["h1"])

    assert counting(door, readers) == ["h2/c"]


def test_a_listing_says_of_which_version_it_is(door: Door, readers: str) -> None:
    def version() -> int:
        return int(door.broker.sink_files(readers).schema.metadata[b"version"])

    found = [version()]
    settle(door, readers, "h1/a")
    found.append(version())
    replace(door, readers, "r", add=[], remove=["h1/a"])
    found.append(version())

    assert found == [0, 1, 2]
    assert counting(door, readers) == []


def test_a_window_settles_on_beside_a_replacement(
    door: Door, readers: str, topic: Make, messages: Make, outcomes: Make
) -> None:
    source = topic(queues=1)
    door.broker.send(source, messages(2))
    name = f"consumer/{readers}"
    window = (name, door.broker.open_window(name, owner="run", duration_ms=60_000)["epoch"])
    for number, path in enumerate(["h1/a", "h1/c"]):
        got = door.broker.receive(readers, source, limit=1, window=window)
        if number:
            replace(door, readers, "r", add=["h1/b"], remove=["h1/a"])
        door.broker.settle(
            readers,
            outcomes(got, "ack"),
            settle_id=str(number),
            window=window,
            sink_files=files(path),
        )

    assert counting(door, readers) == ["h1/b", "h1/c"]


def test_a_replacement_of_a_window_that_is_over_is_refused(door: Door, readers: str) -> None:
    settle(door, readers, "h1/a")
    epochs = [
        door.broker.open_window("upkeep/tidy", owner=owner, duration_ms=60_000, takeover=True)
        for owner in ("old", "new")
    ]
    windows = [("upkeep/tidy", opened["epoch"]) for opened in epochs]

    with pytest.raises(errors.FencedError):
        replace(door, readers, "r", add=["h1/b"], remove=["h1/a"], window=windows[0])

    assert counting(door, readers) == ["h1/a"]
    replace(door, readers, "r", add=["h1/b"], remove=["h1/a"], window=windows[1])
    assert counting(door, readers) == ["h1/b"]


def test_a_deleted_group_takes_its_sink_along(door: Door, readers: str) -> None:
    settle(door, readers, "h1/a")
    replace(door, readers, "r", add=["h1/b"], remove=["h1/a"])

    door.broker.delete_group(readers)
    door.broker.create_group(readers)

    assert counting(door, readers) == []
    assert door.sql("SELECT * FROM sink_replacements") == []
    assert settle(door, readers, "h1/c")["sink_version"] == 1


def request(readers: str, name: str, *, seen: SinkVersion, whole: bool) -> ReplaceSinkFiles:
    added = files(f"h1/{name}").to_pylist()
    return ReplaceSinkFiles(readers, name, "", added, ["h1/a"], seen, None, whole)


def test_of_two_replacements_in_one_frame_one_looks_again(inside: Door, readers: str) -> None:
    settle(inside, readers, "h1/a", "h1/b")

    def submit(name: str) -> Future[Any]:
        asked = request(readers, name, seen=SinkVersion(1, 0), whole=False)
        return inside.pool.submit(inside.inside.writer.submit, asked)

    answers = [future.result() for future in (submit("x"), submit("y"))]

    assert sorted(answer is None for answer in answers) == [False, True]


def test_a_settle_in_between_matters_to_whole_partitions_alone(inside: Door, readers: str) -> None:
    settle(inside, readers, "h1/a")
    settle(inside, readers, "h2/b")
    submit = inside.inside.writer.submit

    whole = submit(request(readers, "x", seen=SinkVersion(1, 0), whole=True))
    named = submit(request(readers, "y", seen=SinkVersion(1, 0), whole=False))

    assert whole is None
    assert named["version"] == 3
