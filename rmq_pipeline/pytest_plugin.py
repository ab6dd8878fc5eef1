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


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Keep pytest from rewriting the assertions of the library; called at registration.

    pytest rewrites every module of a package with a plugin. That takes 3 s in the first session. If
    the package's folder is read-only, as in many containers, it takes 7 s in each session.
    """
    hook = getattr(pluginmanager, "rewrite_hook", None)
    marked: set[str] = getattr(hook, "_must_rewrite", set())
    marked.discard(__name__.partition(".")[0])


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
