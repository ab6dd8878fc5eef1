"""Half messages of a test, and what is said about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_pipeline import schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

#: The property of a committed message.
TRANSACTION_ID = "__transactionId__"


class Producer:
    """``begin(n, producer_group=…, immunity_ms=…, **columns)``: half messages for a topic."""

    def __init__(self, door: Door, topic: str, messages: Make) -> None:
        self._door = door
        self._topic = topic
        self._messages = messages

    def __call__(
        self,
        n: int = 1,
        *,
        producer_group: str = "producers",
        immunity_ms: int | None = None,
        **columns: Any,
    ) -> pa.Table:
        """Where they lie, and their transaction ids."""
        return self._door.broker.send_half(
            self._topic,
            self._messages(n, **columns),
            producer_group=producer_group,
            immunity_ms=immunity_ms,
        )


def ends(halves: pa.Table, resolution: str | list[str]) -> pa.Table:
    """How they end: all alike, or one resolution each."""
    ids = halves["transaction_id"].to_pylist()
    said = [resolution] * len(ids) if isinstance(resolution, str) else resolution
    return pa.table([ids, said], schema=schema.RESOLUTION)


def asked(door: Door, **who: Any) -> list[tuple[bytes, int]]:
    """Body and check number of all that is offered."""
    found = door.broker.fetch_checks(**who)
    return list(zip(found["body"].to_pylist(), found["checks"].to_pylist(), strict=True))


def sweep(door: Door) -> dict[str, Any]:
    """What the check job did."""
    report: dict[str, Any] = door.broker.check_transactions()
    report.pop("next_due_ms")
    return report


def reopened_from_the_log(door: Door) -> None:
    """Nothing but the log is left of the home."""
    door.close()
    for file in door.home.glob("state.duckdb*"):
        file.unlink()
    door.open()
