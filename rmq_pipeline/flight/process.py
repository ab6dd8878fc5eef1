"""Start and stop of a home's broker as a process of its own, and the wait for its stop signal."""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil

from rmq_pipeline import durable_files, errors, extras
from rmq_pipeline.clock import Deadline
from rmq_pipeline.endpoint import LOCK_FILE, Endpoint
from rmq_pipeline.flight import flags
from rmq_pipeline.flight.connection import Connection, Target
from rmq_pipeline.flight.flags import AS_LAST_TIME, SETTINGS_FILE, Flush, Listening, Upkeep, Values

LOG_FILE: Final = "broker.log"
ANY_PORT: Final = "127.0.0.1:0"
#: Exit code of a broker whose home is open in another process (EX_TEMPFAIL).
HOME_LOCKED: Final = 75
#: Exit code of a broker that cannot reopen its store, while a new process can (EX_IOERR).
STORE_FAILED: Final = 74
#: Exit code of a broker whose log another broker has taken over (EX_NOPERM).
LOG_FENCED: Final = 77
_POLL_S: Final = 0.02
#: If a start finds the home locked, the next start follows after this delay, which doubles.
_FIRST_RETRY_S: Final = 0.1
_LAST_RETRY_S: Final = 2.0


@dataclass(frozen=True)
class Ended:
    """A stopped process that had the home open without serving an endpoint."""

    pid: int


def start(
    home: Path,
    *,
    listening: Listening = AS_LAST_TIME,
    upkeep: Upkeep | None = None,
    flush: Flush | None = None,
    settings: Values | None = None,
    timeout_s: float = 60.0,
) -> Endpoint:
    """Return the endpoint of the home's broker; start the broker if needed.

    Concurrent starts are safe: one of them wins. If another process is closing the home, the call
    waits until that process has ended.

    The new process has its own session and outlives this process; it logs to ``<home>/broker.log``.
    Omitted arguments keep the values of the last start. The first start uses free ports, upkeep
    self and flush sync. Given settings change the stored ones ("default" resets a setting). Without
    given settings, the file named by RMQ_SETTINGS replaces all.

    Raises:
        MissingExtraError: the extra ``broker`` is not installed.
        RequestError: a setting in that file is invalid, or log_store is.
        HomeLockedError: a process without an endpoint keeps the home open.
        OperatorError: the broker did not start; the message contains the end of its log.
    """
    home = home.absolute()
    if found := serving(home):
        return found
    extras.check("broker")
    if settings is None:
        settings = flags.given()
    elif "log_store" in settings:  # others are checked by the process, whose command line has them
        flags.checked({"log_store": settings["log_store"]})
    durable_files.make_folder(home)
    log_file = home / LOG_FILE
    log_start = log_file.stat().st_size if log_file.exists() else 0
    if listening.flight is None and not (home / SETTINGS_FILE).exists():
        listening = replace(listening, flight=ANY_PORT, grpc=listening.grpc or ANY_PORT)
    said = {
        "listening": asdict(listening),
        "upkeep": upkeep,
        "flush": flush,
        "settings": settings,
    }
    try:
        return _spawn_until_serving(home, said, deadline=Deadline(timeout_s))
    except errors.OperatorError as error:
        if end := _tail(log_file, log_start):
            raise type(error)(f"{error.message} Its log ends with: {end}") from error
        raise


def _spawn_until_serving(home: Path, said: dict[str, Any], *, deadline: Deadline) -> Endpoint:
    pause, retry_s = threading.Event(), _FIRST_RETRY_S
    child = _spawn(home, said)
    retry = Deadline(retry_s)
    try:
        while not deadline.is_over:
            if found := serving(home):
                return found
            code = child.poll()
            if code not in {None, HOME_LOCKED}:
                raise errors.OperatorError(f"The broker of {home} did not start.")
            # The process that holds the home may be about to serve it, or about to release it.
            if code == HOME_LOCKED and retry.is_over and not is_locked(home):
                child = _spawn(home, said)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                retry = Deadline(retry_s)
            pause.wait(_POLL_S)
        if child.poll() == HOME_LOCKED:
            raise errors.HomeLockedError(f"{home} is open in a process that serves no endpoint.")
        raise errors.OperatorError(f"The broker of {home} does not answer yet.")
    finally:
        # A losing process that is still starting must not take the home when the winner is stopped.
        answering = Endpoint.read(home)
        if answering is None or answering.pid != child.pid:
            child.terminate()


def is_locked(home: Path) -> bool:
    """Return True if a process has the home open, even without an endpoint.

    A broker that opens the home during this check finds it locked, so check rarely while it is
    free.
    """
    try:
        lock = os.open(home / LOCK_FILE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # A shared lock, so that concurrent checks do not see each other.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def serving(home: Path) -> Endpoint | None:
    """Return the endpoint of the home if its broker answers, else None."""
    endpoint = Endpoint.read(home)
    if endpoint is None or not endpoint.is_alive():
        return None
    connection = Connection(Target(home=home), retry_s=0)
    try:
        answer = connection.call("ping", {})
    except errors.BrokerUnavailableError:
        return None
    finally:
        connection.close()
    return endpoint if answer["pid"] == endpoint.pid else None


def stop(
    home: Path, *, timeout_s: float = 60.0, tell: Callable[[str], None] = lambda _: None
) -> Endpoint | Ended | None:
    """Stop the home's broker and wait until it has exited; return None if none was running.

    A broker that is opening or closing the home has no endpoint. The call waits for a closing
    broker to exit, and stops an opening broker as soon as it serves.

    Args:
        tell: called with one sentence that names the process without an endpoint. That process may
            keep the home open, and the operator may then end it.

    Raises:
        ConflictError: this process itself has the home open.
        OperatorError: the process belongs to another user, or has not exited after ``timeout_s``;
            or a process without an endpoint keeps the home open that long.
    """
    deadline = Deadline(timeout_s)
    holder: psutil.Process | None = None
    pause, is_told = threading.Event(), False
    while True:
        endpoint = Endpoint.read(home)
        is_meant = endpoint is not None and (holder is None or holder.pid == endpoint.pid)
        if is_locked(home) and _holder_pid(home) == os.getpid():
            raise errors.ConflictError(
                f"{home} is open in this process, {os.getpid()}: close its Broker instead of "
                "stopping the process."
            )
        if endpoint is not None and is_meant and endpoint.is_alive():
            return _terminate(home, endpoint, timeout_s=round(deadline.left_s, 1))
        if not is_locked(home):
            return _ended(holder, deadline=deadline)
        found = _holder(home)
        if holder is not None and found is not None and found != holder:
            # A later start has taken the home.
            return _ended(holder, deadline=deadline)
        holder = holder or found
        who = f"process {holder.pid}" if holder else "a process"
        if not is_told:
            tell(f"{home} is open in {who}, which serves no endpoint; waiting until it ends.")
            is_told = True
        if deadline.is_over:
            raise errors.OperatorError(
                f"{home} is open in {who}, which serves no endpoint and has not ended within "
                f"{timeout_s:g} s."
            )
        pause.wait(_POLL_S)


def _terminate(home: Path, endpoint: Endpoint, *, timeout_s: float) -> Endpoint:
    try:
        # is_alive checked that the pid belongs to this endpoint; psutil checks the start time
        # again.
        process = psutil.Process(endpoint.pid)
        process.terminate()
        process.wait(timeout_s)
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as error:
        raise errors.OperatorError(
            f"The broker of {home}, process {endpoint.pid}, belongs to another user."
        ) from error
    except psutil.TimeoutExpired as error:
        raise errors.OperatorError(
            f"The broker of {home}, process {endpoint.pid}, has not ended within {timeout_s:g} s."
        ) from error
    endpoint.remove()
    return endpoint


def _holder(home: Path) -> psutil.Process | None:
    """Return the running process that the lock names; briefly it may still name the last holder."""
    pid = _holder_pid(home)
    try:
        return psutil.Process(pid) if pid is not None else None
    except psutil.NoSuchProcess:
        return None


def _holder_pid(home: Path) -> int | None:
    try:
        return int((home / LOCK_FILE).read_text())
    except (OSError, ValueError):
        return None


def _ended(holder: psutil.Process | None, *, deadline: Deadline) -> Ended | None:
    """Wait until the process that released the home has ended; None if it keeps running.

    A broker may still be answering calls after it has released the home. Its ports are free only
    after it has exited.
    """
    if holder is None or holder.pid == os.getpid():
        return None
    try:
        holder.wait(deadline.left_s)
    except psutil.TimeoutExpired:
        return None
    return Ended(holder.pid)


def _spawn(home: Path, said: dict[str, Any]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "rmq_pipeline.serving", str(home), json.dumps(said)]
    # -m puts the current folder first on the module path, where foreign files could hide modules.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    with (home / LOG_FILE).open("ab") as log:
        child = subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    # This process is the parent and must reap the broker, or it would remain a zombie.
    threading.Thread(target=child.wait, name="rmq-broker-reaper", daemon=True).start()
    return child


def _tail(log_file: Path, start: int) -> str:
    """Return the last line that a start has written."""
    with log_file.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


class Interruption:
    """A stop request: the first SIGINT or SIGTERM, or ``set``. Used in the main thread.

    Python runs signal handlers when the main thread wakes, but the system may deliver a signal to
    another thread, which wakes nothing. The wakeup pipe wakes the reader in both cases.
    """

    def __init__(self) -> None:
        """Install the handlers: the first signal only ends the wait, a second Ctrl-C interrupts."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def set(self) -> None:
        """End the wait; may be called from any thread."""
        os.write(self._writer, b"\0")

    def wait(self, within_s: float | None = None) -> bool:
        """Wait for the stop request; return False if none came within a time."""
        ready, _, _ = select.select([self._reader], [], [], within_s)
        return bool(ready)

    @staticmethod
    def _note(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
