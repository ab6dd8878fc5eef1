"""Parsing and formatting of times and durations."""

from datetime import UTC, datetime
from typing import Final

from rmq_pipeline.errors import RequestError

#: Longest duration of an option: about 285 years; timers of the system overflow beyond it.
LONGEST_S: Final = 9_000_000_000
_END_MS: Final = 1 << 63
#: Longer texts are out of range; Python refuses to parse numbers of thousands of digits.
_MOST_DIGITS: Final = 20


def parse_ms(text: str) -> int:
    """Parse an ISO 8601 time, local if it names no zone, or a number of ms since 1970.

    Raises:
        RequestError: the text is neither, or is out of range of 64 bits.
    """
    if text.isdecimal():
        at_ms = int(text) if len(text) <= _MOST_DIGITS else _END_MS
        if at_ms >= _END_MS:
            raise RequestError(f"{text[: _MOST_DIGITS + 1]!r} ms since 1970 is out of range.")
        return at_ms
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(
            f"{text!r} is not a time.",
            remedy="Give ISO 8601, such as 2030-01-31T09:00:00Z, or ms since 1970.",
        ) from None
    try:
        return int(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        # A local time in year 1 or 9999 can be in year 0 or 10000 in UTC.
        raise RequestError(
            f"{text!r} is out of range in UTC.", remedy="Give a time in the years 1 to 9999."
        ) from None


def format_ms(at_ms: int) -> str:
    """Format ms since 1970 as ISO 8601 in UTC; times out of range remain numbers."""
    try:
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(at_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(given: float, option: str) -> float:
    """Check the seconds given for an option and return them.

    Raises:
        RequestError: the value is NaN, negative, or above LONGEST_S.
    """
    if not 0 <= given <= LONGEST_S:
        raise RequestError(f"{option} is a number of seconds from 0 to {LONGEST_S}, not {given:g}.")
    return given


def to_ms(given_s: float, option: str) -> int:
    """Convert the seconds given for an option to ms; raises as ``seconds`` does."""
    return round(seconds(given_s, option) * 1000)
