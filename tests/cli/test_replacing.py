"""A file that is written over only once what replaces it is complete."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmq_pipeline.cli.replacing import replacing
from tests.cli.conftest import RMQ, Served, process

#: Root may write everywhere; without this it is a user like others.
AS_ANY_OWNER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]


def parts_beside(file: Path) -> list[Path]:
    return [path for path in file.parent.iterdir() if path != file]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_nobody_else_reads_a_file_while_it_is_written(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("before")
    file.chmod(mode)

    with replacing(file) as opened:
        opened.write(b"after")
        (part,) = parts_beside(file)
        assert part.name.startswith(".secret.csv.")
        assert part.stat().st_mode & 0o777 == 0o600
        assert file.read_text() == "before"

    assert (file.read_text(), file.stat().st_mode & 0o777) == ("after", mode)
    assert parts_beside(file) == []


def test_a_new_file_has_the_mode_of_new_files(tmp_path: Path) -> None:
    with replacing(tmp_path / "answer.csv") as file:
        file.write(b"1")
    (tmp_path / "other").write_text("2")

    assert (tmp_path / "answer.csv").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_two_who_write_one_file_do_not_share_a_part(tmp_path: Path) -> None:
    file = tmp_path / "answer.csv"

    with replacing(file) as first:
        first.write(b"first, which is longer")
        with replacing(file) as second:
            second.write(b"second")
        assert file.read_text() == "second"

    assert file.read_text() == "first, which is longer"


def test_a_name_may_be_as_long_as_names_are(tmp_path: Path) -> None:
    file = tmp_path / ("é" * 127)

    with replacing(file) as opened:
        opened.write(b"1")

    assert file.read_text() == "1"


def test_a_file_is_written_over_in_a_folder_that_takes_no_other(
    served: Served, tmp_path: Path
) -> None:
    as_any_owner = AS_ANY_OWNER if os.geteuid() == 0 else []
    if as_any_owner and not shutil.which("setpriv"):
        pytest.skip("root may write everywhere, and cannot be kept from it here")
    folder = tmp_path / "theirs"
    folder.mkdir()
    file = folder / "mine.csv"
    file.write_text("a much longer answer of before")
    folder.chmod(0o555)
    command = [*as_any_owner, RMQ, "sql", "--home", str(served.home), "--format", "csv"]

    wrong = process(*command, "SELECT INTERVAL 1 DAY", "-o", str(file))
    unlike = process(*command, "SELECT 1 AS n", "-o", str(folder / "new.csv"))
    kept = file.read_text()
    told = process(*command, "SELECT 1 AS n", "-o", str(file))

    folder.chmod(0o755)
    assert (wrong.returncode, kept) == (1, "a much longer answer of before")
    assert "Permission denied" in unlike.stderr
    assert told.returncode == 0, told.stderr
    assert file.read_text() == '"n"\n1\n'
    assert parts_beside(file) == []


@contextmanager
def mounted(what: Path, where: Path) -> Iterator[None]:
    command = ["mount", "--bind", str(what), str(where)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file can be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_file_that_is_mounted_is_written_over(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside.csv", tmp_path / "inside.csv"
    for file in (outside, inside):
        file.write_text("a much longer answer of before")

    with mounted(outside, inside):
        with replacing(inside) as opened:
            opened.write(b"after")
        left = sorted(path.name for path in tmp_path.iterdir())

    assert outside.read_text() == "after"
    assert left == ["inside.csv", "outside.csv"]
