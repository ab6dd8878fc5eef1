"""Half messages of a test, and what is said about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_pipeline import schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

#: The property of a committed message.
TRANSACTION_ID = "__transactionId__"


class Producer:
    """``begin(n, producer_group=…, immunity_ms=…, **columns)``: half messages for a topic."""

    def __init__(self, endpoint: Endpoint, topic: str, messages: Make) -> None:
        self._endpoint = endpoint
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
        return self._endpoint.broker.send_half(
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


def asked(endpoint: Endpoint, **who: Any) -> list[tuple[bytes, int]]:
    """Body and check number of all that is offered."""
    found = endpoint.broker.fetch_checks(**who)
    return list(zip(found["body"].to_pylist(), found["checks"].to_pylist(), strict=True))


def sweep(endpoint: Endpoint) -> dict[str, Any]:
    """What the check job did."""
    report: dict[str, Any] = endpoint.broker.check_transactions()
    report.pop("next_due_ms")
    return report


def reopened_from_the_log(endpoint: Endpoint) -> None:
    """Nothing but the log is left of the home."""
    endpoint.close()
    for file in endpoint.home.glob("state.duckdb*"):
        file.unlink()
    endpoint.open()
