"""A broker with a small archive, under a clock that tests turn by hand."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from tests.broker.archive_home import opened
from tests.broker.held import Held


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(home: Path, clock: ManualClock) -> Iterator[Broker]:
    with opened(home, clock) as broker:
        yield broker


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def held(home: Path) -> Iterator[Held]:
    held = Held(home)
    yield held
    held.let_go.set()
    held.broker.close()
