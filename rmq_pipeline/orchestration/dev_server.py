"""Dagster's webserver, daemon and code server as supervised child processes."""

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

from rmq_pipeline.access.source import check_free
from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import HomeLockedError, OperatorError, RequestError
from rmq_pipeline.orchestration.code_server import CANNOT_LOAD
from rmq_pipeline.orchestration.graphql import UNFINISHED, GraphQL
from rmq_pipeline.orchestration.project import CodeLocation
from rmq_pipeline.orchestration.topic_reports import CREATES

LOG: Final = logging.getLogger(__name__)
#: Settings of a new DAGSTER_HOME.
SETTINGS: Final = Path(__file__).with_name("dagster.yaml")
#: Environment variable of every process of a session, whatever its process group.
SESSION: Final = "RMQ_DAGSTER_SESSION"
#: Where the webserver listens.
HOST: Final = "127.0.0.1"
CODE_SERVER_THREADS: Final = 32
RUNS_END_S: Final = 6.0
PROCESSES_END_S: Final = 6.0
#: End of a log in which its last line is looked for.
_LINE_BYTES: Final = 16 * 1024
#: Runs in these states have a process of the code server; the daemon starts the others.
_AT_THE_CODE_SERVER: Final = (
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
_WITH_A_PROCESS: Final = tuple(status.value for status in _AT_THE_CODE_SERVER)
_NOT_OVER: Final = (
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


class DagsterStartError(OperatorError):
    """Dagster did not start."""

    remedy = "Look at the logs in DAGSTER_HOME."


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
        code: CodeLocation | None = None,
    ) -> None:
        """Create the server; no process is started yet.

        Args:
            dagster_home: created if missing, with our dagster.yaml if it has none.
            port: port of the webserver; 0 chooses a free port.
            env: additional environment variables: RMQ_HOME, RMQ_FLIGHT, ...
            code: the code to load; default: that of the current folder.
        """
        self.dagster_home = dagster_home.resolve()
        self.port = port or _free_port()
        self.restarts = 0
        #: Seconds since 1970.
        self._started_s = 0.0
        self._code = code or CodeLocation.find()
        known = os.environ.get("PYTHONPATH")
        self._env = {
            **os.environ,
            # Subprocesses of a run, such as Spark workers, must find the code too.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self._code.folder), known])),
            **(env or {}),
            "DAGSTER_HOME": str(self.dagster_home),
            "DAGSTER_DISABLE_TELEMETRY": "1",
            # A run that starts a local Spark by itself would ask the network for this machine's
            # address. Sessions on a cluster ignore it (spark.session.prepare_environment).
            "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
            SESSION: str(self.dagster_home),
        }
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        #: Held by the thread that ends or starts children.
        self._changing = threading.Lock()
        self._watcher = threading.Thread(target=self._keep_alive, name="dagster-watch", daemon=True)
        self._lock: IO[str] | None = None
        self._sockets: Path | None = None
        self._pipe: tuple[int, int] | None = None

    @property
    def url(self) -> str:
        """Address of the UI."""
        return f"http://{HOST}:{self.port}"

    @property
    def graphql(self) -> GraphQL:
        """GraphQL endpoint of the webserver."""
        return GraphQL(self.url)

    def pids(self) -> dict[str, int]:
        """Return the process ids of webserver, daemon and code_server."""
        return {name: child.pid for name, child in self._children.items()}

    def code_since_s(self) -> float:
        """Return when the code was loaded, in seconds since 1970."""
        return psutil.Process(self._children["code_server"].pid).create_time()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, timeout_s: float = 90.0) -> Self:
        """Start all processes, and wait until the code is loaded and the daemons run.

        Raises:
            HomeLockedError: another process runs Dagster from the same DAGSTER_HOME.
            RequestError: another process has the port.
            DagsterStartError: the code cannot be loaded, or the start took too long; names the log.
        """
        self._prepare()
        since_s = self._started_s = time.time()
        try:
            # Daemon and webserver treat a code server that does not answer yet as broken.
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

    def wait_for_topics(
        self, over: Callable[[float], bool], *, timeout_s: float = 20.0
    ) -> list[str]:
        """Wait until the sensors that create declared topics have had a tick.

        Args:
            over: waits for some seconds, and returns True to stop waiting.
            timeout_s: how long to wait at most.

        Returns:
            The names of sensors without a tick that succeeded.
        """
        deadline = Deadline(timeout_s)
        while True:
            with contextlib.suppress(OSError, ValueError):  # of a webserver that is busy
                lacking = self.graphql.sensors_without_tick(CREATES, since_s=self._started_s)
                if not lacking or deadline.is_over:
                    return lacking
            if deadline.is_over or over(0.2):
                return []

    def reload_code(self, *, over: threading.Event, timeout_s: float = 90.0) -> None:
        """End the runs under way (they become canceled), and load the code again.

        The daemon is stopped meanwhile, so that it starts no run. Messages that a run had not
        settled are redelivered to the next one.

        Args:
            over: set to stop waiting.
            timeout_s: how long the new code may take to load.

        Raises:
            DagsterStartError: the new code server does not answer.
        """
        with self._changing:
            if self._stopping.is_set():
                return
            self._end("daemon")
            self._end_runs(_WITH_A_PROCESS)
            self._end("code_server")
            _report_lost_runs(self.dagster_home)
            try:
                self._spawn("code_server")
                self._wait(lambda: over.is_set() or self._serves_code(), timeout_s)
            finally:
                self._spawn("daemon")

    def check_code(self, *, over: threading.Event, timeout_s: float = 120.0) -> str:
        """Load the code in a new process; return why it cannot be loaded, or an empty text.

        Args:
            over: set to give up.
            timeout_s: how long it may take.
        """
        command = ["definitions", "validate", "--log-level", "error"]
        command += ["-m", self._code.module, "-d", str(self._code.folder)]
        # A file: a process that the code starts could keep a pipe open.
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "dagster", *command],
                cwd=self.dagster_home,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            deadline = Deadline(timeout_s)
            while child.poll() is None and not deadline.is_over and not over.is_set():
                over.wait(0.1)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        if deadline.is_over:
            return f"It was not loaded within {timeout_s:g} s.\n{said}".strip()
        return said or "Dagster ended without an error." if child.returncode else ""

    def _end(self, name: str) -> None:
        child = self._children[name]
        self._signal(name, signal.SIGTERM)
        _wait_gone([child], PROCESSES_END_S)
        self._signal(name, signal.SIGKILL)
        child.wait()
        # No restart, and no error that it has ended.
        del self._children[name]

    def stop(self) -> None:
        """End all runs (they become canceled), then all processes. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        with self._changing:
            self._end_all()

    def _end_all(self) -> None:
        # Stop the daemon first, so that no new runs are started.
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
            shutil.copyfile(SETTINGS, settings)
        _kill_session(str(self.dagster_home))
        try:
            # After the end of an older session, whose webserver may have had the port.
            check_free(HOST, self.port)
            prepare_home(self.dagster_home)
        except RequestError:
            self._release()
            raise
        except Exception as error:
            # Errors of settings, drivers and databases have different classes.
            self._release()
            raise DagsterStartError(
                f"Dagster cannot open its storage in {self.dagster_home}: "
                f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                remedy="Correct dagster.yaml there, or start the database that it names.",
            ) from error
        # Unix sockets, because their path is short here, and a free port may be taken by another
        # process.
        self._sockets = Path(tempfile.mkdtemp(prefix="rmq_dagster_"))
        self._pipe = os.pipe()
        self._workspace.write_text(
            "load_from:\n"
            "  - grpc_server:\n"
            f"      socket: {self._socket}\n"
            f"      location_name: {self._code.name}\n"
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
                *("--module-name", self._code.module),
                *("--working-directory", str(self._code.folder)),
                *("--location-name", self._code.name, "--max-workers", str(CODE_SERVER_THREADS)),
                *("--log-level", "warning"),
            ],
            "daemon": ["dagster._daemon", "run", *workspace, "--log-level", "warning"],
            "webserver": [
                *("dagster_webserver", "-h", HOST, "-p", str(self.port), *workspace),
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
        """Return the log file of webserver, daemon or code_server."""
        return self.dagster_home / "logs" / f"{name}.log"

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        while not condition():
            for name, child in self._children.items():
                if child.poll() is not None:
                    raise self._ended(name, child.returncode)
            if self._stopping.is_set():
                return
            if deadline.is_over:
                raise DagsterStartError(f"Dagster was not ready after {timeout_s:.0f} s.")
            self._stopping.wait(0.1)

    def _ended(self, name: str, code: int) -> DagsterStartError:
        path = self.log_path(name)
        if name == "code_server" and code == CANNOT_LOAD:
            says = _last_line(path).rstrip(".")
            return DagsterStartError(
                f"Dagster cannot load {self._code.module} in {self._code.folder}: {says}.",
                remedy=f"Correct the code. Its traceback is at the end of {path}.",
            )
        return DagsterStartError(f"Dagster's {name} ended with {code}: {path}.")

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
            with self._changing:
                self._restart_dead()

    def _restart_dead(self) -> None:
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is None:
                continue
            try:
                self._restart(name, code)
            except (OSError, RuntimeError):
                # For example too many processes or open files, or a full disk: the next attempt
                # may succeed, and no other process watches the child.
                LOG.warning("a child is not restarted", extra={"child": name}, exc_info=True)

    def _restart(self, name: str, code: int) -> None:
        LOG.warning("restarting", extra={"child": name, "exit_code": code})
        self._signal(name, signal.SIGKILL)
        if name == "code_server":
            _report_lost_runs(self.dagster_home)
        self._spawn(name)
        self.restarts += 1

    def _end_runs(self, statuses: tuple[str, ...] = UNFINISHED) -> None:
        deadline = Deadline(RUNS_END_S)
        asked: set[str] = set()
        with contextlib.suppress(OSError, ValueError):
            while not deadline.is_over:
                running = [run["runId"] for run in self.graphql.runs(statuses=statuses)]
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


def _last_line(path: Path) -> str:
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LINE_BYTES))
        return log.read().decode(errors="replace").rstrip().rpartition("\n")[2]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
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
    deadline = Deadline(timeout_s)
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(deadline.left_s)


def _kill_session(home: str) -> None:
    """Kill remaining processes of a session: run workers and JVMs in unknown process groups."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(SESSION) == home:
                LOG.warning("ending a process left over", extra={"pid": process.pid})
                process.kill()


def _report_lost_runs(home: Path) -> None:
    """Report the runs of a dead code server as failed.

    The processes of the runs were its children and are gone, and no other process would notice. The
    runs would occupy their slots until the maximum runtime. An error here must not prevent the
    restart of the code server.
    """
    try:
        with dg.DagsterInstance.from_config(str(home)) as instance:
            for run in instance.get_runs(dg.RunsFilter(statuses=_AT_THE_CODE_SERVER)):
                _report_lost(instance, run)
    except Exception:
        # Errors of settings, tables and disk have different classes.
        LOG.warning("runs of a dead code server cannot be marked as failed", exc_info=True)


def _report_lost(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    try:
        instance.report_run_failed(run, "The code server died, and the process of this run with it")
    except Exception:
        # Each run has its own event file, so the next run may still be reported.
        LOG.warning("a run cannot be marked as failed", extra={"run_id": run.run_id}, exc_info=True)


def prepare_home(dagster_home: Path) -> list[str]:
    """Create the tables, report runs without a process as failed, and return their ids.

    Call it only while no Dagster process uses the home. Processes that start together on an empty
    home conflict while creating the tables. After a power cut or kill -9 of everything, no other
    process would notice the lost runs. They would occupy their slots forever.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        lost = instance.get_runs(dg.RunsFilter(statuses=_NOT_OVER))
        for run in lost:
            instance.report_run_failed(run, "The process of this run was gone at the next start.")
        return [run.run_id for run in lost]
