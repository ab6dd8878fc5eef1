"""A broker with a small archive, under a clock that tests turn by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from tests.broker.archive_home import opened


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(home: Path, clock: ManualClock) -> Iterator[Broker]:
    with opened(home, clock) as broker:
        yield broker
