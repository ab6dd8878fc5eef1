"""pytest plugin of the test kit: the fixture ``rmq``.

pytest loads this module in every session, so the fixture imports the kit only when a test asks for
it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rmq_pipeline.settings import Settings
    from rmq_pipeline.testing import TestBroker


@pytest.fixture
def rmq_settings() -> "Settings | None":
    """Return the settings of the broker; override it to test with others.

    None: the defaults, with small files.
    """
    return None


@pytest.fixture
def rmq(rmq_settings: "Settings | None") -> "Iterator[TestBroker]":
    """Open a broker of this test alone, in a temporary home, on a clock that the test moves."""
    from rmq_pipeline.testing import TestBroker

    with TestBroker.open(settings=rmq_settings) as broker:
        yield broker
