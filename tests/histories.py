"""How many random histories a promise is tried with.

A usual run has a fixed share of them, the same each time. RMQ_HISTORIES=10 makes it ten times as
many, and others each time.
"""

import os
from typing import Any, Final

from hypothesis import settings

TIMES: Final = int(os.environ.get("RMQ_HISTORIES", "0"))


def histories(usual: int, **more: Any) -> settings:
    """Settings of a test with so many examples in a usual run."""
    return settings(max_examples=usual * (TIMES or 1), derandomize=not TIMES, **more)
