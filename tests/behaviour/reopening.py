"""Opening a home again of which only the log is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint


def reopened_from_the_log(endpoint: Endpoint) -> None:
    """Nothing but the log is left of the home."""
    endpoint.close()
    for file in endpoint.home.glob("state.duckdb*"):
        file.unlink()
    endpoint.open()
