"""``rmq backup`` and ``rmq restore``, of a folder and of an object store."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from tests.broker.sealed_home import messages
from tests.cli.conftest import RMQ, Served, end, process, serve
from tests.object_store import BUCKET


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A broker with users."""
    served = serve(tmp_path_factory.mktemp("served") / "home", "--grpc", "none")
    with Client(home=served.home) as client:
        client.create_topic("orders", queues=1)
        client.create_user("root", type="super", password="root-password")
    yield served
    end(served)


def test_a_live_home_is_backed_up_and_restored(served: Served, tmp_path: Path) -> None:
    dest, again = str(tmp_path / "backup"), tmp_path / "again"
    with Client(home=served.home) as client:
        client.send("orders", messages(7))
    command = (RMQ, "backup", dest, "--home", str(served.home))

    first, second = process(*command), process(*command, "--keep", "1", "--json")
    done = process(RMQ, "restore", dest, str(again))

    assert "the snapshot is new" in first.stdout, first.stderr
    assert "The last frame is of 20" in first.stdout
    said = json.loads(second.stdout)
    assert (said["number"], said["deleted_backups"], said["is_new_snapshot"]) == (2, 1, False)
    listed = json.loads(process(RMQ, "backup", dest, "--list", "--json").stdout)
    assert [row["number"] for row in listed] == [2]
    assert done.stdout.startswith(f"{again} is as it was at 20"), done.stderr
    assert process(RMQ, "verify", "--home", str(again)).returncode == 0
    sound = process(RMQ, "backup", dest, "--check")
    assert (sound.returncode, sound.stdout[:9]) == (0, "All files"), sound.stderr
    next((tmp_path / "backup" / "objects").glob("*/*")).write_bytes(b"flipped")
    damaged = process(RMQ, "backup", dest, "--check")
    assert (damaged.returncode, "does not match its" in damaged.stdout) == (1, True)
    with Broker.open(again, upkeep="none") as broker:
        assert broker.read("orders", 0, offset=0, limit=10).num_rows == 7


def test_a_user_without_the_right_is_refused(served: Served, tmp_path: Path) -> None:
    with Client(home=served.home) as client:
        client.create_user("ann", password="ann-password")
    who = {"RMQ_USER": "ann", "RMQ_PASSWORD": "ann-password"}

    done = process(RMQ, "backup", str(tmp_path / "x"), "--home", str(served.home), **who)

    assert done.returncode == 1
    assert "cluster" in done.stderr
    assert not list((tmp_path / "x" / "manifests").iterdir())


def test_an_error_of_a_moment_names_those_that_can_be_restored(
    served: Served, tmp_path: Path
) -> None:
    process(RMQ, "backup", str(tmp_path / "b"), "--home", str(served.home))

    done = process(RMQ, "restore", str(tmp_path / "b"), str(tmp_path / "h"), "--to-time", "1000")

    assert done.returncode == 1
    assert "cannot restore 1970-01-01T00:00:01.000Z. They restore " in done.stderr
    assert not (tmp_path / "h").exists()


@pytest.mark.usefixtures("object_store")
def test_a_bucket_has_backups(served: Served, tmp_path: Path) -> None:
    dest, again = f"s3://{BUCKET}/backups/{tmp_path.name}", tmp_path / "again"
    command = (RMQ, "backup", dest, "--home", str(served.home), "--json")

    first, second = process(*command), process(*command, "--keep", "1")
    done = process(RMQ, "restore", dest, str(again), "--json")

    assert first.returncode == 0, first.stderr
    assert json.loads(second.stdout)["written_bytes"] < json.loads(first.stdout)["written_bytes"]
    assert json.loads(done.stdout)["backup"] == 2, done.stderr
    assert process(RMQ, "verify", "--home", str(again)).returncode == 0
