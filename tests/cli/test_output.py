"""Moments and errors as people read them; SQL with values in their places."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline.cli.options import seconds, to_ms
from rmq_pipeline.cli.output import (
    distinct,
    print_json,
    progress,
    replacing,
    rows_of,
    show_error,
    show_fields,
    show_rows,
)
from rmq_pipeline.errors import QueryError, RequestError
from rmq_pipeline.store.statements import literal, select
from rmq_pipeline.text import format_ms, parse_ms
from tests.cli.conftest import RMQ, Served, process

#: Root may write everywhere; without this it is a user like others.
AS_ANY_OWNER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("1767225600000", 1_767_225_600_000),
        ("2026-01-01T00:00:00Z", 1_767_225_600_000),
        ("2026-01-01T01:00:00.250+01:00", 1_767_225_600_250),
        ("2026-01-01 00:00:00+00:00", 1_767_225_600_000),
    ],
)
def test_a_moment_is_iso_or_ms(text: str, ms: int) -> None:
    assert parse_ms(text) == ms


@pytest.mark.parametrize("text", ["", "soon", "-5", "1.5", "2026-13-01"])
def test_anything_else_is_no_moment(text: str) -> None:
    with pytest.raises(RequestError, match="is not a time"):
        parse_ms(text)


@pytest.fixture
def east_of_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine's zone is an hour before UTC."""
    monkeypatch.setenv("TZ", "XXX-1")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("east_of_utc")
@pytest.mark.parametrize("text", ["0001-01-01", "9223372036854775808", "9" * 5_000])
def test_a_moment_that_no_number_has_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is out of range"):
        parse_ms(text)


def test_the_earliest_and_the_latest_moment() -> None:
    assert parse_ms("0001-01-01T00:00:00Z") == -62_135_596_800_000
    assert parse_ms("9223372036854775807") == (1 << 63) - 1


def test_a_time_in_seconds_is_a_number_that_timers_take() -> None:
    assert [to_ms(given, "--wait") for given in (0.0, 0.0015, 60.0)] == [0, 2, 60_000]
    for given in (float("nan"), float("inf"), -1.0, 1e10):
        with pytest.raises(RequestError, match="--wait is a number of seconds from 0 to 90000000"):
            seconds(given, "--wait")


def test_a_moment_is_shown_to_the_millisecond() -> None:
    assert format_ms(1_767_225_600_007) == "2026-01-01T00:00:00.007Z"
    assert format_ms(1 << 62) == str(1 << 62)
    assert parse_ms(format_ms(1_767_225_600_007)) == 1_767_225_600_007


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(QueryError("Parser Error:\n  near [b]"), as_json=False)

    assert capsys.readouterr().err == (
        "QueryError: Parser Error: near [b]. Send one SELECT over the documented views.\n"
    )


def test_numbers_of_sql_are_numbers_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([Decimal(5), Decimal("1.5"), b"\xff", (1, None)])

    assert capsys.readouterr().out.split() == [
        *("[", "5,", "1.5,", '"/w==",', "[", "1,", "null", "]", "]")
    ]


def test_values_become_literals() -> None:
    assert [literal(value) for value in ("it's", 5, None)] == ["'it''s'", "5", "NULL"]
    query = select("cli_trace", message_id="a\n' OR 1 = 1 --")
    assert "'a\n'' OR 1 = 1 --'" in query
    assert "--" not in query.replace("1 --'", "")
    assert ";" not in query


@pytest.mark.parametrize(
    "names", ["a a", "a a a_1 a", "a A", "a_1 a a", "a a_1 a A_1", "a b", "A a a_1 A_1 a"]
)
def test_columns_of_one_name_are_told_apart_as_duckdb_does(names: str) -> None:
    query = ", ".join(f'{number} AS "{name}"' for number, name in enumerate(names.split()))

    with duckdb.connect() as database:
        database.execute(f"CREATE TABLE t AS SELECT {query}")
        want = database.table("t").columns

    assert distinct(names.split()) == want


def test_no_column_hides_another_one() -> None:
    pairs = pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))
    table = pa.table([pa.array([1]), pairs, pa.array([None], pairs.type)], names=["m", "m", "m"])

    assert rows_of(table) == [{"m": 1, "m_1": {"k": "v"}, "m_2": {}}]
    assert rows_of(table.slice(1)) == []


def test_a_map_whose_keys_are_lists_stays_pairs() -> None:
    pairs = pa.array([[([1], 2)]], pa.map_(pa.list_(pa.int64()), pa.int64()))

    assert rows_of(pa.table({"m": pairs})) == [{"m": [([1], 2)]}]


def test_a_date_that_python_has_not_is_refused() -> None:
    table = pa.table({"n": [1], "d": pa.array([1 << 31 - 1], pa.date32())})

    with pytest.raises(RequestError, match="Column d cannot be shown"):
        rows_of(table)


@pytest.mark.parametrize("text", ["[/x]", "[bold]b[/bold]", "[link=x]", "\\", "[red]\\", ":smile:"])
def test_markup_is_shown_as_it_was_written(capsys: pytest.CaptureFixture[str], text: str) -> None:
    show_rows([{text: text}], as_json=False, empty="")
    show_fields({text: text}, as_json=False)

    title, cell, fields = capsys.readouterr().out.splitlines()
    assert (title.strip(), cell.strip()) == (text, text)
    assert fields.split() == [text, text]


def test_neither_titles_nor_errors_can_command_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_rows([{"\x1b[31m": 1}], as_json=False, empty="")
    show_error(RequestError("No \x1b[31m here."), as_json=False)

    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err


def test_progress_takes_any_name() -> None:
    bar = progress(unit="messages")
    bar.add_task("sending to [/x]", total=None, done=0)

    table = bar.make_tasks_table(bar.tasks)

    assert [str(cell) for cell in table.columns[0].cells] == ["sending to [/x]"]


def parts_beside(file: Path) -> list[Path]:
    return [path for path in file.parent.iterdir() if path != file]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_no_other_user_reads_a_file_while_it_is_written(tmp_path: Path, mode: int) -> None:
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
