"""Dagster's webserver, daemon and code server as children: started, kept alive, and ended."""

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Final, Self

import dagster as dg
import psutil

from rmq_pipeline.errors import HomeLockedError, OperatorError
from rmq_pipeline.orchestration.graphql import UNFINISHED, GraphQL
from rmq_pipeline.orchestration.instance_home import prepare

LOG: Final = logging.getLogger(__name__)
LOCATION: Final = "rmq_pipeline"
#: Every process of a session has it in its environment, whatever group it put itself in.
SESSION: Final = "RMQ_DAGSTER_SESSION"
CODE_SERVER_THREADS: Final = 32
RUNS_END_S: Final = 6.0
PROCESSES_END_S: Final = 6.0
#: Runs of these states have a process of the code server; others are the daemon's to start.
_AT_THE_CODE_SERVER: Final = (
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


class DagsterStartError(OperatorError):
    """Dagster did not come up."""

    remedy = "Look at the logs in DAGSTER_HOME."


def project_root() -> Path:
    """The folder of the checkout: it holds workspace.yaml, definitions.py and dagster_home."""
    return Path(__file__).resolve().parents[2]


class DevServer:
    """The Dagster processes of one DAGSTER_HOME, restarted when they die, until ``stop``.

    They also end when this process ends, however it ends.
    """

    def __init__(
        self,
        dagster_home: Path,
        *,
        port: int = 0,
        env: Mapping[str, str] | None = None,
        module: str = "definitions",
        working_directory: Path | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            dagster_home: made if missing, with the project's dagster.yaml if it has none.
            port: of the webserver; 0 picks a free one.
            env: added to the environment: RMQ_HOME, RMQ_FLIGHT, ...
            module: holds ``defs``.
            working_directory: where the module is found; the project's root by default.
        """
        self.dagster_home = dagster_home.resolve()
        self.port = port or _free_port()
        self.restarts = 0
        self._root = (working_directory or project_root()).resolve()
        self._module = module
        self._env = {
            **os.environ,
            **(env or {}),
            "DAGSTER_HOME": str(self.dagster_home),
            "DAGSTER_DISABLE_TELEMETRY": "1",
            # A run of an unsupervised Spark asks the network for this machine's address.
            "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
            SESSION: str(self.dagster_home),
        }
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._keep_alive, name="dagster-watch", daemon=True)
        self._lock: IO[str] | None = None
        self._sockets: Path | None = None
        self._pipe: tuple[int, int] | None = None

    @property
    def url(self) -> str:
        """Address of the UI."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def graphql(self) -> GraphQL:
        """The webserver's GraphQL door."""
        return GraphQL(self.url)

    def pids(self) -> dict[str, int]:
        """Process ids of webserver, daemon and code_server."""
        return {name: child.pid for name, child in self._children.items()}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, timeout_s: float = 90.0) -> Self:
        """Start all three and wait until the code is loaded and the daemons run.

        Raises:
            HomeLockedError: another process does this for the same DAGSTER_HOME.
            DagsterStartError: the code cannot be loaded, or it took too long; names the log.
        """
        self._prepare()
        since_s = time.time()
        try:
            # The others take a code server that does not answer yet for one that is broken.
            self._spawn("code_server")
            self._wait(self._serves_code, timeout_s)
            self._spawn("daemon")
            self._spawn("webserver")
            self._wait(lambda: self._is_ready(since_s), timeout_s)
        except BaseException:
            self.stop()
            raise
        self._watcher.start()
        return self

    def stop(self) -> None:
        """End runs (they become canceled), then all processes. Does nothing the second time."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        # The daemon first, so that nothing new is started.
        self._signal("daemon", signal.SIGTERM)
        self._end_runs()
        for name in self._children:
            self._signal(name, signal.SIGTERM)
        _wait_gone(list(self._children.values()), PROCESSES_END_S)
        for name in self._children:
            self._signal(name, signal.SIGKILL)
        _kill_session(str(self.dagster_home))
        for child in self._children.values():
            child.wait()
        self._release()

    def _prepare(self) -> None:
        self.dagster_home.mkdir(parents=True, exist_ok=True)
        (self.dagster_home / "logs").mkdir(exist_ok=True)
        self._lock = _lock(self.dagster_home / "dev_server.lock")
        settings = self.dagster_home / "dagster.yaml"
        if not settings.exists():
            shutil.copyfile(project_root() / "dagster_home" / "dagster.yaml", settings)
        _kill_session(str(self.dagster_home))
        prepare(self.dagster_home)
        # Sockets, because their path is short here and a free port may be taken by another.
        self._sockets = Path(tempfile.mkdtemp(prefix="rmq_dagster_"))
        self._pipe = os.pipe()
        self._workspace.write_text(
            "load_from:\n"
            "  - grpc_server:\n"
            f"      socket: {self._socket}\n"
            f"      location_name: {LOCATION}\n"
        )

    def _release(self) -> None:
        for descriptor in self._pipe or ():
            os.close(descriptor)
        self._pipe = None
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    @property
    def _socket(self) -> Path:
        assert self._sockets is not None
        return self._sockets / "code_server"

    @property
    def _workspace(self) -> Path:
        assert self._sockets is not None
        return self._sockets / "workspace.yaml"

    def _commands(self) -> dict[str, list[str]]:
        workspace = ["-w", str(self._workspace)]
        return {
            "code_server": [
                *("rmq_pipeline.orchestration.code_server", "api", "grpc"),
                *("--socket", str(self._socket)),
                *("--module-name", self._module, "--working-directory", str(self._root)),
                *("--location-name", LOCATION, "--max-workers", str(CODE_SERVER_THREADS)),
                *("--log-level", "warning"),
            ],
            "daemon": ["dagster._daemon", "run", *workspace, "--log-level", "warning"],
            "webserver": [
                *("dagster_webserver", "-h", "127.0.0.1", "-p", str(self.port), *workspace),
                *("--dagster-log-level", "warning"),
            ],
        }

    def _spawn(self, name: str) -> None:
        assert self._pipe is not None
        if name == "code_server":
            self._socket.unlink(missing_ok=True)
        watched = self._pipe[0]
        supervised = [sys.executable, "-m", "rmq_pipeline.orchestration.supervised", str(watched)]
        with self.log_path(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                [*supervised, *self._commands()[name]],
                cwd=self.dagster_home,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[watched],
                start_new_session=True,
            )

    def log_path(self, name: str) -> Path:
        """Where webserver, daemon or code_server writes what it says."""
        return self.dagster_home / "logs" / f"{name}.log"

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            for name, child in self._children.items():
                if child.poll() is not None:
                    raise DagsterStartError(
                        f"Dagster's {name} ended with {child.returncode}: {self.log_path(name)}."
                    )
            if time.monotonic() > end:
                raise DagsterStartError(f"Dagster was not ready after {timeout_s:.0f} s.")
            self._stopping.wait(0.1)

    def _serves_code(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._socket)) == 0

    def _is_ready(self, since_s: float) -> bool:
        with contextlib.suppress(OSError, ValueError):
            readiness = self.graphql.readiness(since_s=since_s)
            if readiness.load_error:
                raise DagsterStartError(f"Dagster cannot load the code: {readiness.load_error}.")
            return readiness.ready
        return False

    def _keep_alive(self) -> None:
        while not self._stopping.wait(1.0):
            for name, child in list(self._children.items()):
                code = child.poll()
                if code is None:
                    continue
                try:
                    self._begin_anew(name, code)
                except (OSError, RuntimeError):
                    # Too many processes or open files, say, or a full disk: the next turn may have
                    # better luck, and nobody else would notice a dead child.
                    LOG.warning("a child is not begun anew", extra={"child": name}, exc_info=True)

    def _begin_anew(self, name: str, code: int) -> None:
        LOG.warning("restarting", extra={"child": name, "exit_code": code})
        self._signal(name, signal.SIGKILL)
        if name == "code_server":
            _report_lost_runs(self.dagster_home)
        self._spawn(name)
        self.restarts += 1

    def _end_runs(self) -> None:
        end = time.monotonic() + RUNS_END_S
        asked: set[str] = set()
        with contextlib.suppress(OSError, ValueError):
            while time.monotonic() < end:
                running = [run["runId"] for run in self.graphql.runs(statuses=UNFINISHED)]
                if not running:
                    return
                if new := [run_id for run_id in running if run_id not in asked]:
                    self.graphql.terminate(new)
                    asked.update(new)
                threading.Event().wait(0.2)

    def _signal(self, name: str, number: signal.Signals) -> None:
        child = self._children.get(name)
        if child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _lock(path: Path) -> IO[str]:
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise HomeLockedError(f"Another process runs Dagster from {path.parent}.") from None
    return file


def _wait_gone(children: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, end - time.monotonic()))


def _kill_session(home: str) -> None:
    """End what is left of a session: run workers and JVMs that were in no group we know."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(SESSION) == home:
                LOG.warning("ending a process left over", extra={"pid": process.pid})
                process.kill()


def _report_lost_runs(home: Path) -> None:
    """Report the runs of a code server as failed that died, and whose processes are gone.

    They were its children, and nobody else would notice: they would hold their slots for as long
    as a run may take. Whatever goes wrong here, the code server is begun anew.
    """
    try:
        with dg.DagsterInstance.from_config(str(home)) as instance:
            for run in instance.get_runs(dg.RunsFilter(statuses=_AT_THE_CODE_SERVER)):
                _report_lost(instance, run)
    except Exception:
        # Settings, tables, disk: each comes as another class.
        LOG.warning("runs of a dead code server cannot be reported", exc_info=True)


def _report_lost(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    try:
        instance.report_run_failed(run, "The code server died, and the process of this run with it")
    except Exception:
        # Each run has a file of its own for its events: the next may do better.
        LOG.warning("a run cannot be reported", extra={"run_id": run.run_id}, exc_info=True)
