"""Files of a sink are replaced in one step, while windows settle into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.broker.decide.sinks import ReplaceSinkFiles
from rmq_pipeline.broker.state.group_facts import SinkVersion

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tests.behaviour.conftest import Endpoint, Make

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


def settle(endpoint: Endpoint, readers: str, *paths: str) -> dict[str, Any]:
    """Let files count, as a window does."""
    nothing = schema.OUTCOME.empty_table()
    return endpoint.broker.settle(readers, nothing, sink_files=files(*paths))


def replace(
    endpoint: Endpoint, readers: str, name: str, *, add: list[str], remove: list[str], **more: Any
) -> dict[str, Any]:
    return endpoint.broker.replace_sink_files(
        readers, replacement_id=name, add=files(*add), remove=remove, **more
    )


def counting(endpoint: Endpoint, readers: str) -> list[str]:
    return list(endpoint.broker.sink_files(readers)["path"].to_pylist())


@pytest.mark.every_endpoint
def test_files_count_instead_of_others(endpoint: Endpoint, readers: str) -> None:
    settle(endpoint, readers, "h1/a", "h1/b", "h2/c")
    endpoint.advance(1_000)

    answer = replace(
        endpoint, readers, "r-1", add=["h1/ab"], remove=["h1/a", "h1/b"], reason="tidy"
    )

    assert answer == {"version": 2, "added": ["h1/ab"], "removed": ["h1/a", "h1/b"]}
    assert counting(endpoint, readers) == ["h2/c", "h1/ab"]
    assert endpoint.sql("SELECT path, version FROM sink_files ORDER BY version") == [
        {"path": "h2/c", "version": 1},
        {"path": "h1/ab", "version": 2},
    ]
    assert endpoint.sql("SELECT * FROM sink_replacements") == [
        {
            "consumer_group": readers,
            "replacement_id": "r-1",
            "at_ms": endpoint.clock.now_ms(),
            "reason": "tidy",
            **answer,
        }
    ]


def test_a_file_keeps_what_was_said_of_it(endpoint: Endpoint, readers: str) -> None:
    endpoint.broker.replace_sink_files(
        readers, replacement_id="r", add=files("h1/a", offsets=RANGES), remove=[]
    )

    (listed,) = endpoint.broker.sink_files(readers).to_pylist()

    said = files("h1/a", offsets=RANGES).to_pylist()[0]
    assert listed == {**said, "epoch": 0, "at_ms": endpoint.clock.now_ms(), "version": 1}


def test_files_that_were_replaced_are_known_for_a_time(endpoint: Endpoint, readers: str) -> None:
    settle(endpoint, readers, "h1/a")
    replace(endpoint, readers, "r-1", add=["h1/b"], remove=["h1/a"])
    start = endpoint.clock.now_ms()

    (gone,) = endpoint.broker.sink_files(readers, removed=True).to_pylist()

    assert (gone["path"], gone["version"], gone["removed_version"]) == ("h1/a", 1, 2)
    assert gone["removed_at_ms"] == start
    endpoint.advance(limits.SINK_HISTORY_MS + 1)
    replace(endpoint, readers, "r-2", add=["h1/c"], remove=["h1/b"])
    known = endpoint.broker.sink_files(readers, removed=True)["path"].to_pylist()
    assert known == ["h1/b"]


def test_a_replacement_is_made_once(endpoint: Endpoint, readers: str) -> None:
    settle(endpoint, readers, "h1/a")

    answers = [replace(endpoint, readers, "r-1", add=["h1/b"], remove=["h1/a"]) for _ in range(2)]
    other = replace(endpoint, readers, "r-1", add=["h1/never"], remove=["h1/b"])

    assert answers[0] == answers[1] == other
    assert counting(endpoint, readers) == ["h1/b"]


def test_a_replacement_is_made_once_over_a_restart(endpoint: Endpoint, readers: str) -> None:
    settle(endpoint, readers, "h1/a")
    first = replace(endpoint, readers, "r-1", add=["h1/b"], remove=["h1/a"])
    settle(endpoint, readers, "h1/c")

    endpoint.reopen()

    assert replace(endpoint, readers, "r-1", add=["h1/b"], remove=["h1/a"]) == first
    assert counting(endpoint, readers) == ["h1/b", "h1/c"]
    assert settle(endpoint, readers, "h1/d")["sink_version"] == 4


def test_two_groups_use_the_same_id(endpoint: Endpoint, readers: str, group: Make) -> None:
    others = group()
    settle(endpoint, readers, "h1/a")
    settle(endpoint, others, "h1/a")

    replace(endpoint, readers, "r-1", add=["h1/b"], remove=["h1/a"])
    replace(endpoint, others, "r-1", add=["h1/c"], remove=["h1/a"])

    assert (counting(endpoint, readers), counting(endpoint, others)) == (["h1/b"], ["h1/c"])


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
    endpoint: Endpoint, readers: str, case: str
) -> None:
    settle(endpoint, readers, "h1/old", "h1/a", "h2/c")
    replace(endpoint, readers, "r-1", add=["h1/b"], remove=["h1/old"])
    before = endpoint.broker.sink_files(readers)

    with pytest.raises(errors.SinkChangedError):
        replace(endpoint, readers, "r-2", **CONFLICTS[case])

    assert endpoint.broker.sink_files(readers).equals(before, check_metadata=True)
    assert replace(endpoint, readers, "r-2", add=["h1/x"], remove=["h1/a", "h1/b"])["version"] == 3


BAD: dict[str, dict[str, Any]] = {
    "no id": {"name": ""},
    "a long id": {"name": "r" * (limits.REPLACEMENT_ID_LENGTH + 1)},
    "nothing at all": {"add": [], "remove": []},
    "an empty path": {"add": [""]},
    "a file twice": {"add": ["h1/x", "h1/x"]},
    "a removed file twice": {"remove": ["h1/a", "h1/a"]},
}


@pytest.mark.parametrize("case", BAD)
def test_a_replacement_that_makes_no_sense_is_refused(
    endpoint: Endpoint, readers: str, case: str
) -> None:
    settle(endpoint, readers, "h1/a")

    with pytest.raises(errors.RequestError):
        replace(
            endpoint, readers, **{"name": "r-1", "add": ["h1/x"], "remove": ["h1/a"], **BAD[case]}
        )

    assert counting(endpoint, readers) == ["h1/a"]


def test_files_without_their_paths_are_refused(endpoint: Endpoint, readers: str) -> None:
    with pytest.raises(errors.TableSchemaError):
        endpoint.broker.replace_sink_files(
            readers, replacement_id="r", add=pa.table({"rows": [1]}), remove=[]
        )


def test_a_whole_partition_is_replaced(endpoint: Endpoint, readers: str) -> None:
    settle(endpoint, readers, "h1/a", "h1/b", "h2/c")

    replace(endpoint, readers, "r", add=["h1/x"], remove=["h1/a", "h1/b"], partitions=["h1"])
    replace(endpoint, readers, "r-empty", add=[], remove=["h1/x"], partitions=["h1"])

    assert counting(endpoint, readers) == ["h2/c"]


def test_a_listing_says_of_which_version_it_is(endpoint: Endpoint, readers: str) -> None:
    def version() -> int:
        return int(endpoint.broker.sink_files(readers).schema.metadata[b"version"])

    found = [version()]
    settle(endpoint, readers, "h1/a")
    found.append(version())
    replace(endpoint, readers, "r", add=[], remove=["h1/a"])
    found.append(version())

    assert found == [0, 1, 2]
    assert counting(endpoint, readers) == []


def test_a_window_settles_during_a_replacement(
    endpoint: Endpoint, readers: str, topic: Make, messages: Make, outcomes: Make
) -> None:
    source = topic(queues=1)
    endpoint.broker.send(source, messages(2))
    name = f"consumer/{readers}"
    window = (name, endpoint.broker.open_window(name, owner="run", duration_ms=60_000)["epoch"])
    for number, path in enumerate(["h1/a", "h1/c"]):
        got = endpoint.broker.receive(readers, source, limit=1, window=window)
        if number:
            replace(endpoint, readers, "r", add=["h1/b"], remove=["h1/a"])
        endpoint.broker.settle(
            readers,
            outcomes(got, "ack"),
            settle_id=str(number),
            window=window,
            sink_files=files(path),
        )

    assert counting(endpoint, readers) == ["h1/b", "h1/c"]


def test_a_replacement_of_a_window_that_is_over_is_refused(
    endpoint: Endpoint, readers: str
) -> None:
    settle(endpoint, readers, "h1/a")
    epochs = [
        endpoint.broker.open_window("upkeep/tidy", owner=owner, duration_ms=60_000, takeover=True)
        for owner in ("old", "new")
    ]
    windows = [("upkeep/tidy", opened["epoch"]) for opened in epochs]

    with pytest.raises(errors.FencedError):
        replace(endpoint, readers, "r", add=["h1/b"], remove=["h1/a"], window=windows[0])

    assert counting(endpoint, readers) == ["h1/a"]
    replace(endpoint, readers, "r", add=["h1/b"], remove=["h1/a"], window=windows[1])
    assert counting(endpoint, readers) == ["h1/b"]


def test_a_deleted_group_takes_its_sink_along(endpoint: Endpoint, readers: str) -> None:
    settle(endpoint, readers, "h1/a")
    replace(endpoint, readers, "r", add=["h1/b"], remove=["h1/a"])

    endpoint.broker.delete_group(readers)
    endpoint.broker.create_group(readers)

    assert counting(endpoint, readers) == []
    assert endpoint.sql("SELECT * FROM sink_replacements") == []
    assert settle(endpoint, readers, "h1/c")["sink_version"] == 1


def request(readers: str, name: str, *, seen: SinkVersion, whole: bool) -> ReplaceSinkFiles:
    added = files(f"h1/{name}").to_pylist()
    return ReplaceSinkFiles(readers, name, "", added, ["h1/a"], seen, None, whole)


def test_of_two_replacements_in_one_frame_one_looks_again(inside: Endpoint, readers: str) -> None:
    settle(inside, readers, "h1/a", "h1/b")

    def submit(name: str) -> Future[Any]:
        asked = request(readers, name, seen=SinkVersion(1, 0), whole=False)
        return inside.pool.submit(inside.inside.writer.submit, asked)

    answers = [future.result() for future in (submit("x"), submit("y"))]

    assert sorted(answer is None for answer in answers) == [False, True]


def test_a_settle_in_between_matters_to_whole_partitions_alone(
    inside: Endpoint, readers: str
) -> None:
    settle(inside, readers, "h1/a")
    settle(inside, readers, "h2/b")
    submit = inside.inside.writer.submit

    whole = submit(request(readers, "x", seen=SinkVersion(1, 0), whole=True))
    named = submit(request(readers, "y", seen=SinkVersion(1, 0), whole=False))

    assert whole is None
    assert named["version"] == 3
