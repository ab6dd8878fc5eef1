"""Consumer groups: names, order, retries, and what happens on a final failure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, NotRequired, Self, TypedDict, get_args

from rmq_pipeline import limits
from rmq_pipeline.errors import IllegalConsumerGroupError, RequestError

Order = Literal["none", "message_group", "queue"]
OnFailure = Literal["dead_letter", "park", "dead_letter_group"]

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_ALLOWED: Final = f"Use 1 to {limits.GROUP_NAME_LENGTH} of the characters A-Z a-z 0-9 _ - % |."


class GroupMembers(TypedDict):
    """The members of a group, as a heartbeat returns them."""

    #: Changes with the members, their topics, and offsets that somebody resets.
    version: int
    #: By client_id: {"topics": [...]}.
    members: dict[str, dict[str, list[str]]]
    #: By topic and queue_id: number of offset resets.
    resets: dict[str, dict[int, int]]
    #: (topic, queue_id, queue_offset) of messages that may have ended members' processes.
    suspects: NotRequired[list[tuple[str, int, int]]]
    #: By topic: the filters that its members receive with, where they are several.
    mixed_filters: NotRequired[dict[str, list[str]]]


@dataclass(frozen=True, slots=True)
class Exponential:
    """A backoff that grows by a factor with every failure, up to a maximum."""

    initial_ms: int = limits.BACKOFF_INITIAL_MS
    max_ms: int = limits.BACKOFF_MAX_MS
    multiplier: float = limits.BACKOFF_MULTIPLIER

    def delay_ms(self, failures: int) -> int:
        """Return the delay after this many failures, at least one."""
        growths = min(failures - 1, limits.BACKOFF_GROWTHS)
        return int(min(self.max_ms, self.initial_ms * self.multiplier**growths))


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group; its ``group_id`` is never reused."""

    name: str
    group_id: int
    order: Order
    #: Maximum deliveries of one message, including the first.
    max_attempts: int
    #: Delay after the first, second, … failure; the last one repeats. Unused with ``backoff``.
    backoff_ms: tuple[int, ...]
    on_failure: OnFailure
    created_at_ms: int
    dead_letter_topic_id: int
    #: Exponential delays; None: those of backoff_ms.
    backoff: Exponential | None = None
    #: Deliveries per second over all topics; None: no limit.
    max_rate_per_s: float | None = None
    #: Time for which the group remembers the idempotency keys of its effects.
    idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS

    def to_json(self) -> str:
        """Return the JSON for the commit log and the tables."""
        return json.dumps(asdict(self))

    def describe(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {
            **asdict(self),
            "backoff_ms": list(self.backoff_ms),
            "backoff": "customized" if self.backoff is None else asdict(self.backoff),
        }

    def backoff_text(self) -> str:
        """Return the backoff as one text: customized, or JSON."""
        return "customized" if self.backoff is None else json.dumps(asdict(self.backoff))

    def delay_ms(self, failures: int) -> int:
        """Return the delay before redelivery after this many failures, at least one."""
        return delay_ms(failures, backoff_ms=self.backoff_ms, backoff=self.backoff)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the group from the result of ``to_json``."""
        found = json.loads(text)
        found["backoff_ms"] = tuple(found["backoff_ms"])
        if found.get("backoff") is not None:
            found["backoff"] = Exponential(**found["backoff"])
        return cls(**found)

    def altered(self, **changes: Any) -> "Group":
        """Return a copy with changed settings; None leaves a setting unchanged."""
        kept = {name: value for name, value in changes.items() if value is not None}
        if "backoff_ms" in kept:
            kept["backoff_ms"] = tuple(kept["backoff_ms"])
            kept.setdefault("backoff", "customized")
        if "backoff" in kept:
            kept["backoff"] = checked_backoff(kept["backoff"])
        if "idempotency_window_ms" in kept:
            checked_idempotency_window(kept["idempotency_window_ms"])
        if "max_rate_per_s" in kept:
            kept["max_rate_per_s"] = checked_rate(kept["max_rate_per_s"])
        changed = replace(self, **kept)
        check_settings(
            order=changed.order,
            max_attempts=changed.max_attempts,
            backoff_ms=changed.backoff_ms,
            on_failure=changed.on_failure,
        )
        return changed


def delay_ms(
    failures: int, *, backoff_ms: Sequence[int], backoff: Exponential | None = None
) -> int:
    """Return the delay of a backoff after this many failures, at least one."""
    if backoff is not None:
        return backoff.delay_ms(failures)
    return backoff_ms[min(failures, len(backoff_ms)) - 1]


def check_name(name: Any) -> None:
    """Refuse an invalid name.

    Raises:
        IllegalConsumerGroupError: wrong length or characters, or reserved for the system.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise IllegalConsumerGroupError(
            f"Group name {name!r} has characters that are not allowed.", remedy=_ALLOWED
        )
    if len(name) > limits.GROUP_NAME_LENGTH:
        raise IllegalConsumerGroupError(
            f"Group name of {len(name)} characters is too long.", remedy=_ALLOWED
        )
    if name.startswith("CID_RMQ_SYS_"):
        raise IllegalConsumerGroupError(
            f"Group name {name} is reserved for the system.", remedy="Choose another name."
        )


def check_settings(
    *, order: str, max_attempts: Any, backoff_ms: tuple[Any, ...], on_failure: str
) -> None:
    """Refuse settings out of range.

    Raises:
        RequestError: names the setting and the allowed values.
    """
    if order not in get_args(Order):
        raise RequestError(f"Order {order!r} is not one of {', '.join(get_args(Order))}.")
    if on_failure not in get_args(OnFailure):
        raise RequestError(
            f"on_failure {on_failure!r} is not one of {', '.join(get_args(OnFailure))}."
        )
    if order == "queue" and on_failure == "dead_letter_group":
        raise RequestError(
            "on_failure dead_letter_group needs message groups, which a group of order queue does"
            " not use.",
            remedy="Use dead_letter or park, or order message_group.",
        )
    whole = isinstance(max_attempts, int) and not isinstance(max_attempts, bool)
    if not whole or not 1 <= max_attempts <= limits.MAX_ATTEMPTS:
        raise RequestError(
            f"max_attempts must be 1 to {limits.MAX_ATTEMPTS}, not {max_attempts!r}."
        )
    if not backoff_ms or any(
        not isinstance(ms, int) or not 0 <= ms <= limits.DELAY_MAX_MS for ms in backoff_ms
    ):
        raise RequestError("backoff_ms needs one or more delays of 0 ms to one year.")


def checked_backoff(backoff: Any) -> Exponential | None:
    """Return a backoff policy from customized, exponential, or the fields of an Exponential.

    Raises:
        RequestError: it is none of these, or a number is out of range.
    """
    if backoff in (None, "customized"):
        return None
    if backoff == "exponential":
        return Exponential()
    known = {field.name for field in fields(Exponential)}
    if not isinstance(backoff, Mapping) or not set(backoff) <= known:
        raise RequestError(
            f"backoff is customized, exponential, or {', '.join(sorted(known))}, not {backoff!r}."
        )
    made = Exponential(**backoff)
    bounds: tuple[Any, ...] = (made.initial_ms, made.max_ms)
    for ms in bounds:
        if not isinstance(ms, int) or isinstance(ms, bool) or not 0 <= ms <= limits.DELAY_MAX_MS:
            raise RequestError(f"A backoff must be 0 ms to one year, not {ms!r}.")
    growth: Any = made.multiplier
    if not isinstance(growth, int | float) or isinstance(growth, bool) or not 1 <= growth <= 100:
        raise RequestError(f"The multiplier of a backoff must be 1 to 100, not {growth!r}.")
    return made


def checked_rate(max_rate_per_s: Any) -> float | None:
    """Return a limit of deliveries per second; None for None and 0, which mean no limit.

    Raises:
        RequestError: it is negative or not a number, or out of range.
    """
    if max_rate_per_s is None:
        return None
    number = isinstance(max_rate_per_s, int | float) and not isinstance(max_rate_per_s, bool)
    if not number or not 0 <= max_rate_per_s <= limits.MAX_RATE_PER_S:
        raise RequestError(
            f"max_rate_per_s is a number above 0 and up to {limits.MAX_RATE_PER_S}, or 0 for no"
            f" limit, not {max_rate_per_s!r}."
        )
    if 0 < max_rate_per_s < limits.MIN_RATE_PER_S:
        raise RequestError(
            f"max_rate_per_s is at least {limits.MIN_RATE_PER_S}, not {max_rate_per_s!r}."
        )
    return float(max_rate_per_s) or None


def checked_idempotency_window(window_ms: Any) -> int:
    """Return the time for which idempotency keys are remembered, in ms.

    Raises:
        RequestError: it is not a whole number from 1 ms to 366 days.
    """
    whole = isinstance(window_ms, int) and not isinstance(window_ms, bool)
    if not whole or not 1 <= window_ms <= limits.IDEMPOTENCY_WINDOW_MAX_MS:
        raise RequestError(
            f"idempotency_window_ms is 1 to {limits.IDEMPOTENCY_WINDOW_MAX_MS}, not {window_ms!r}."
        )
    return int(window_ms)
