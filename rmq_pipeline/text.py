"""Texts: their validity (DuckDB and the commit log accept UTF-8 only), and texts of times."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from rmq_pipeline.errors import RequestError

_TIME_END_MS: Final = 1 << 63
#: Longer texts are out of range; Python refuses to parse numbers of thousands of digits.
_MOST_DIGITS: Final = 20


def is_text(value: object) -> bool:
    """Return True if the value is a text without lone surrogates, which UTF-8 cannot encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def speakable(said: str) -> str:
    """Return the text with lone surrogates escaped; names of files may contain some."""
    return said.encode(errors="backslashreplace").decode()


def said_by(error: BaseException) -> str:
    """Return the text of an error as valid UTF-8; empty if its ``str`` raises."""
    try:
        return speakable(str(error))
    except Exception:  # noqa: BLE001 - a foreign error's str() may raise anything
        return ""


def text_of(body: bytes) -> str | None:
    """Decode UTF-8; None if the bytes are not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def format_ms(at_ms: int) -> str:
    """Format ms since 1970 as ISO 8601 in UTC; times out of range remain numbers."""
    try:
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(at_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc_ms(text: str) -> int:
    """Parse a time as ``parse_ms`` does, but in UTC if it names no zone.

    Raises:
        RequestError: the text is no time, or is out of range.
    """
    text = text.strip()
    if not text.isdecimal():
        with suppress(ValueError):
            moment = datetime.fromisoformat(text)
            text = text if moment.tzinfo else moment.replace(tzinfo=UTC).isoformat()
    return parse_ms(text)


def parse_ms(text: str) -> int:
    """Parse an ISO 8601 time, local if it names no zone, or a number of ms since 1970.

    Raises:
        RequestError: the text is neither, or is out of range of 64 bits.
    """
    if text.isdecimal():
        at_ms = int(text) if len(text) <= _MOST_DIGITS else _TIME_END_MS
        if at_ms >= _TIME_END_MS:
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
