"""Start and stop a home's broker as a process of its own."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from rmq_pipeline import errors
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight import flags
from rmq_pipeline.flight.connection import Connection
from rmq_pipeline.flight.flags import AS_LAST_TIME, SETTINGS_FILE, Flush, Listening, Upkeep, Values
from rmq_pipeline.flight.target import Target

LOG_FILE: Final = "broker.log"
ANY_PORT: Final = "127.0.0.1:0"
#: Exit code of a broker that found its home open in another process (EX_TEMPFAIL).
HOME_LOCKED: Final = 75
#: The lock of a home; it holds the number of the process that has it, or had it last.
LOCK_FILE: Final = "lock"
_POLL_S: Final = 0.02
#: A start that found the home locked is followed by another one after this long, then after longer.
_FIRST_RETRY_S: Final = 0.1
_LAST_RETRY_S: Final = 2.0


@dataclass(frozen=True)
class Ended:
    """A process that served no door any more, or not yet, and had the home open until it ended."""

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
    """The endpoint of the home's broker, started if need be; of several starters one wins.

    While another process closes the home, which takes a while, this waits for its end.

    The new process has a session of its own and outlives this one; it writes to
    ``<home>/broker.log``. An argument left out is what the home's broker had the last time, at
    first free ports, upkeep self, flush sync. Settings that are given change those that the home
    keeps ("default": its default); without any, the file that RMQ_SETTINGS names stands for all.

    Raises:
        RequestError: a setting of that file is wrong.
        HomeLockedError: a process that serves no door has the home open, and keeps it.
        OperatorError: the broker did not start; the end of its log is in the message.
    """
    home = home.absolute()
    if found := serving(home):
        return found
    if settings is None:
        settings = flags.given()
    home.mkdir(parents=True, exist_ok=True)
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
        return _spawn_until_serving(home, said, give_up_at=time.monotonic() + timeout_s)
    except errors.OperatorError as error:
        if end := _tail(log_file, log_start):
            raise type(error)(f"{error.message} It said: {end}") from error
        raise


def _spawn_until_serving(home: Path, said: dict[str, Any], *, give_up_at: float) -> Endpoint:
    pause, retry_s = threading.Event(), _FIRST_RETRY_S
    child = _spawn(home, said)
    retry_at = time.monotonic() + retry_s
    try:
        while time.monotonic() < give_up_at:
            if found := serving(home):
                return found
            code = child.poll()
            if code not in {None, HOME_LOCKED}:
                raise errors.OperatorError(f"The broker of {home} did not start.")
            # Who has the home may be about to serve it, or about to let it go.
            if code == HOME_LOCKED and time.monotonic() >= retry_at and not is_locked(home):
                child = _spawn(home, said)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                retry_at = time.monotonic() + retry_s
            pause.wait(_POLL_S)
        if child.poll() == HOME_LOCKED:
            raise errors.HomeLockedError(f"{home} is open in a process that serves no door.")
        raise errors.OperatorError(f"The broker of {home} does not answer yet.")
    finally:
        # A loser that is still on its way must not take the home when the winner is stopped.
        answering = Endpoint.read(home)
        if answering is None or answering.pid != child.pid:
            child.terminate()


def is_locked(home: Path) -> bool:
    """Whether a process has the home open, be it without a door.

    A broker that opens it in the moment of this look finds it locked, so look seldom while it is
    free.
    """
    try:
        lock = os.open(home / LOCK_FILE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # Shared, so that two who look do not see each other.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def serving(home: Path) -> Endpoint | None:
    """The endpoint of the home, if its broker answers."""
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
    """End the home's broker and wait until it is gone; None when there was none.

    A broker that already closes the home, or still opens it, has no endpoint: the first is waited
    for, the second is ended as soon as it serves.

    Args:
        tell: told, in one sentence, which process has the home open and no endpoint; as it may
            keep it, and who stops the broker can end that process.

    Raises:
        OperatorError: it belongs to another user, or is still there after ``timeout_s``; or a
            process that serves no door has the home open for that long.
    """
    give_up_at = time.monotonic() + timeout_s
    holder: psutil.Process | None = None
    pause, is_told = threading.Event(), False
    while True:
        endpoint = Endpoint.read(home)
        is_meant = endpoint is not None and (holder is None or holder.pid == endpoint.pid)
        if endpoint is not None and is_meant and endpoint.is_alive():
            left_s = round(max(0.0, give_up_at - time.monotonic()), 1)
            return _terminate(home, endpoint, timeout_s=left_s)
        if not is_locked(home):
            return _ended(holder, give_up_at=give_up_at)
        found = _holder(home)
        if holder is not None and found is not None and found != holder:
            # A start that came after this call has taken the home.
            return _ended(holder, give_up_at=give_up_at)
        holder = holder or found
        who = f"process {holder.pid}" if holder else "a process"
        if not is_told:
            tell(f"{home} is open in {who}, which serves no door: waiting until it lets it go.")
            is_told = True
        if time.monotonic() >= give_up_at:
            raise errors.OperatorError(
                f"{home} is open in {who}, which serves no door and has not let it go within "
                f"{timeout_s:g} s."
            )
        pause.wait(_POLL_S)


def _terminate(home: Path, endpoint: Endpoint, *, timeout_s: float) -> Endpoint:
    try:
        # The pid is this endpoint's as is_alive found it: psutil looks at the start time again.
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
    """The process that the lock names, if it runs; who had it last may be named for a moment."""
    try:
        return psutil.Process(int((home / LOCK_FILE).read_text()))
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None


def _ended(holder: psutil.Process | None, *, give_up_at: float) -> Ended | None:
    """The process that has let the home go, once it has ended; None if it lives on without it.

    A broker still answers running calls by then, and its ports are free when it is gone.
    """
    if holder is None or holder.pid == os.getpid():
        return None
    try:
        holder.wait(max(0.0, give_up_at - time.monotonic()))
    except psutil.TimeoutExpired:
        return None
    return Ended(holder.pid)


def _spawn(home: Path, said: dict[str, Any]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "rmq_pipeline.serving", str(home), json.dumps(said)]
    # -m puts the current folder first on the path: a stranger's folder must not hide modules.
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
    # While this process lives it is the parent: a broker that ends must not stay as a zombie.
    threading.Thread(target=child.wait, name="rmq-broker-reaper", daemon=True).start()
    return child


def _tail(log_file: Path, start: int) -> str:
    """The last line a start has written."""
    with log_file.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
