"""Moments and durations as people write and read them."""

from datetime import UTC, datetime
from typing import Final

from rmq_pipeline.errors import RequestError

#: No option takes a longer time: about 285 years, beyond which timers of the system overflow.
LONGEST_S: Final = 9_000_000_000
_END_MS: Final = 1 << 63
#: Python reads no number of any length.
_MOST_DIGITS: Final = 20


def parse_ms(text: str) -> int:
    """Milliseconds since 1970 of an ISO 8601 time (local when it names no zone), or of itself.

    Raises:
        RequestError: it is neither, or no number of 64 bits has it.
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
            f"{text!r} is no time: give ISO 8601, such as 2030-01-31T09:00:00Z, or ms since 1970."
        ) from None
    try:
        return int(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        # The local time of the first year or the last may be in another one in UTC.
        raise RequestError(f"{text!r} is out of range: no calendar has it in UTC.") from None


def format_ms(at_ms: int) -> str:
    """ISO 8601 in UTC, to the millisecond; the number itself when no calendar has it."""
    try:
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(at_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(given: float, option: str) -> float:
    """The seconds that an option was given.

    Raises:
        RequestError: they are no number, below 0, or above LONGEST_S.
    """
    if not 0 <= given <= LONGEST_S:
        raise RequestError(f"{option} is a number of seconds from 0 to {LONGEST_S}, not {given:g}.")
    return given


def to_ms(given_s: float, option: str) -> int:
    """The seconds that an option was given, in ms; raises as ``seconds`` does."""
    return round(seconds(given_s, option) * 1000)
