"""Messages as lines of JSON, each an object with body or body_base64 and optional fields."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rmq_pipeline.errors import RequestError
from rmq_pipeline.limits import MIB
from rmq_pipeline.text import is_text

if TYPE_CHECKING:
    import pyarrow as pa

#: A batch ends at this many messages, or at this many bytes of lines.
BATCH_ROWS: Final = 1_000
BATCH_BYTES: Final = 8 * MIB


@dataclass
class Batch:
    """Messages that are sent together, with their range of lines."""

    first_line: int
    last_line: int = 0
    bytes: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def table(self) -> "pa.Table":
        """Return the messages as a table, schema.SEND."""
        return to_table(self.rows)


def to_table(rows: list[dict[str, Any]]) -> "pa.Table":
    """Build a table, schema.SEND, from messages by column; missing columns are null."""
    import pyarrow as pa

    from rmq_pipeline.schema import SEND

    return pa.Table.from_pylist(rows, schema=SEND)


def batches(lines: Iterable[bytes], defaults: Mapping[str, Any]) -> Iterator[Batch]:
    """Yield messages in batches, in the order of the lines; blank lines are skipped.

    Args:
        lines: UTF-8, one JSON object per line.
        defaults: values of the fields that a line omits, by column.

    Raises:
        RequestError: a line is not a valid message; the error has the line number and the reason.
    """
    batch = Batch(first_line=1)
    for number, line in enumerate(lines, start=1):
        batch.last_line = number
        batch.bytes += len(line)
        if line.strip():
            batch.rows.append({**defaults, **parse(line, number)})
        if len(batch.rows) >= BATCH_ROWS or batch.bytes >= BATCH_BYTES:
            yield batch
            batch = Batch(first_line=number + 1)
    if batch.bytes:
        yield batch


def parse(line: bytes, number: int) -> dict[str, Any]:
    """Parse a line; return the message by column, with the body as bytes.

    Raises:
        RequestError: the line is not a valid message; the error has its number and the reason.
    """
    try:
        fields = json.loads(line)
    except RecursionError:
        raise RequestError(f"Line {number} is nested too deeply for a message.") from None
    except ValueError as error:
        raise RequestError(f"Line {number} is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestError(f"Line {number} is not a JSON object.")
    for name, value in fields.items():
        if name not in _FIELDS:
            raise RequestError(
                f"Line {number} has a field {name!r}; a message has {', '.join(_FIELDS)}."
            )
        check(name, value, where=f"Line {number}: ")
    fields["body"] = _body(fields, number)
    fields.pop("body_base64", None)
    return {name: value for name, value in fields.items() if value is not None}


def check_all(fields: Mapping[str, object]) -> None:
    """Check the values of several fields; raises as ``check`` does."""
    for name, value in fields.items():
        check(name, value)


def check(name: str, value: object, *, where: str = "") -> None:
    """Check that a field of a message may have this value; None passes.

    Args:
        name: the field.
        value: as parsed from JSON.
        where: the start of the error message.

    Raises:
        RequestError: the value has the wrong type, or is not valid UTF-8.
    """
    if value is None:
        return
    what, fits = _FIELDS[name]
    if not fits(value):
        raise RequestError(f"{where}{name} is {what}, not {json.dumps(value)}.")
    # JSON can escape lone surrogates. A body, being bytes, may have them; texts may not.
    if name != "body" and not all(map(is_text, _texts(value))):
        raise RequestError(f"{where}{name} cannot be written in UTF-8: {json.dumps(value)}.")


def _texts(value: object) -> Iterable[str]:
    """Return the strings in a value of the right type."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list) else ()


def _body(fields: Mapping[str, Any], number: int) -> bytes:
    text, encoded = fields.get("body"), fields.get("body_base64")
    if (text is None) == (encoded is None):
        raise RequestError(f"Line {number} needs either body or body_base64.")
    if text is not None:
        return bytes(text, "utf-8", "surrogatepass")
    try:
        return base64.b64decode(str(encoded), validate=True)
    except ValueError as error:
        raise RequestError(f"Line {number}: body_base64 is not base64: {error}.") from None


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31


def _is_ms(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_string_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


_FIELDS: Final[Mapping[str, tuple[str, Callable[[object], bool]]]] = {
    "body": ("text", _is_string),
    "body_base64": ("text", _is_string),
    "tag": ("text", _is_string),
    "keys": ("a list of texts", _are_strings),
    "message_group": ("text", _is_string),
    "lite_topic": ("text", _is_string),
    "delay_level": ("a whole number of 32 bits", _is_whole),
    "deliver_at_ms": ("ms since 1970, a whole number of 64 bits", _is_ms),
    "priority": ("a whole number of 32 bits", _is_whole),
    "queue_id": ("a whole number of 32 bits", _is_whole),
    "born_at_ms": ("ms since 1970, a whole number of 64 bits", _is_ms),
    "properties": ("an object of texts", _is_string_map),
}

#: Fields that a line may omit.
OPTIONAL: Final = tuple(name for name in _FIELDS if not name.startswith("body"))
