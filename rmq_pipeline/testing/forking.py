"""Moments of a fork, as tests give them."""

from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from rmq_pipeline.errors import RequestError
from rmq_pipeline.limits import TIME_MAX_MS

#: A moment: a datetime with a time zone, the same as ISO text, or ms since 1970.
Moment: TypeAlias = datetime | str | int

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def moment_ms(at: Moment | None) -> int | None:
    """Return a moment in ms since 1970; None for None.

    Raises:
        RequestError: it is no moment, or has no time zone.
    """
    if at is None:
        return None
    found: object = at
    if isinstance(at, str):
        try:
            found = datetime.fromisoformat(at)
        except ValueError:
            found = None
    if isinstance(found, datetime) and found.tzinfo is not None:
        return (found - _EPOCH) // timedelta(milliseconds=1)
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= TIME_MAX_MS:
        return found
    raise RequestError(
        f"{at!r} is no moment.",
        remedy='Give a datetime with a time zone, text such as "2026-03-07T02:31:00+00:00", or ms'
        " since 1970.",
    )
