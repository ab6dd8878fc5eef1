"""Consumer groups: names, order, retries, and what happens on a final failure."""

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline import limits
from rmq_pipeline.errors import IllegalConsumerGroupError, RequestError

Order = Literal["none", "message_group"]
OnFailure = Literal["dead_letter"]

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group; ``group_id`` is never used again."""

    name: str
    group_id: int
    order: Order
    #: Deliveries of one message, the first one counted.
    max_attempts: int
    #: Delay after the first, second, … failure; the last one repeats.
    backoff_ms: tuple[int, ...]
    on_failure: OnFailure
    created_at_ms: int
    dead_letter_topic_id: int

    def to_json(self) -> str:
        """As the commit log and the tables keep it."""
        return json.dumps(asdict(self))

    def describe(self) -> dict[str, Any]:
        """Its fields by name."""
        return {**asdict(self), "backoff_ms": list(self.backoff_ms)}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``to_json`` wrote."""
        fields = json.loads(text)
        fields["backoff_ms"] = tuple(fields["backoff_ms"])
        return cls(**fields)

    def altered(self, **changes: Any) -> "Group":
        """This group with other settings; None leaves one as it is."""
        kept = {name: value for name, value in changes.items() if value is not None}
        if "backoff_ms" in kept:
            kept["backoff_ms"] = tuple(kept["backoff_ms"])
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
    whole = isinstance(max_attempts, int) and not isinstance(max_attempts, bool)
    if not whole or not 1 <= max_attempts <= limits.MAX_ATTEMPTS:
        raise RequestError(f"max_attempts is 1 to {limits.MAX_ATTEMPTS}, not {max_attempts!r}.")
    if not backoff_ms or any(
        not isinstance(ms, int) or not 0 <= ms <= limits.DELAY_MAX_MS for ms in backoff_ms
    ):
        raise RequestError("backoff_ms is one or more delays of 0 ms to one year.")
