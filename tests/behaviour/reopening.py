"""Opening a home again of which only the log is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door


def reopened_from_the_log(door: Door) -> None:
    """Nothing but the log is left of the home."""
    door.close()
    for file in door.home.glob("state.duckdb*"):
        file.unlink()
    door.open()
