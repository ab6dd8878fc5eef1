"""Moments as people write and read them."""

from datetime import UTC, datetime

from rmq_pipeline.errors import RequestError


def parse_ms(text: str) -> int:
    """Milliseconds since 1970 of an ISO 8601 time (local when it names no zone), or of itself.

    Raises:
        RequestError: it is neither.
    """
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(
            f"{text!r} is no time: give ISO 8601, such as 2030-01-31T09:00:00Z, or ms since 1970."
        ) from None
    return int(moment.timestamp() * 1000)


def format_ms(at_ms: int) -> str:
    """ISO 8601 in UTC, to the millisecond; the number itself when no calendar has it."""
    try:
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(at_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
