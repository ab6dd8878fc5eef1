"""A home's folder: what a start needs is on disk, and a copy of an open home is found out."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.home import FORMAT, FORMAT_FILE, OPEN_FILE, CopiedHomeError
from rmq_pipeline.endpoint import FILE_NAME, Endpoint, HomeMark
from rmq_pipeline.settings import Settings

SMALL = Settings(log_file_bytes=1 << 20, reserve_bytes=0)
#: Root, without leave to read what is not its own.
AS_ANY_OWNER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]
#: DuckDB syncs its own. No start needs the others: without the log's mark of what was synced, less
#: is known of it.
NOT_NEEDED = {"state.duckdb", "state.duckdb.wal", "reserve", "synced", "clock.json"}


def opened(home: Path) -> Broker:
    return Broker.open(home, upkeep="none", settings=SMALL)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Inodes of the files and folders that were synced after they had been changed last."""
    found: set[int] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        found.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    return found


@pytest.mark.usefixtures("from_nothing")
def test_every_file_that_a_start_needs_is_synced_with_its_folder(
    tmp_path: Path, synced: set[int]
) -> None:
    home = tmp_path / "above" / "home"

    with opened(home):
        needed = [path for path in home.rglob("*") if path.is_file()]
        missing = {
            str(each.relative_to(tmp_path))
            for path in needed
            if path.name not in NOT_NEEDED
            for each in (path, path.parent)
            if each.stat().st_ino not in synced
        }

    assert missing == set()
    assert {home.parent.stat().st_ino, tmp_path.stat().st_ino} <= synced


@pytest.mark.parametrize("left", [b"", b"\0\0", b"PAR1"])
def test_a_home_whose_files_a_power_cut_emptied_opens_with_its_messages(
    home: Path, left: bytes
) -> None:
    with opened(home) as broker:
        broker.create_topic("plain", queues=1)
        broker.send("plain", pa.table({"body": [b"answered"]}))
    (home / FORMAT_FILE).write_bytes(left.strip(b"PAR1"))
    for folder in ("events", "snapshots"):
        (home / folder / ".nothing.parquet").write_bytes(left)
    (home / "log" / "synced").write_bytes(left)

    with opened(home) as broker:
        assert broker.read("plain", 0, offset=0, limit=9)["body"].to_pylist() == [b"answered"]
        assert broker.sql("SELECT count(*) AS n FROM events")["n"][0].as_py() > 0
        assert broker.sql("SELECT count(*) AS n FROM parked_at(0)")["n"].to_pylist() == [0]
    assert (home / FORMAT_FILE).read_text() == f"{FORMAT}\n"


def copied(home: Path) -> Path:
    """What cp, tar and rsync make of it."""
    copy = home.with_name("copy")
    shutil.copytree(home, copy)
    return copy


def crashed(home: Path) -> None:
    """As a process leaves it that was killed."""
    broker = opened(home)
    mark = (home / OPEN_FILE).read_bytes()
    broker.close()
    (home / OPEN_FILE).write_bytes(mark)


def test_a_copy_of_an_open_home_is_refused_and_stays_so(home: Path) -> None:
    with opened(home):
        copy = copied(home)

    for _ in range(2):
        with pytest.raises(CopiedHomeError, match=rf"{copy} is a copy of {home}.*rmq stop"):
            opened(copy)


def test_a_copy_of_an_open_home_in_its_place_is_refused(home: Path) -> None:
    with opened(home):
        copy = copied(home)
    shutil.rmtree(home)
    copy.rename(home)

    with pytest.raises(CopiedHomeError, match=OPEN_FILE):
        opened(home)


def test_a_copy_opens_once_its_owner_says_that_nobody_wrote_meanwhile(home: Path) -> None:
    crashed(home)
    copy = copied(home)
    (copy / OPEN_FILE).unlink()

    with opened(copy) as broker:
        assert broker.status()["home"] == str(copy)


def stay(home: Path) -> Path:
    return home


def move(home: Path) -> Path:
    return home.rename(home.with_name("moved"))


def give_to_another_owner(home: Path) -> Path:
    for path in home.rglob("*"):
        path.chmod(path.stat().st_mode)
    return home


@pytest.mark.parametrize("then", [stay, move, give_to_another_owner])
@pytest.mark.parametrize("leave", [crashed, lambda home: opened(home).close()])
def test_the_home_itself_opens_wherever_it_went(
    home: Path, leave: Callable[[Path], None], then: Callable[[Path], Path]
) -> None:
    leave(home)
    found = then(home)

    with opened(found) as broker:
        assert broker.status()["home"] == str(found)


def test_a_copy_of_a_closed_home_opens(home: Path) -> None:
    opened(home).close()
    assert not (home / OPEN_FILE).exists()

    opened(copied(home)).close()


def test_a_home_that_did_not_open_may_be_copied(home: Path) -> None:
    opened(home).close()
    log = next((home / "log").glob("*.log"))
    log.write_bytes(b"x" * 5000)
    with pytest.raises(Exception, match="damaged"):
        opened(home)

    assert not (home / OPEN_FILE).exists()


def test_a_copied_endpoint_leads_to_nobody(home: Path) -> None:
    with opened(home):
        mine = Endpoint(
            os.getpid(), 1, "t", "127.0.0.1:1", None, str(home), "none", "sync",
            mark=HomeMark.of(home),
        )  # fmt: skip
        mine.write()
        copy = copied(home)

        assert Endpoint.read(home) == mine
        assert json.loads((copy / FILE_NAME).read_text())["token"] == "t"
        assert Endpoint.read(copy) is None


def test_a_home_opens_under_a_folder_that_may_not_be_listed(tmp_path: Path) -> None:
    as_any_owner = AS_ANY_OWNER if os.geteuid() == 0 else []
    if as_any_owner and not shutil.which("setpriv"):
        pytest.skip("root may read everywhere, and cannot be kept from it here")
    above = tmp_path / "above"
    for home in (above / "there", above / "made"):
        above.mkdir(exist_ok=True)
        if home.name == "there":
            home.mkdir()
        above.chmod(0o311)
        opening = f"from rmq_pipeline.broker import Broker; Broker.open({str(home)!r}).close()"

        done = subprocess.run(
            [*as_any_owner, sys.executable, "-c", opening],
            check=False,
            capture_output=True,
            text=True,
        )

        above.chmod(0o755)
        assert done.returncode == 0, done.stderr
        assert (home / FORMAT_FILE).exists()
