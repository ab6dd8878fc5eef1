"""Parsing of string columns as numbers or booleans, a whole column at a time.

A string that does not parse raises no error: its value is null and its row is marked as failed.
"""

from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

#: Numbers in SQL literal syntax, with an optional sign.
_WHOLE: Final = r"\A[+-]?[0-9]+\z"
_DECIMAL: Final = r"\A[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\z"
#: Every number of this many digits fits into 64 bits. The limits below have no sign.
_SAFE_DIGITS: Final = 18
_HIGHEST: Final = "9223372036854775807"
_LOWEST: Final = "9223372036854775808"


class Parsed(NamedTuple):
    """Values of a string column."""

    #: Null where the string is missing or does not parse.
    values: pa.Array
    #: True where a string did not parse; without nulls. None if all strings parsed.
    failed: pa.BooleanArray | None


def wholes(texts: pa.StringArray) -> Parsed:
    """Parse strings as signed 64-bit integers; a number beyond 64 bits fails."""
    good = pc.match_substring_regex(texts, _WHOLE)
    readable = _only(texts, good)
    try:
        return Parsed(pc.cast(readable, pa.int64()), _failed(good))
    except pa.ArrowInvalid:  # a plus sign, or more than 64 bits
        negative = pc.starts_with(readable, "-")
        digits = pc.ascii_ltrim(pc.ascii_ltrim(readable, "+-"), "0")
        digits = pc.if_else(pc.equal(pc.binary_length(digits), 0), "0", digits)
        limit = pc.if_else(negative, _LOWEST, _HIGHEST)
        length = pc.binary_length(digits)
        fits = pc.or_(
            pc.less_equal(length, _SAFE_DIGITS),
            pc.and_(pc.equal(length, len(_HIGHEST)), pc.less_equal(digits, limit)),
        )
        good = pc.and_(good, pc.fill_null(fits, False))
        signed = pc.if_else(negative, pc.binary_join_element_wise("-", digits, ""), digits)
        return Parsed(pc.cast(_only(signed, good), pa.int64()), _failed(good))


def decimals(texts: pa.StringArray) -> Parsed:
    """Parse strings as doubles; a number beyond their range becomes an infinity."""
    good = pc.match_substring_regex(texts, _DECIMAL)
    return Parsed(pc.cast(_only(texts, good), pa.float64()), _failed(good))


def booleans(texts: pa.StringArray) -> Parsed:
    """Parse "true" and "false" in any letter case."""
    lowered = pc.ascii_lower(texts)
    truths = pc.equal(lowered, "true")
    good = pc.or_(truths, pc.equal(lowered, "false"))
    return Parsed(_only(truths, good), _failed(good))


def _only(values: pa.Array, good: pa.BooleanArray) -> pa.Array:
    """Replace values with null where ``good`` is false or null."""
    if not good.null_count and good.true_count == len(good):
        return values
    return pc.if_else(good, values, pa.scalar(None, values.type))


def _failed(good: pa.BooleanArray) -> pa.BooleanArray | None:
    if good.true_count + good.null_count == len(good):
        return None
    return pc.invert(pc.fill_null(good, True))
