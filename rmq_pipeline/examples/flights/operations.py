"""What the airline keeps beside the broker: two files that people change, and the ledger.

A window of a consumer reads each file once: it works by the rules that were in force when it
first asked for them, and its outcome does not depend on when that is changed.
"""

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final

from rmq_pipeline.endpoint import default_home

LEDGER: Final = "crews.duckdb"
_GROUNDED: Final = "grounded.json"
_RULES: Final = "rules.json"


def folder() -> Path:
    """RMQ_FLIGHTS, else ``flights`` in the broker's home."""
    named = os.environ.get("RMQ_FLIGHTS")
    return Path(named) if named else default_home() / "flights"


def ground(tails: Iterable[str]) -> None:
    """Ground these aircraft and no others, for windows to come."""
    _write(_GROUNDED, sorted(tails))


def grounded() -> frozenset[str]:
    """Tail numbers of the aircraft that may not be checked off."""
    return frozenset(_read_once(folder() / _GROUNDED) or ())


def accept_cancellations() -> None:
    """From the next window on, a cancelled departure is no error of aircraft_rotations."""
    _write(_RULES, {"accept_cancellations": True})


def accepts_cancellations() -> bool:
    """Whether a cancelled departure is acked without a row."""
    return bool((_read_once(folder() / _RULES) or {}).get("accept_cancellations"))


def _write(name: str, content: Any) -> None:
    folder().mkdir(parents=True, exist_ok=True)
    draft = folder() / f"{name}.new"
    draft.write_text(json.dumps(content))
    # A reader finds the old file or the new one, whole.
    draft.replace(folder() / name)


# A window's process ends with it, as a Spark session's workers do: once a process is once a window.
@cache
def _read_once(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
