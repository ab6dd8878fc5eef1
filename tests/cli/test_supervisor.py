"""A broker is kept running until it is stopped."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rmq_pipeline.cli.supervisor import TRIES, Supervision, Supervisor
from rmq_pipeline.cli.up import NO_PAGE, _run
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import ConflictError, HomeLockedError, OperatorError, RocketMQError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import Flags, Listening
from rmq_pipeline.orchestration.project import UPKEEP_ONLY, CodeLocation
from tests.conftest import Eventually
from tests.flight.test_process import holder, let_go
from tests.free_address import free_endpoints

ROOT = Path(__file__).parents[2]
#: Has the home to itself, and leaves a child behind when it is killed.
HOLDING = """
import subprocess, sys
from pathlib import Path
from rmq_pipeline.cli.supervisor import Supervision
supervision = Supervision.begin(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=0, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def failures() -> list[RocketMQError]:
    return []


@pytest.fixture
def supervisor(home: Path, told: list[str], failures: list[RocketMQError]) -> Iterator[Supervisor]:
    supervisor = Supervisor(
        home, free_endpoints(), tell=told.append, on_failure=failures.append, retry_s=0.01
    )
    with supervisor:
        yield supervisor


def kill(endpoint: Endpoint) -> None:
    os.kill(endpoint.pid, signal.SIGKILL)


def test_a_broker_that_dies_is_started_again_at_its_address(
    supervisor: Supervisor, told: list[str], eventually: Eventually
) -> None:
    first = supervisor.endpoint

    with Client(home=supervisor.home) as client:
        client.create_topic("kept")
        kill(first)
        eventually(lambda: supervisor.restarts == 1)

        assert client.describe_topic("kept")["name"] == "kept"
    assert supervisor.endpoint.flight == first.flight
    assert supervisor.endpoint.upkeep == "dagster"
    assert supervisor.endpoint.pid != first.pid
    eventually(lambda: told)
    assert told[0].startswith("The broker died; restarted as process")


def test_a_broker_that_was_stopped_stays_stopped(
    supervisor: Supervisor, told: list[str], eventually: Eventually
) -> None:
    process.stop(supervisor.home)
    eventually(lambda: told)

    assert "was stopped" in told[0]
    assert process.serving(supervisor.home) is None
    started = process.start(supervisor.home)
    eventually(lambda: supervisor.endpoint == started)
    kill(started)
    eventually(lambda: supervisor.restarts == 1)


def test_stop_ends_the_broker(home: Path) -> None:
    with Supervisor(home) as supervisor:
        pid = supervisor.endpoint.pid

    assert not psutil.pid_exists(pid)
    assert Endpoint.read(home) is None


def test_a_broker_left_running_is_taken_over(home: Path) -> None:
    left = process.start(home, upkeep="dagster")

    with Supervisor(home) as supervisor:
        assert supervisor.endpoint == left

    assert process.serving(home) is None


def test_a_broker_with_another_upkeep_is_left_alone(home: Path) -> None:
    other = process.start(home, upkeep="self")

    with pytest.raises(ConflictError, match="upkeep self"):
        Supervisor(home).start()

    assert process.serving(home) == other
    process.stop(home)


def test_a_broker_with_other_settings_is_left_alone(home: Path) -> None:
    other = process.start(home, upkeep="dagster")

    with pytest.raises(ConflictError, match="other settings"):
        Supervisor(home, settings={"seal_after_ms": 1}).start()

    assert process.serving(home) == other
    process.stop(home)


def test_settings_outlive_the_death_of_a_broker(home: Path, eventually: Eventually) -> None:
    settings = {"seal_after_ms": 1, "reserve_bytes": 0}
    with (
        Supervisor(home, free_endpoints(), settings=settings) as supervisor,
        Client(home=home) as client,
    ):
        kill(supervisor.endpoint)
        eventually(lambda: supervisor.restarts == 1)

        assert client.status()["settings"]["seal_after_ms"] == 1


def forget(home: Path) -> None:
    """Have the home remember another broker, as one does whose disk was full."""
    Flags(flight="127.0.0.1:1", grpc="none", upkeep="self").keep(home)


def test_a_broker_is_as_it_was_though_its_home_remembers_another_one(
    home: Path, eventually: Eventually
) -> None:
    settings = {"seal_after_ms": 1, "reserve_bytes": 0}
    with (
        Supervisor(home, free_endpoints(), settings=settings) as supervisor,
        Client(home=home) as client,
    ):
        first = supervisor.endpoint
        forget(home)
        kill(first)
        eventually(lambda: supervisor.restarts == 1)

        assert client.status()["settings"]["seal_after_ms"] == 1
    again = supervisor.endpoint
    assert (again.upkeep, again.flight, again.grpc) == ("dagster", first.flight, first.grpc)


def test_a_broker_is_asked_for_its_settings_itself(home: Path) -> None:
    settings = {"seal_after_ms": 1, "reserve_bytes": 0}
    left = process.start(home, upkeep="dagster", settings=settings)
    forget(home)

    with Supervisor(home, settings=settings) as supervisor:
        assert supervisor.endpoint == left


def test_a_broker_that_somebody_else_starts_is_started_again_as_theirs(
    home: Path, told: list[str], eventually: Eventually
) -> None:
    ours, theirs = ({"seal_after_ms": at, "reserve_bytes": 0} for at in (1, 2))
    with Supervisor(home, free_endpoints(), settings=ours, tell=told.append) as supervisor:
        process.stop(home)
        eventually(lambda: told)
        started = process.start(home, upkeep="self", settings=theirs)
        eventually(lambda: supervisor.endpoint == started)
        kill(started)
        eventually(lambda: supervisor.restarts == 1)

        with Client(home=home) as client:
            assert client.status()["settings"]["seal_after_ms"] == 2
    assert supervisor.endpoint.upkeep == "self"


def test_stop_says_whom_it_waits_for(
    supervisor: Supervisor, told: list[str], eventually: Eventually
) -> None:
    process.stop(supervisor.home)
    eventually(lambda: told)

    with holder(supervisor.home) as keeping, ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(supervisor.stop)
        eventually(lambda: f"is open in process {keeping.pid}" in told[-1])
        assert not stopping.done()
        let_go(keeping)
        stopping.result(30)


def test_the_supervisor_stops_after_failed_starts(
    supervisor: Supervisor, failures: list[RocketMQError], eventually: Eventually
) -> None:
    (supervisor.home / "format").write_text("99")

    kill(supervisor.endpoint)

    eventually(lambda: failures, within_s=180)
    assert isinstance(failures[0], OperatorError)
    assert supervisor.restarts == 0


@pytest.fixture
def dead(home: Path) -> Endpoint:
    """What a broker has left that died: no process has its number."""
    home.mkdir(parents=True, exist_ok=True)
    said = (1 << 22, 1, "token", "127.0.0.1:1", None, str(home.absolute()), "dagster", "sync")
    endpoint = Endpoint(*said)
    endpoint.write()
    return endpoint


@pytest.fixture
def living(dead: Endpoint) -> Endpoint:
    """The broker that comes back."""
    me = psutil.Process()
    return replace(dead, pid=me.pid, started_at_ms=int(me.create_time() * 1000))


Starts = Callable[..., list[int]]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """``starts(dead, OSError())``: what comes of each start, the last of all further ones."""

    def each(*outcomes: Endpoint | Exception) -> list[int]:
        made: list[int] = []

        def start(*_: object, **__: object) -> Endpoint:
            made.append(len(made))
            outcome = outcomes[min(len(made), len(outcomes)) - 1]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(process, "start", start)
        monkeypatch.setattr(process, "stop", lambda *_, **__: None)
        return made

    return each


NO_PROCESS = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize("refusal", [NO_PROCESS, NO_THREAD], ids=["process", "thread"])
def test_a_start_for_which_there_is_no_room_is_tried_again(
    starts: Starts, dead: Endpoint, living: Endpoint, refusal: Exception, eventually: Eventually
) -> None:
    made = starts(dead, refusal, living)

    with Supervisor(Path(dead.home), retry_s=0.01) as supervisor:
        eventually(lambda: supervisor.restarts == 1)

    assert len(made) == 3
    assert supervisor.endpoint == living


def test_a_start_that_never_gets_a_process_ends(
    starts: Starts, dead: Endpoint, failures: list[RocketMQError], eventually: Eventually
) -> None:
    made = starts(dead, NO_PROCESS)

    with Supervisor(Path(dead.home), on_failure=failures.append, retry_s=0.01) as supervisor:
        eventually(lambda: failures)

    assert len(made) == 1 + TRIES
    assert isinstance(failures[0], OperatorError)
    assert os.strerror(errno.EAGAIN) in failures[0].message
    assert supervisor.restarts == 0


def test_a_failed_notice_does_not_end_the_watch(
    starts: Starts, dead: Endpoint, living: Endpoint, eventually: Eventually
) -> None:
    def tell(_: str) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    # The second one dies as well.
    starts(dead, dead, living)
    with Supervisor(Path(dead.home), tell=tell, retry_s=0.01) as supervisor:
        eventually(lambda: supervisor.restarts == 2)

    assert supervisor.endpoint == living


def test_a_process_that_may_not_be_looked_at_ends_no_watch(
    starts: Starts,
    dead: Endpoint,
    living: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    refusals = iter([psutil.AccessDenied(dead.pid)])
    is_alive = Endpoint.is_alive

    def look(endpoint: Endpoint) -> bool:
        for refusal in refusals:
            raise refusal
        return is_alive(endpoint)

    # Whether one may be looked at is the system's setting, and root always may.
    monkeypatch.setattr(Endpoint, "is_alive", look)
    starts(dead, living)
    with Supervisor(Path(dead.home), retry_s=0.01) as supervisor:
        eventually(lambda: supervisor.restarts == 1)

    assert supervisor.endpoint == living


def test_a_home_that_cannot_be_looked_at_ends_no_watch(
    starts: Starts,
    dead: Endpoint,
    living: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    looks = iter([OSError(errno.EMFILE, os.strerror(errno.EMFILE))])

    def read(_: Path) -> Endpoint:
        for refusal in looks:
            raise refusal
        return dead

    monkeypatch.setattr(Endpoint, "read", read)
    starts(dead, living)
    with Supervisor(Path(dead.home), retry_s=0.01) as supervisor:
        eventually(lambda: supervisor.restarts == 1)

    assert supervisor.endpoint == living


@contextmanager
def holding(home: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that supervises the home and has started one of its own."""
    command = [sys.executable, "-c", HOLDING, str(home)]
    other = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    child = int(other.stdout.readline())
    try:
        yield other
    finally:
        # First: it would end by itself at the end of its input.
        os.kill(child, signal.SIGKILL)
        other.kill()
        other.communicate()


def test_a_second_up_is_refused_and_leaves_the_broker_of_the_first_alone(
    home: Path, tmp_path: Path
) -> None:
    # Dagster could not start here, which ends the broker that was started for it.
    (folder := tmp_path / "dagster").touch()
    code = CodeLocation(UPKEEP_ONLY, tmp_path)
    told: list[str] = []
    with Supervisor(home, free_endpoints(), tell=told.append) as first:
        before = first.endpoint

        with pytest.raises(
            HomeLockedError, match=f"Process {os.getpid()} already supervises the broker"
        ) as no:
            _run(home, Listening(), settings=None, folder=folder, port=0, code=code, ui=NO_PAGE)

        assert "stop it first with Ctrl-C" in str(no.value)
        assert process.serving(home) == before
    assert not told


def test_a_supervisor_that_was_refused_stops_nothing(home: Path) -> None:
    with Supervisor(home, free_endpoints()) as first:
        second = Supervisor(home)
        with pytest.raises(HomeLockedError):
            second.start()

        second.stop()

        assert process.serving(home) == first.endpoint


def test_no_broker_is_looked_for_while_another_process_supervises_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "start", lambda *_, **__: pytest.fail("it was looked for"))

    with holding(home) as other, pytest.raises(HomeLockedError, match=f"Process {other.pid} "):
        Supervisor(home).start()


def test_a_supervisor_that_was_killed_leaves_the_home_free_though_its_child_lives(
    home: Path,
) -> None:
    with holding(home) as other:
        other.kill()
        other.wait()

        Supervision.begin(home).end()


def test_a_supervisor_that_does_not_start_leaves_the_home_free(home: Path) -> None:
    other = process.start(home, upkeep="self")

    with pytest.raises(ConflictError):
        Supervisor(home).start()

    Supervision.begin(home).end()
    assert process.serving(home) == other
    process.stop(home)


def test_a_supervisor_that_has_stopped_leaves_the_home_free(home: Path) -> None:
    with Supervisor(home, free_endpoints()):
        pass

    Supervision.begin(home).end()
    assert process.serving(home) is None
