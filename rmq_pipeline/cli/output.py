"""What commands print: rich tables for people, JSON for programs, progress on stderr."""

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from rmq_pipeline.cli.moments import format_ms
from rmq_pipeline.errors import FilterExpressionError, RequestError, RocketMQError

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

Row = Mapping[str, Any]

#: Wider than any table, so that a line in a file or pipe is never folded.
_NO_TERMINAL_WIDTH: Final = 10_000


def console(*, stderr: bool = False) -> "Console":
    """The terminal; as wide as need be when it is none."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else _NO_TERMINAL_WIDTH,
        highlight=False,
        emoji=False,
    )


def rows_of(table: "pa.Table") -> list[dict[str, Any]]:
    """The rows of a table; a map is a dict, and no column hides another one of its name.

    Raises:
        RequestError: a column has a value that Python has no form of.
    """
    names = distinct(table.column_names)
    columns = [_values(name, column) for name, column in zip(names, table.columns, strict=True)]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def distinct(names: Sequence[str]) -> list[str]:
    """Names of columns that differ, also without regard to case.

    Those that are there twice get numbers, as in a table that DuckDB makes of a query.
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
        # A date after the year 9999, say, or infinity.
        raise RequestError(f"Column {name} cannot be shown: {error}; cast it to text.") from error
    return [_as_dict(pairs) for pairs in values] if pa.types.is_map(column.type) else values


def _as_dict(pairs: list[tuple[Any, Any]] | None) -> Any:
    """The pairs themselves where a key is a list, which no dict takes."""
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
    """Print a listing: a JSON list, or a table of these columns (all those of the first row)."""
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(empty)
        return
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
    console().print(table)


def show_fields(fields: Row, *, as_json: bool) -> None:
    """Print one thing: a JSON object, or a line for each of its fields."""
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
    """Print a line that says what was done; at once, also where stdout is a pipe."""
    print(text, flush=True)


def show_progress(text: str) -> None:
    """Print, to stderr, a line that says what takes so long; the answer on stdout is another."""
    print(_printable(text), file=sys.stderr, flush=True)


def show_error(error: RocketMQError, *, as_json: bool) -> None:
    """Print a refusal to stderr: one line, or a JSON object with error, message and remedy.

    Only a filter takes more lines: it is shown with the place that is wrong.
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
    print(_printable(f"{message} {error.remedy}".strip()), file=sys.stderr)


def print_json(value: object) -> None:
    """Print a value as JSON; bytes are text, or base64 where they are none."""
    print(json.dumps(_jsonable(value), indent=2, ensure_ascii=False))


def progress(*, unit: str) -> "Progress":
    """A bar on stderr for long work, with counts in this unit; nothing where it is no terminal."""
    from rich import progress as bars

    screen = console(stderr=True)
    return bars.Progress(
        # No markup: it may have the name of a topic, as it was typed.
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
    """A moment is shown as a date, so its title has no unit."""
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
    """Text that rich shows as it is: what looks like markup is none."""
    from rich.text import Text

    return Text(_printable(text))


def _printable(text: str) -> str:
    """No message may write to the terminal what is no text."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def text_of(body: bytes) -> str | None:
    """The text that these bytes are in UTF-8; None when they are none."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


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
