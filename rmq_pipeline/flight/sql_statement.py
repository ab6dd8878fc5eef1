"""A statement of Flight SQL: its parameters, and the text with their values.

The verb ``sql`` takes text. So values become literals, in place of the parameters; the rest of the
text remains as it is. The verb then checks and limits the whole as any other query. The handle of
a prepared statement contains its text, so the broker remembers no statement. The handle is signed:
it is valid for its user, until it expires or the broker stops.
"""

import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.errors import ForbiddenError, QueryError, RequestError
from rmq_pipeline.store.statements import literal

#: Parameters of one statement.
_PARAMETERS: Final = 1_000
_SEAL_BYTES: Final = 32
_ID_BYTES: Final = 16
_TIME_BYTES: Final = 8
#: The lexical rules of DuckDB, as far as they tell parameters from the rest. A doubled quote ends a
#: text and begins the next one, which makes no difference here. A comment may contain comments, so
#: only its beginning is here. ``open`` is a text that does not end.
_TOKEN: Final = re.compile(
    r"""
      (?P<space>\s+|--[^\r\n]*)
    | (?P<comment>/\*)
    | (?P<quoted>[eE]'(?:[^'\\]|\\.|'')*+' | '[^']*' | "[^"]*"
        | \$(?P<tag>[^\W\d]\w*)?\$ (?s:.*?) \$(?(tag)(?P=tag))\$)
    | (?P<open>[eE]?' | " | \$(?:[^\W\d]\w*)?\$)
    | (?P<parameter>\? | \$(?:[0-9]+|[^\W\d]\w*))
    | (?P<end>;)
    | (?P<other>[^\W\d][\w$]* | \d+ | .)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT: Final = re.compile(r"/\*|\*/")
_PARAMETER_DIGITS: Final = 4
#: Maximum characters of a type in an error text.
_SHOWN: Final = 200
#: DuckDB's types for values that are written as text. They have microseconds.
_AS_TEXT: Final = (
    (pa.types.is_timestamp, "TIMESTAMP"),
    (pa.types.is_date, "DATE"),
    (pa.types.is_time, "TIME"),
)
#: Types whose values have literals. A value of another type may be large, and take few bytes on
#: the wire: it is refused before it is made.
_BINDABLE: Final = (
    *(pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating),
    *(pa.types.is_decimal, pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
    *(pa.types.is_fixed_size_binary, pa.types.is_timestamp, pa.types.is_date, pa.types.is_time),
)
#: Digits of the longest decimal of Arrow.
_DECIMAL_DIGITS: Final = 76


class _Place(NamedTuple):
    """A parameter in the text: [start, end), and its name or number."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class Statement:
    """The text of one statement, without the semicolon, and the places of its parameters."""

    text: str
    places: tuple[_Place, ...]

    @classmethod
    def parse(cls, sql: str) -> "Statement":
        """Find the parameters of a statement: ``?``, ``$1`` and ``$name``.

        Raises:
            QueryError: the text is empty or too long, does not parse, or has too many parameters.
        """
        if len(sql) > limits.FLIGHT_SQL_CHARACTERS:
            raise QueryError(
                f"The statement has {len(sql)} characters; the limit is"
                f" {limits.FLIGHT_SQL_CHARACTERS}."
            )
        if "\0" in sql:
            raise QueryError("The statement contains the character NUL.")
        start, stop, found = _read(sql)
        if start == stop:
            raise QueryError("The statement is empty.", remedy="Send one SELECT.")
        if len(found) > _PARAMETERS:
            raise QueryError(
                f"The statement has {len(found)} parameters; the limit is {_PARAMETERS}."
            )
        if len({place.name.isdecimal() for place in found}) > 1:
            raise QueryError("The statement mixes parameters with and without names.")
        places = tuple(_Place(at - start, end - start, name) for at, end, name in found)
        return cls(sql[start:stop], places)

    @property
    def parameters(self) -> list[str]:
        """Names or numbers of the parameters, in the order of their values."""
        names = list(dict.fromkeys(place.name for place in self.places))
        if names and names[0].isdecimal():
            return [str(1 + n) for n in range(min(_PARAMETERS, max(map(int, names))))]
        return names

    def check_bound(self) -> str:
        """Return the text.

        Raises:
            QueryError: the statement has parameters, which have no values.
        """
        if self.places:
            raise QueryError(
                f"The statement has {len(self.parameters)} parameters without values.",
                remedy="Prepare it and bind values; the client must use the handle that the"
                " broker returns for them, as Arrow's clients do from version 17 on.",
            )
        return self.text

    def without_values(self) -> str:
        """Return the text with NULL for all parameters, to learn its columns."""
        return self._filled(dict.fromkeys(self.parameters, "NULL"))

    def bind(self, values: pa.Table) -> str:
        """Return the text with the values of a table of one row.

        Raises:
            QueryError: the table has another number of rows or columns than are needed, or a value
                has no literal.
        """
        names = self.parameters
        if values.num_rows != 1:
            raise QueryError(
                f"{values.num_rows} rows of parameters are bound; a query takes one.",
                remedy="Execute the query once for each row. For a list of values, bind one text"
                " and split it in the query: WHERE topic IN (SELECT unnest(string_split(?, ','))).",
            )
        if values.num_columns != len(names):
            raise QueryError(
                f"The statement has {len(names)} parameters, and {values.num_columns} values are"
                " bound."
            )
        given = values.column_names
        is_named = bool(names) and not names[0].isdecimal() and set(given) == set(names)
        by_name = dict(zip(given if is_named else names, values.columns, strict=True))
        return self._filled({name: _literal(column) for name, column in by_name.items()})

    def _filled(self, literals: Mapping[str, str]) -> str:
        # Checked first: a long value may have many places.
        size = len(self.text) + sum(
            len(literals[name]) + 2 - (end - start) for start, end, name in self.places
        )
        if size > limits.FLIGHT_SQL_CHARACTERS:
            raise QueryError(
                f"The statement and its values have {size} characters; the limit is"
                f" {limits.FLIGHT_SQL_CHARACTERS}."
            )
        pieces, at = [], 0
        for place in self.places:
            # The brackets keep a minus from joining another one to a comment.
            pieces += [self.text[at : place.start], f" {literals[place.name]} "]
            at = place.end
        return "".join([*pieces, self.text[at:]])


def _read(sql: str) -> tuple[int, int, list[_Place]]:
    """Return where the statement begins and ends, and its parameters in the order of the text.

    Spaces, comments and semicolons around the statement do not belong to it.
    """
    start = stop = at = number = 0
    found: list[_Place] = []
    while at < len(sql):
        token = _TOKEN.match(sql, at)
        assert token is not None
        begin, at = token.span()
        if token.lastgroup == "comment":
            at = _after_comment(sql, at)
        if token.lastgroup in {"space", "comment"} or (token.lastgroup == "end" and not stop):
            continue
        if token.lastgroup == "open":
            raise QueryError("The statement has a text without an end.")
        if token.lastgroup == "parameter":
            number += 1
            name = token.group()[1:]
            if name[:1].isdecimal():
                name = _number(name)
            found.append(_Place(begin, at, name or str(number)))
        if token.lastgroup != "end":
            start, stop = start if stop else begin, at
    return start, stop, found


def _after_comment(sql: str, at: int) -> int:
    """Return the end of a comment, in which there may be others."""
    depth = 1
    for mark in _COMMENT.finditer(sql, at):
        depth += 1 if mark.group() == "/*" else -1
        if not depth:
            return mark.end()
    raise QueryError("The statement has a comment without an end.")


def _number(name: str) -> str:
    digits = name.lstrip("0")
    if not digits or len(digits) > _PARAMETER_DIGITS or int(digits) > _PARAMETERS:
        raise QueryError(f"There is no parameter ${name[:20]}: the numbers are 1 to {_PARAMETERS}.")
    return digits


def _literal(column: pa.ChunkedArray) -> str:
    """Return the only value of a column as a literal of DuckDB's SQL.

    Raises:
        QueryError: values of this type have no literal.
    """
    of_type = column.type
    plain = of_type.value_type if pa.types.is_dictionary(of_type) else of_type
    if not any(is_type(plain) for is_type in _BINDABLE):
        raise _unbindable(of_type)
    if pa.types.is_decimal(plain) and abs(plain.scale) > _DECIMAL_DIGITS:
        raise _unbindable(of_type)
    try:
        for is_type, name in _AS_TEXT:
            if is_type(plain) and column[0].is_valid:
                text = _microseconds(column.cast(plain)).cast(pa.string())[0].as_py()
                zoned = "TZ" if getattr(plain, "tz", None) else ""
                return f"{name}{zoned} {literal(text)}"
        value = column[0].as_py()
    except (pa.ArrowException, ValueError, ArithmeticError) as error:
        raise QueryError(f"A value of type {of_type} cannot be bound: {error}.") from error
    return _plain_literal(value, of_type)


def _microseconds(times: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert ns to us; an error if digits would be lost."""
    of_type = times.type
    if getattr(of_type, "unit", "") != "ns":
        return times
    is_time = pa.types.is_time(of_type)
    return times.cast(pa.time64("us") if is_time else pa.timestamp("us", of_type.tz))


def _plain_literal(value: Any, of_type: pa.DataType) -> str:
    if isinstance(value, str | bytes) and len(value) > limits.FLIGHT_SQL_CHARACTERS:
        # Before quotes are doubled, or bytes are written as text.
        raise QueryError(
            f"A value has {len(value)} characters; the limit is {limits.FLIGHT_SQL_CHARACTERS}."
        )
    match value:
        case None | str():
            if value and "\0" in value:
                raise QueryError("A text that is bound contains the character NUL.")
            return literal(value)
        case bool():
            return str(value).lower()
        case int():
            return f"({value})"
        case float():
            # With an exponent DuckDB reads a DOUBLE, otherwise a DECIMAL.
            text = repr(value)
            if not text.lstrip("-")[0].isdigit():
                return f"'{text}'::DOUBLE"
            return f"({text if 'e' in text else text + 'e0'})"
        case Decimal():
            return f"({value:f})"
        case bytes():
            return "'" + "".join(f"\\x{byte:02X}" for byte in value) + "'::BLOB"
    raise _unbindable(of_type)


def _unbindable(of_type: pa.DataType) -> QueryError:
    return QueryError(
        f"A value of type {str(of_type)[:_SHOWN]} cannot be bound.",
        remedy="Bind numbers, texts, times, bytes or booleans.",
    )


# ------------------------------------------------------------------------------------- handles


class Opened(NamedTuple):
    """A handle that was opened."""

    #: Identifies the handle.
    id: bytes
    text: str


class Handles:
    """Signs statements for the caller, and opens them again.

    Args:
        now_s: a monotonic clock. Handles end with the process, which has its own key.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._key = secrets.token_bytes(_SEAL_BYTES)
        self._now_s = now_s

    def seal(self, kind: str, text: str, *, caller: str) -> bytes:
        """Return a handle for a statement.

        Args:
            kind: what the handle is for; a handle of another kind is refused.
            text: the statement.
            caller: the only user that may use it.
        """
        until_ms = int(self._now_s() * 1000) + limits.FLIGHT_SQL_HANDLE_MS
        rest = b"".join(
            (
                secrets.token_bytes(_ID_BYTES),
                until_ms.to_bytes(_TIME_BYTES, "big"),
                len(caller.encode()).to_bytes(_TIME_BYTES, "big"),
                caller.encode(),
                text.encode(),
            )
        )
        return self._sign(kind, rest) + rest

    def open(self, kind: str, handle: bytes, *, caller: str) -> Opened:
        """Return the statement of a handle.

        Raises:
            RequestError: the handle is not one of this kind and this start of the broker, or it has
                expired.
            ForbiddenError: it belongs to another user.
        """
        seal, rest = handle[:_SEAL_BYTES], handle[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._sign(kind, rest)):
            raise RequestError(
                f"This is not a {kind} of the running broker.",
                remedy="Ask again with the statement: a restart of the broker ends all tickets"
                " and prepared statements.",
            )
        until_at = _ID_BYTES
        name_at = until_at + 2 * _TIME_BYTES
        until_ms = int.from_bytes(rest[until_at : until_at + _TIME_BYTES], "big")
        text_at = name_at + int.from_bytes(rest[until_at + _TIME_BYTES : name_at], "big")
        if rest[name_at:text_at].decode() != caller:
            raise ForbiddenError(
                f"The {kind} belongs to another user.", remedy="Ask for one as this user."
            )
        if until_ms <= self._now_s() * 1000:
            raise RequestError(f"The {kind} has expired.", remedy="Ask again with the statement.")
        return Opened(rest[:_ID_BYTES], rest[text_at:].decode())

    def _sign(self, kind: str, rest: bytes) -> bytes:
        return hmac.digest(self._key, kind.encode() + b"\0" + rest, "sha256")
