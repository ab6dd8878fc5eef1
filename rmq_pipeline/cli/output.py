"""Output of commands: tables for people, JSON for programs, progress on stderr, files."""

import base64
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from rmq_pipeline.errors import FilterExpressionError, RequestError, RocketMQError
from rmq_pipeline.text import format_ms, text_of

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

Row = Mapping[str, Any]

#: Wider than any table, so that lines in files and pipes are never folded.
_NO_TERMINAL_WIDTH: Final = 10_000
#: Errors after which a writable file is overwritten in place: the folder is not writable, the
#: file is a mount point of its own, or the temporary file is on another disk.
_OVERWRITTEN_AFTER: Final = {errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS, errno.EXDEV}
#: Characters of the file's name in the temporary name, which is limited to 255 bytes.
_NAME_LETTERS: Final = 50


def console(*, stderr: bool = False) -> "Console":
    """Open a console on stdout or stderr; without a terminal its width is unlimited."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else _NO_TERMINAL_WIDTH,
        highlight=False,
        emoji=False,
    )


def rows_of(table: "pa.Table") -> list[dict[str, Any]]:
    """Return the rows of a table as dicts; maps become dicts, repeated column names get numbers.

    Raises:
        RequestError: a column has a value that Python cannot represent.
    """
    names = distinct(table.column_names)
    columns = [_values(name, column) for name, column in zip(names, table.columns, strict=True)]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def distinct(names: Sequence[str]) -> list[str]:
    """Make column names unique without regard to case.

    Repeated names get numbers, as in a table that DuckDB creates from a query.
    """
    numbers: dict[str, int] = {}
    found = []
    for name in names:
        unlike, key = name, name.lower()
        if key in numbers:
            while (unlike := f"{name}_{numbers[key]}").lower() in numbers:
                numbers[key] += 1
        numbers[unlike.lower()] = 1
        found.append(unlike)
    return found


def _values(name: str, column: "pa.ChunkedArray") -> list[Any]:
    import pyarrow as pa

    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError) as error:
        # For example a date after the year 9999, or infinity.
        raise RequestError(
            f"Column {name} cannot be shown: {error}.", remedy="Cast the column to text."
        ) from error
    return [_as_dict(pairs) for pairs in values] if pa.types.is_map(column.type) else values


def _as_dict(pairs: list[tuple[Any, Any]] | None) -> Any:
    """Return the pairs as a dict, or unchanged if a key is not hashable."""
    try:
        return dict(pairs or ())
    except TypeError:
        return pairs


def show_rows(
    rows: Sequence[Row],
    *,
    as_json: bool,
    empty: str,
    columns: Sequence[str] | None = None,
) -> None:
    """Print rows as a JSON list or as a table.

    Args:
        rows: the rows; all have the same columns.
        as_json: print all columns as JSON.
        empty: the text that replaces a table without rows.
        columns: the columns of the table; all columns of the first row by default.
    """
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(empty)
        return
    console().print(table_of(rows, columns))


def table_of(rows: Sequence[Row], columns: Sequence[str] | None = None) -> "Table":
    """Return rows as a table of rich; see ``show_rows``."""
    from rich.table import Table

    names = columns or list(rows[0])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        is_number = all(isinstance(row[name], int | float) for row in rows)
        right = is_number and not _is_moment(name)
        table.add_column(
            _plain(_title(name)), justify="right" if right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(_plain(_cell(name, row[name])) for name in names))
    return table


def show_fields(fields: Row, *, as_json: bool) -> None:
    """Print fields as a JSON object, or one per line."""
    if as_json:
        print_json(fields)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _flat(fields):
        table.add_row(_plain(_title(name)), _plain(_cell(name, value)))
    console().print(table)


def show_message(text: str) -> None:
    """Print a line on stdout and flush it, so that a reader of a pipe gets it at once."""
    print(text, flush=True)


def show_progress(text: str) -> None:
    """Print a line about the progress on stderr; stdout is reserved for the result."""
    print(printable(text), file=sys.stderr, flush=True)


def show_error(error: RocketMQError, *, as_json: bool) -> None:
    """Print an error on stderr: one line, or a JSON object with error, message and remedy.

    The error of a filter has more lines: it shows the position.
    """
    message = error.message
    if not isinstance(error, FilterExpressionError):
        message = " ".join(message.split())
    if message and message[-1] not in ".?!":
        message += "."
    if as_json:
        fields = {"error": type(error).__name__, "message": message, "remedy": error.remedy}
        print(json.dumps(fields, ensure_ascii=False), file=sys.stderr)
        return
    console(stderr=True).print(f"[red]{type(error).__name__}[/red]: ", end="", soft_wrap=True)
    print(printable(f"{message} {error.remedy}".strip()), file=sys.stderr)


def print_json(value: object) -> None:
    """Print a value as JSON; bytes become text, or base64 if they are not UTF-8."""
    print(json.dumps(_jsonable(value), indent=2, ensure_ascii=False))


def progress(*, unit: str) -> "Progress":
    """Create a progress bar on stderr with counts in this unit; hidden without a terminal."""
    from rich import progress as bars

    screen = console(stderr=True)
    return bars.Progress(
        # No markup: the description contains user input, such as the name of a topic.
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[done]:,} " + unit),
        bars.TimeElapsedColumn(),
        console=screen,
        disable=not screen.is_terminal,
    )


def _flat(fields: Row, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_moment(name: str) -> bool:
    return name == "at_ms" or name.endswith("_at_ms")


def _title(name: str) -> str:
    """Return the title of a column; times are shown as dates, so they lose the unit ``_ms``."""
    return name.removesuffix("_ms") if _is_moment(name) else name


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if _is_moment(name) and isinstance(value, int):
        return format_ms(value) if value > 0 else "-"
    if isinstance(value, bytes):
        return text_of(value) or f"<{len(value)} bytes>"
    if isinstance(value, list) and all(isinstance(item, str | int) for item in value):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values()):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    if isinstance(value, list | dict):
        return json.dumps(_jsonable(value), ensure_ascii=False)
    return str(_jsonable(value))


def _plain(text: str) -> "Text":
    """Return text that rich prints without interpreting markup."""
    from rich.text import Text

    return Text(printable(text))


def printable(text: str) -> str:
    """Replace control characters, so that no message can control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def body_fields(body: bytes) -> dict[str, str | None]:
    """Return a body for --json: a text, or as in a file ``body_base64`` if it is not UTF-8."""
    text = text_of(body)
    if text is not None:
        return {"body": text}
    return {"body": None, "body_base64": base64.b64encode(body).decode()}


def body_line(body: bytes) -> str:
    """Return a body as one line of text; bytes that are not UTF-8 as Python writes them."""
    text = text_of(body)
    return repr(body) if text is None else text.replace("\n", "⏎")


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, bytes):
        text = text_of(value)
        return text if text is not None else base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` when the block ends without an error.

    Other users cannot read the temporary file. The replacement keeps the mode of the old file
    and follows symbolic links. If the file cannot be replaced, it is overwritten with the
    complete content.

    Raises:
        OSError: the file cannot be written.
    """
    if path.exists() and not path.is_file():
        # A pipe or a device has no content to preserve and cannot be replaced.
        with path.open("wb") as file:
            yield file
        return
    # Replace the target of a symbolic link, not the link.
    place = path.resolve()
    descriptor, name = _part_of(place)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        _put_in_place(part, place)
    finally:
        part.unlink(missing_ok=True)


def _part_of(place: Path) -> tuple[int, str]:
    prefix = f".{place.name[:_NAME_LETTERS]}."
    try:
        return tempfile.mkstemp(prefix=prefix, dir=place.parent)
    except OSError as error:
        if error.errno not in _OVERWRITTEN_AFTER:
            raise
        return tempfile.mkstemp(prefix=prefix)


def _put_in_place(part: Path, place: Path) -> None:
    with suppress(OSError):  # some file systems have no modes
        if place.exists():
            shutil.copymode(place, part)
        else:
            part.chmod(0o666 & ~_umask())
    try:
        part.replace(place)
    except OSError as error:
        if error.errno not in _OVERWRITTEN_AFTER:
            raise
        with part.open("rb") as whole, place.open("wb") as file:
            shutil.copyfileobj(whole, file)


def _umask() -> int:
    """Return the umask; POSIX can read it only by setting it."""
    found = os.umask(0o077)
    os.umask(found)
    return found
