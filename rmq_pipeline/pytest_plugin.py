"""pytest plugin of the test kit: the fixtures ``rmq`` and ``rmq_fork``.

pytest loads this module in every session, so the fixture imports the kit only when a test asks for
it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from rmq_pipeline.settings import Settings
    from rmq_pipeline.testing import TestBroker
    from rmq_pipeline.testing.forking import Moment


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


@pytest.fixture
def rmq_fork(rmq_settings: "Settings | None") -> "Iterator[Callable[..., TestBroker]]":
    """Return a function that opens a fork of a home: ``rmq_fork(home, at=…)``.

    The arguments are those of ``TestBroker.fork``. The forks are closed when the test ends.
    """
    from rmq_pipeline.testing import TestBroker

    with ExitStack() as opened:

        def fork(home: "Path | str", *, at: "Moment | None" = None) -> TestBroker:
            return opened.enter_context(TestBroker.fork(home, at=at, settings=rmq_settings))

        yield fork
