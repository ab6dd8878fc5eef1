"""Backups of a broker in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rmq_pipeline.backup.destination import Destination
from rmq_pipeline.backup.restoring import restore
from rmq_pipeline.backup.taking import Report, back_up
from rmq_pipeline.broker import Broker


def taken(broker: Broker, folder: Path, **how: Any) -> Report:
    home = Path(broker.status()["home"])
    destination = Destination.open(str(folder))
    return back_up(home, destination, ask_broker=broker.copy_state, **how)


def restored(folder: Path, home: Path, to_ms: int | None = None) -> int:
    return restore(Destination.open(str(folder)), home, to_ms=to_ms).at_ms


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "objects").rglob("*") if path.is_file()}


def never_asked() -> dict[str, Any]:
    raise AssertionError("no broker has the home open")
