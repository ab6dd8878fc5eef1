"""Consumer groups: names, order, retries, and what happens on a final failure."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline import limits
from rmq_pipeline.errors import IllegalConsumerGroupError, RequestError

Order = Literal["none", "message_group", "queue"]
OnFailure = Literal["dead_letter", "park", "dead_letter_group"]

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Exponential:
    """A backoff that grows by a factor with every failure, up to a bound."""

    initial_ms: int = limits.BACKOFF_INITIAL_MS
    max_ms: int = limits.BACKOFF_MAX_MS
    multiplier: float = limits.BACKOFF_MULTIPLIER

    def delay_ms(self, failures: int) -> int:
        """The delay after so many failures, at least one."""
        growths = min(failures - 1, limits.BACKOFF_GROWTHS)
        return int(min(self.max_ms, self.initial_ms * self.multiplier**growths))


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group; ``group_id`` is never used again."""

    name: str
    group_id: int
    order: Order
    #: Deliveries of one message, the first one counted.
    max_attempts: int
    #: Delay after the first, second, … failure; the last one repeats. Unused with ``backoff``.
    backoff_ms: tuple[int, ...]
    on_failure: OnFailure
    created_at_ms: int
    dead_letter_topic_id: int
    #: Delays that grow by themselves; None: those of backoff_ms.
    backoff: Exponential | None = None
    #: Deliveries per second, all topics together; None: as fast as they are asked for.
    max_rate_per_s: float | None = None
    #: How long the idempotency keys of its effects are remembered.
    idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS

    def to_json(self) -> str:
        """As the commit log and the tables keep it."""
        return json.dumps(asdict(self))

    def describe(self) -> dict[str, Any]:
        """Its fields by name."""
        return {
            **asdict(self),
            "backoff_ms": list(self.backoff_ms),
            "backoff": "customized" if self.backoff is None else asdict(self.backoff),
        }

    def backoff_text(self) -> str:
        """The policy as one text: customized, or JSON."""
        return "customized" if self.backoff is None else json.dumps(asdict(self.backoff))

    def delay_ms(self, failures: int) -> int:
        """When a message comes again after so many failures, at least one."""
        if self.backoff is not None:
            return self.backoff.delay_ms(failures)
        return self.backoff_ms[min(failures, len(self.backoff_ms)) - 1]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``to_json`` wrote."""
        found = json.loads(text)
        found["backoff_ms"] = tuple(found["backoff_ms"])
        if found.get("backoff") is not None:
            found["backoff"] = Exponential(**found["backoff"])
        return cls(**found)

    def altered(self, **changes: Any) -> "Group":
        """This group with other settings; None leaves one as it is."""
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


def check_name(name: Any) -> None:
    """Refuse a bad name.

    Raises:
        IllegalConsumerGroupError: length, characters, or kept for the system.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise IllegalConsumerGroupError(f"Group name {name!r} has characters that are not allowed.")
    if len(name) > limits.GROUP_NAME_LENGTH:
        raise IllegalConsumerGroupError(f"Group name of {len(name)} characters is too long.")
    if name.startswith("CID_RMQ_SYS_"):
        raise IllegalConsumerGroupError(f"Group name {name} is kept for the system.")


def check_settings(
    *, order: str, max_attempts: Any, backoff_ms: tuple[Any, ...], on_failure: str
) -> None:
    """Refuse settings out of range.

    Raises:
        RequestError: what is wrong, with the values that are allowed.
    """
    if order not in get_args(Order):
        raise RequestError(f"Order {order!r} is none of {', '.join(get_args(Order))}.")
    if on_failure not in get_args(OnFailure):
        raise RequestError(
            f"on_failure {on_failure!r} is none of {', '.join(get_args(OnFailure))}."
        )
    if order == "queue" and on_failure == "dead_letter_group":
        raise RequestError(
            "on_failure dead_letter_group gives a message group up: a group of order queue keeps"
            " none, and has dead_letter or park."
        )
    whole = isinstance(max_attempts, int) and not isinstance(max_attempts, bool)
    if not whole or not 1 <= max_attempts <= limits.MAX_ATTEMPTS:
        raise RequestError(f"max_attempts is 1 to {limits.MAX_ATTEMPTS}, not {max_attempts!r}.")
    if not backoff_ms or any(
        not isinstance(ms, int) or not 0 <= ms <= limits.DELAY_MAX_MS for ms in backoff_ms
    ):
        raise RequestError("backoff_ms is one or more delays of 0 ms to one year.")


def checked_backoff(backoff: Any) -> Exponential | None:
    """A backoff policy: customized, exponential, or the fields of an Exponential.

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
            raise RequestError(f"A backoff is 0 ms to one year, not {ms!r}.")
    growth: Any = made.multiplier
    if not isinstance(growth, int | float) or isinstance(growth, bool) or not 1 <= growth <= 100:
        raise RequestError(f"The multiplier of a backoff is 1 to 100, not {growth!r}.")
    return made


def checked_rate(max_rate_per_s: Any) -> float | None:
    """A limit of deliveries per second; None and 0 are no limit.

    Raises:
        RequestError: it is no number above 0.
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
    """How long idempotency keys are remembered.

    Raises:
        RequestError: it is no whole number of 1 ms to a year.
    """
    whole = isinstance(window_ms, int) and not isinstance(window_ms, bool)
    if not whole or not 1 <= window_ms <= limits.IDEMPOTENCY_WINDOW_MAX_MS:
        raise RequestError(
            f"idempotency_window_ms is 1 to {limits.IDEMPOTENCY_WINDOW_MAX_MS}, not {window_ms!r}."
        )
    return int(window_ms)
