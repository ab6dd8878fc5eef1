"""``rmq sink convert`` makes sinks of older formats Delta tables, beside all other publishers."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from rmq_pipeline import durable_files
from rmq_pipeline.flight.client import Client
from rmq_pipeline.lake import manifest, publication, readers
from rmq_pipeline.storage.place import at
from tests.cli.conftest import Name, Rmq, Served
from tests.lake.test_delta import of_format_2, rows, staged
from tests.object_store import ObjectStore

#: Sinks, one after the other, that several publishers convert at once.
ROUNDS = 4


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(home=served.home) as client:
        yield client


@pytest.fixture
def sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RMQ_SINKS", str(tmp_path / "sinks"))
    return tmp_path / "sinks"


def added(client: Client, group: str, folder: Path | str, *numbers: int) -> pa.Table:
    """Add files to the broker's list, and not to the manifest."""
    files = staged(folder, rows(*numbers))
    client.replace_sink_files(group, replacement_id=f"{numbers}", add=files, remove=[])
    return files


def old_sink(client: Client, group: str, folder: Path) -> None:
    """A sink whose manifest of format 2 lists two of the three files of the broker."""
    files = [added(client, group, folder, number) for number in (1, 2)]
    of_format_2(folder, pa.concat_tables(files), version=2)
    added(client, group, folder, 3)


def numbers_in(folder: Path) -> list[int]:
    return sorted(deltalake.DeltaTable(folder).to_pyarrow_table()["n"].to_pylist())


def test_a_sink_becomes_a_delta_table_once(
    rmq: Rmq, client: Client, group: str, sinks: Path
) -> None:
    old_sink(client, group, sinks / group)

    first = rmq("sink", "convert", group)
    second = rmq("sink", "convert", group, "--json")

    assert first.code == 0
    assert first.text.splitlines()[1].split() == [group, "converted", group, "3", "3"]
    assert [row["state"] for row in second.json] == ["already a Delta table"]
    assert numbers_in(sinks / group) == [1, 2, 3]
    assert manifest.read(sinks / group).version == deltalake.DeltaTable(sinks / group).version()
    assert not list((sinks / group).glob("*_manifest-*"))


def test_a_sink_of_format_1_with_another_name_than_its_group(
    rmq: Rmq, client: Client, group: str, name: Name, tmp_path: Path
) -> None:
    folder = tmp_path / name("elsewhere")
    pointer = {"format": 1, "files": added(client, group, folder, 1).to_pylist()}
    (folder / manifest.NAME).write_bytes(durable_files.dump_json(pointer))

    [row] = rmq("sink", "convert", str(folder), "--json").json

    assert (row["state"], row["group"], row["version"]) == ("converted", group, 1)
    assert numbers_in(folder) == [1]


def test_all_sinks_are_converted_but_those_of_others(
    rmq: Rmq, client: Client, group: str, name: Name, sinks: Path
) -> None:
    old_sink(client, group, sinks / "old")
    table = name("table")
    client.create_group(table)
    added(client, table, sinks / table, 4)
    publication.publish(client, table, sink=sinks / table)
    of_format_2(sinks / "strange", staged(sinks / "strange", rows(8, 9)), version=2)
    damaged = of_format_2(sinks / "damaged", staged(sinks / "damaged", rows(8, 9)), version=2)
    (damaged.parent / manifest.NAME).write_text("{")
    (sinks / "newer").mkdir()
    (sinks / "newer" / manifest.NAME).write_bytes(durable_files.dump_json({"format": 4}))
    (sinks / "_replays" / "hour=1").mkdir(parents=True)

    told = rmq("sink", "convert", "--all")

    assert told.code == 1
    states = {line.split()[0]: line for line in told.text.splitlines()[1:]}
    assert set(states) == {"old", table, "strange", "damaged", "newer"}
    assert "converted" in states["old"]
    assert "already a Delta table" in states[table]
    assert "unknown to the broker" in states["strange"]
    assert "not converted" in states["damaged"]
    assert "is damaged" in states["damaged"]
    assert "written by a newer version" in states["newer"]
    assert numbers_in(sinks / "old") == [1, 2, 3]
    assert manifest.read(sinks / "strange").files.num_rows == 2
    assert not (sinks / "strange" / manifest.LOG).exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--all", "--sinks", "{}/nowhere"), "{}/nowhere has no sinks"),
        (("billing", "--sinks", "{}/nowhere"), "{}/nowhere/billing is no sink"),
        (("{}/nowhere",), "{}/nowhere is no sink"),
        (("--all", "--sinks", "s3:/lake"), "was a URI before"),
        (("billing", "--all"), "Name the sinks, or give --all"),
        ((), "Name the sinks, or give --all"),
    ],
)
def test_a_wrong_path_is_refused_before_anything_is_written(
    rmq: Rmq, tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    given = [each.format(tmp_path) for each in arguments]

    told = rmq("sink", "convert", *given)

    assert told.code == 1
    assert why.format(tmp_path) in told.err
    assert "Traceback" not in told.err
    assert list(tmp_path.iterdir()) == []


def test_a_sink_in_a_bucket(
    rmq: Rmq, client: Client, group: str, object_store: ObjectStore
) -> None:
    parent = object_store.uri("converted")
    folder = f"{parent}/{group}"
    described = added(client, group, folder, 1, 2).to_pylist()
    pointer = durable_files.dump_json({"format": 1, "files": described})
    at(folder).replace(manifest.NAME, pointer)

    [row] = rmq("sink", "convert", "--all", "--sinks", parent, "--json").json

    assert (row["sink"], row["state"]) == (group, "converted")
    assert sorted(readers.sink_table(folder)["n"].to_pylist()) == [1, 2]


def test_a_window_settles_behind_the_back_of_the_command(
    client: Client, served: Served, group: str, tmp_path: Path
) -> None:
    old_sink(client, group, tmp_path)

    class Late(Client):
        """Its second list of files is older than the Delta table."""

        asked = 0

        def sink_files(self, group: str, *, removed: bool = False) -> pa.Table:
            listed = super().sink_files(group, removed=removed)
            self.asked += 1
            if self.asked == 2:
                files = staged(tmp_path, rows(4))
                publication.replace(
                    client, group, sink=tmp_path, replacement_id="own", add=files, remove=[]
                )
            return listed

    with Late(home=served.home) as late:
        done = publication.convert(late, sink=tmp_path, likely=group)

    assert late.asked == 3
    assert (done.state, done.version) == ("converted", 4)
    assert numbers_in(tmp_path) == [1, 2, 3, 4]
    assert deltalake.DeltaTable(tmp_path).version() == 4


def test_other_publishers_convert_it_at_the_same_time(
    client: Client, served: Served, name: Name, tmp_path: Path
) -> None:
    barrier = threading.Barrier(4)

    def convert(group: str) -> None:
        barrier.wait()
        with Client(home=served.home) as own:
            publication.convert(own, sink=tmp_path / group, likely=group)

    def settle(group: str, number: int) -> None:
        files = staged(tmp_path / group, rows(number))
        barrier.wait()
        with Client(home=served.home) as own:
            publication.replace(
                own, group, sink=tmp_path / group, replacement_id="own", add=files, remove=[]
            )

    groups = [name("raced") for _ in range(ROUNDS)]
    with ThreadPoolExecutor(4) as pool:
        for group in groups:
            client.create_group(group)
            old_sink(client, group, tmp_path / group)
            done = [pool.submit(convert, group) for _ in range(3)]
            done.append(pool.submit(settle, group, 4))
            for each in done:
                each.result(timeout=60)

    for group in groups:
        assert numbers_in(tmp_path / group) == [1, 2, 3, 4]
        assert manifest.read(tmp_path / group).version == 4
        assert deltalake.DeltaTable(tmp_path / group).version() == 4
