"""Start and stop a home's broker as a process of its own."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
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
_POLL_S: Final = 0.02


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

    The new process has a session of its own and outlives this one; it writes to
    ``<home>/broker.log``. An argument left out is what the home's broker had the last time, at
    first free ports, upkeep self, flush sync. Settings that are given change those that the home
    keeps ("default": its default); without any, the file that RMQ_SETTINGS names stands for all.

    Raises:
        RequestError: a setting of that file is wrong.
        HomeLockedError: a process that serves no door has the home open.
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
    child = _spawn(home, said)
    try:
        return _wait_until_serving(home, child, give_up_at=time.monotonic() + timeout_s)
    except errors.OperatorError as error:
        if end := _tail(log_file, log_start):
            raise type(error)(f"{error.message} It said: {end}") from error
        raise
    finally:
        # A loser that is still on its way must not take the home when the winner is stopped.
        found = Endpoint.read(home)
        if found is None or found.pid != child.pid:
            child.terminate()


def _wait_until_serving(
    home: Path, child: "subprocess.Popen[bytes]", *, give_up_at: float
) -> Endpoint:
    pause = threading.Event()
    while time.monotonic() < give_up_at:
        if found := serving(home):
            return found
        # A loser of the race waits for the winner's endpoint.
        if child.poll() not in {None, HOME_LOCKED}:
            raise errors.OperatorError(f"The broker of {home} did not start.")
        pause.wait(_POLL_S)
    if child.poll() == HOME_LOCKED:
        raise errors.HomeLockedError(f"{home} is open in a process that serves no door.")
    raise errors.OperatorError(f"The broker of {home} does not answer yet.")


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


def stop(home: Path, *, timeout_s: float = 60.0) -> Endpoint | None:
    """End the home's broker and wait until it is gone; None when there was none.

    Raises:
        OperatorError: it belongs to another user, or is still there after ``timeout_s``.
    """
    endpoint = Endpoint.read(home)
    if endpoint is None or not endpoint.is_alive():
        return None
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
