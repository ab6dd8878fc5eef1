"""``rmq verify``: which files of a closed home are damaged."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from typing_extensions import override

from rmq_pipeline.broker.verification import Verified
from rmq_pipeline.cli.verifying import _shown
from rmq_pipeline.handling import sink as sinks
from rmq_pipeline.lake import manifest
from tests.broker.sealed_home import messages, open_broker, seal_all
from tests.cli.conftest import Rmq


@pytest.fixture
def sealed(home: Path) -> Path:
    with open_broker(home, snapshot_events=1) as broker:
        broker.create_topic("orders", queues=1)
        broker.send("orders", messages(50, body_bytes=100))
        seal_all(broker)
    return home


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    with path.open("r+b") as file:
        file.write(content)


def test_a_sound_home_has_no_damage(rmq: Rmq, sealed: Path) -> None:
    said = rmq("verify", "--home", str(sealed), "--json").json

    assert said["damaged"] == []
    assert said["place"] == str(sealed)
    kinds = {"archive", "database", "events", "format", "index", "log", "manifest", "segment"}
    assert said["kinds"].keys() >= {*kinds, "snapshot"}
    assert said["files"] == sum(said["kinds"].values())


@pytest.mark.parametrize(
    ("pattern", "byte", "kind"),
    [
        ("topics/**/*.kept", 2000, "segment"),
        ("topics/**/_manifest.json", 60, "manifest"),
        ("events/0*.parquet", 30, "events"),
        ("log/*.log", 4096 + 100, "log"),
        ("archive.json", 20, "archive"),
        ("state.duckdb", 4096 * 3 + 100, "database"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(
    rmq: Rmq, sealed: Path, pattern: str, byte: int, kind: str
) -> None:
    (path,) = sealed.glob(pattern)
    flip(path, byte)

    told = rmq("verify", "--home", str(sealed), "--json")

    assert told.code == 1
    (damaged,) = json.loads(told.text)["damaged"]
    assert str(path).endswith(damaged["file"])
    assert damaged["kind"] == kind
    assert damaged["damage"]
    assert damaged["remedy"]


def test_a_file_that_is_gone_is_named(rmq: Rmq, sealed: Path) -> None:
    (segment,) = sealed.glob("topics/**/*.kept")
    segment.unlink()

    told = rmq("verify", "--home", str(sealed))

    assert told.code == 1
    assert "it is gone" in told.text


def test_an_open_home_is_refused(rmq: Rmq, sealed: Path) -> None:
    with open_broker(sealed):
        told = rmq("verify", "--home", str(sealed))

    assert told.code == 1
    assert "rmq stop" in told.err


def test_what_is_no_home_is_refused(rmq: Rmq, tmp_path: Path) -> None:
    assert "is no home of a broker" in rmq("verify", "--home", str(tmp_path)).err


def test_a_damaged_file_of_a_sink_is_named(rmq: Rmq, tmp_path: Path) -> None:
    rows = pa.table({"n": range(1000), "at": [0] * 1000})
    files = sinks.stage(tmp_path, rows, partition_time="at", epoch=1, batch=1)
    sinks.publish_manifest(tmp_path, files)
    assert rmq("verify", "--sink", str(tmp_path)).code == 0
    (path,) = manifest.read(tmp_path).files["path"].to_pylist()

    flip(tmp_path / path, 100)

    told = rmq("verify", "--sink", str(tmp_path), "--json")
    assert told.code == 1
    assert [each["file"] for each in json.loads(told.text)["damaged"]] == [path]


class Counting(int):
    """A number of bytes that counts how often it is added."""

    added = 0

    @override
    def __radd__(self, other: int) -> int:
        Counting.added += 1
        return int(self) + other


def test_the_bar_costs_the_same_for_every_file() -> None:
    files = [Verified("log", "log", Counting(1)) for _ in range(200)]

    assert len(_shown(iter(files))) == 200
    assert Counting.added == 200
