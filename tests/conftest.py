"""What every test gets: no settings of the person who runs it, and a way to wait.

Temporary files go to one folder a run, which goes with it: a process that is killed, as many are
here, leaves its own behind. So do processes that a test left running, as it does on Ctrl-C. Homes
are in pytest's folders, and go with the test that passes.

A run may have workers (pytest -n): each has a folder within that of the run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest
from hypothesis import settings

from rmq_pipeline.store.database import FILE_NAME, Database
from rmq_pipeline.store.history import EVENTS, NOTHING, SNAPSHOTS
from tests.waiting import until

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

    from tests.log_stores import LogStores
    from tests.nats_server import NatsServer
    from tests.object_store import ObjectStore
    from tests.postgres_server import PostgresServer

# A shared machine of two cores says little about one example's time.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")

# Spark asks the network for this machine's address unless it is told one.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
# What `make test` has written: JVMs map Spark's classes, and say nothing if they cannot. Spark cuts
# the options at spaces.
SPARK_CLASSES: Final = Path(__file__).parents[1] / ".venv" / "spark.jsa"
if SPARK_CLASSES.exists() and " " not in f"{SPARK_CLASSES}":
    os.environ.setdefault(
        "SPARK_SUBMIT_OPTS", f"-XX:SharedArchiveFile={SPARK_CLASSES} -Xlog:disable"
    )
os.environ["RMQ_SETTINGS"] = str(Path(__file__).with_name("small_homes.toml"))

Eventually = Callable[..., None]

#: Names the folder of the run to all processes below it.
RUN_VARIABLE: Final = "RMQ_TEST_RUN"
#: Opens a home as users do: a session's own copies an empty database.
OPEN_DATABASE: Final = Database.open
#: A run needs less than half of it at any one time.
ROOM_BYTES: Final = 2 << 30
#: Of a parameter, to be in the name of a test.
NAMING_BYTES: Final = 40
#: Folders whose tests share what takes seconds to start: a Spark session, official clients.
SHARING: Final = ("tests/spark/", "tests/conformance/")
#: Files there whose tests have processes of their own, or none of these: any worker takes them.
APART: Final = tuple(
    f"tests/spark/test_{name}.py"
    for name in (
        *("cluster", "connect", "replay_external_sort", "replay_reading", "replay_settled"),
        *("replay_sinks", "replay_tasks", "replay_walk", "session", "source_offsets"),
    )
)
#: Files whose tests take milliseconds each, but those with one of these marks.
FAST: Final = (
    "tests/access/",
    "tests/archive/",
    "tests/filter/",
    "tests/resources/",
    "tests/test_",
)
NOT_FAST: Final = ("slow", "long", "alone", "spark", "dagster", "chaos")


def pytest_configure(config: pytest.Config) -> None:
    """Send temporary files, those of Spark's JVM as well, to a folder of this run."""
    # A shell ignores it for what it runs in the background. Dagster does the same to SIGTERM then,
    # and processes that tests start would never end.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="rmq-tests-")
    config.add_cleanup(lambda: _clean_up(folder))
    config.add_cleanup(gc.unfreeze)
    os.environ[RUN_VARIABLE] = folder
    os.environ["TMPDIR"] = os.environ["SPARK_LOCAL_DIRS"] = tempfile.tempdir = folder
    if not is_worker(config):
        config.pluginmanager.register(_Room())


def is_worker(config: pytest.Config) -> bool:
    """Whether this process does tests for another one."""
    return hasattr(config, "workerinput")


def _clean_up(folder: str) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            # Those of workers are named for folders within it.
            theirs = process.environ().get(RUN_VARIABLE, "")
            if process.pid != os.getpid() and f"{theirs}/".startswith(f"{folder}/"):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


class _Room:
    """Looks, before every test, whether the disk has room for it."""

    def pytest_runtest_logstart(self) -> None:
        """End the run on a full disk: what fails there says nothing about the code."""
        free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
        if free_bytes < ROOM_BYTES:
            pytest.exit(
                f"The disk is full: {free_bytes >> 20} MiB are left where temporary files go "
                f"({os.environ['PYTEST_DEBUG_TEMPROOT']}), and tests need {ROOM_BYTES >> 20}. "
                "Failures before this one may be due to it.",
                returncode=1,
            )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the modules and tests, which live as long as the run.

    A full collection over half a million objects takes half a second, and the broker asks for some
    when it opens a database again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make check` runs: quick folders, and promises in process over a shared home."""
    parameters = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    is_fast = item.nodeid.startswith(FAST) or parameters.get("shared_endpoint") == "in_process"
    if is_fast and not any(map(item.get_closest_marker, NOT_FAST)):
        item.add_marker("fast")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long bytes give no name: workers must agree on names, and packed ones may hold the time."""
    return argname if isinstance(val, bytes) and len(val) > NAMING_BYTES else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test has logged may be no text: a worker could not tell of it."""
    report = yield
    report.sections = [
        (name, said.encode("utf-8", "backslashreplace").decode()) for name, said in report.sections
    ]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with what takes long: short ones fill the gaps at the end."""
    if is_worker(config):
        long = {share(item.nodeid) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: _turn(share(item.nodeid), long))


def _turn(taken: str, long: Collection[str]) -> int:
    """Folders that one worker takes at once are the longest; then come files with slow tests."""
    return 0 if taken in SHARING else 1 if taken in long else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Deal out files, and to one worker all that shares a session."""
    from xdist.scheduler import LoadScopeScheduling

    class Shares(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return share(nodeid)

    config.option.loadscopereorder = False
    return Shares(config, log)


def share(nodeid: str) -> str:
    """What a worker takes at once."""
    file, _, _ = nodeid.partition("::")
    if file in APART:
        return file
    return next((folder for folder in SHARING if file.startswith(folder)), file)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, which the tests of a run share; each takes a database of its own.

    Not in pytest's folder: each start of pytest closes that to other users than its own.
    """
    from tests.postgres_server import PostgresServer

    server = PostgresServer(Path(tempfile.mkdtemp(prefix="postgres-")))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server of NATS JetStream, which a run's tests share; each takes a stream of its own."""
    from tests.nats_server import NatsServer

    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


# The contract of a store is tried with all in `make test` (tests/store), and the broker with two.
@pytest.fixture(params=["postgres", "s3", pytest.param("nats", marks=pytest.mark.long)])
def log_stores(request: pytest.FixtureRequest) -> LogStores:
    """A server for logs of each kind of engine in turn."""
    from tests.log_stores import BucketLogs, PostgresLogs, StreamLogs

    if request.param == "postgres":
        return PostgresLogs(request.getfixturevalue("postgres"))
    if request.param == "nats":
        return StreamLogs(request.getfixturevalue("nats_server"))
    return BucketLogs(request.getfixturevalue("object_store"))


@pytest.fixture(scope="session", autouse=True)
def _homes_begin_with_copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make tables and views once a run: a home that a test begins gets copies of an empty store.

    Homes that other processes begin are made from nothing, and those of ``from_nothing``.
    """
    folder = tmp_path_factory.mktemp("empty")
    begun = Database.open(folder / FILE_NAME, memory_bytes=64 << 20)
    begun.checkpoint()
    begun.close()
    copied = (FILE_NAME, f"{EVENTS}/{NOTHING}", f"{SNAPSHOTS}/{NOTHING}")

    def open_copy(path: Path, **how: Any) -> Database:
        if not path.exists():
            for name in copied:
                (path.parent / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(folder / name, path.parent / name)
        return OPEN_DATABASE(path, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "open", open_copy)
        yield


@pytest.fixture(scope="module")
def syntax_trees() -> Iterator[None]:
    """Parse each file of the project once, and forget all trees after the tests of the module.

    A tree has no garbage. The collector would look at two million nodes again and again: three
    quarters of the time that parsing takes, and a second of each collection in later tests.
    """
    from tests.house_rules import nodes

    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


@pytest.fixture
def from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the homes of this test as users get them, without copies."""
    monkeypatch.setattr(Database, "open", OPEN_DATABASE)


@pytest.fixture(autouse=True)
def _nobodys_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RMQ_HOME", "RMQ_GRPC", "RMQ_FLIGHT", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the number a random test begins with: 1 in `make test`, another each time in chaos.

    It is printed, so that a failure tells it; RMQ_SEED=<number> begins with that one again.
    """
    said = os.environ.get("RMQ_SEED", "random" if request.node.get_closest_marker("long") else "1")
    chosen = random.SystemRandom().randrange(1 << 32) if said == "random" else int(said)
    print(f"RMQ_SEED={chosen}")
    return chosen


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A place for a broker's home that does not exist yet."""
    return tmp_path / "home"


@pytest.fixture
def eventually() -> Eventually:
    """Wait until a condition holds, for what another process does; fails after ``within_s``."""
    return until


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server, which this process and its children reach by their environment."""
    from tests.object_store import ObjectStore

    store = ObjectStore(tmp_path_factory.mktemp("object_store"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        yield store
    store.stop()
