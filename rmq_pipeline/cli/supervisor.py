"""Supervisor of a broker process: starts it, restarts it after a crash, and stops it."""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import psutil

from rmq_pipeline import durable_files
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import ConflictError, HomeLockedError, OperatorError, RocketMQError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.connection import Connection, Target
from rmq_pipeline.flight.flags import (
    AS_LAST_TIME,
    NO_ENDPOINT,
    Flags,
    Flush,
    Listening,
    Upkeep,
    Values,
    checked,
)

log = logging.getLogger(__name__)

#: Interval between two checks of the broker process.
WATCH_S: Final = 0.1
#: Failed starts after which the supervisor gives up, with a pause after each one.
TRIES: Final = 5
RETRY_S: Final = 2.0
#: Time for a running broker to report its settings.
ASK_S: Final = 10.0
#: Separate from the broker's lock: the supervisor holds it also while the broker is down.
LOCK_FILE: Final = "supervisor.lock"


class Supervisor:
    """Supervisor of a home's broker, which leaves its background work to Dagster.

    A broker that was stopped on purpose stays stopped. If another process then starts a broker,
    the supervisor watches that one. A home has one supervisor: a second one would stop the
    broker of the first.
    """

    def __init__(
        self,
        home: Path,
        listening: Listening = AS_LAST_TIME,
        *,
        settings: Values | None = None,
        tell: Callable[[str], None] = log.warning,
        on_failure: Callable[[RocketMQError], None] = lambda _: None,
        retry_s: float = RETRY_S,
    ) -> None:
        """Prepare a supervisor; ``start`` starts the broker.

        Args:
            home: the directory of the broker's files.
            listening: addresses and TLS; omitted values come from the last run.
            settings: changes to the stored settings.
            tell: receives sentences about crashes, restarts and a slow stop. The watching
                thread calls it.
            on_failure: receives the error after the last failed start.
            retry_s: the pause after a failed start.
        """
        self.home = home.absolute()
        self.restarts = 0
        self._listening = listening
        self._settings = settings
        self._tell = tell
        self._on_failure = on_failure
        self._retry_s = retry_s
        self._stopping = threading.Event()
        #: Held from ``start`` until the broker has exited; without it, ``stop`` leaves any broker.
        self._supervision: Supervision | None = None
        self._watcher = threading.Thread(target=self._watch, name="rmq-supervisor", daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint of the running broker, or of the last one if it died."""
        return self._endpoint

    def start(self) -> Endpoint:
        """Start the home's broker and return its endpoint.

        A broker with upkeep "dagster" that is already running is taken over.

        Raises:
            HomeLockedError: another supervisor has the home; its broker is left alone.
            ConflictError: a broker with another upkeep or other settings serves the home.
            OperatorError: the broker does not start.
        """
        supervision = Supervision.begin(self.home)
        try:
            self._endpoint = self._started()
            self._watcher.start()
        except BaseException:
            supervision.end()
            raise
        self._supervision = supervision
        return self._endpoint

    def _started(self) -> Endpoint:
        endpoint = process.start(
            self.home,
            listening=self._listening,
            upkeep="dagster",
            settings=self._settings,
        )
        if endpoint.upkeep != "dagster":
            raise ConflictError(
                f"A broker with upkeep {endpoint.upkeep} serves {self.home}, not dagster.",
                remedy="Stop it with `rmq stop` first.",
            )
        self._check_settings()
        return endpoint

    def _check_settings(self) -> None:
        """Refuse a running broker whose settings differ from the given ones.

        The broker reports them itself: on a full disk the home may have older settings.
        """
        if not self._settings:
            return
        wanted = checked(self._settings).model_dump(mode="json")
        connection = Connection(Target(home=self.home), retry_s=ASK_S)
        try:
            found = connection.call("status", {})["settings"]
        finally:
            connection.close()
        if any(found.get(name) != wanted[name] for name in self._settings):
            raise ConflictError(
                f"A broker with other settings serves {self.home}.",
                remedy="Stop it with `rmq stop` first.",
            )

    def stop(self) -> None:
        """Stop the broker and wait until it has exited; does nothing before ``start``.

        After a failed stop the supervisor still has the home, so ``stop`` can be called again.
        """
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._supervision is not None:
            process.stop(self.home, tell=self._say)
            self._supervision.end()
            self._supervision = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_S):
            try:
                if not self._look():
                    return
            except (OSError, psutil.Error) as error:
                # For example too many open files. The watch must go on: no other process would
                # notice a dead broker.
                log.warning("the broker cannot be watched: %s", error)
                self._stopping.wait(self._retry_s)

    def _look(self) -> bool:
        """Check the broker and restart it if it died; return False if it does not start."""
        if self._endpoint.is_alive():
            return True
        # A broker removes its endpoint file when it stops in order, not when it dies.
        left = Endpoint.read(self.home)
        if left is None:
            self._say("The broker was stopped. `rmq broker` starts it again.")
            left = self._wait_for_another()
        if left is not None and left.is_alive():
            self._take_over(left)
            return True
        return self._stopping.is_set() or self._restart()

    def _take_over(self, endpoint: Endpoint) -> None:
        """Watch a broker that another process started; our settings and addresses do not apply."""
        self._endpoint = endpoint
        self._settings = None
        self._listening = Listening(insecure=self._listening.insecure)

    def _say(self, sentence: str) -> None:
        """Report a sentence; a closed pipe must not end the watch."""
        try:
            self._tell(sentence)
        except Exception:
            log.warning("could not report: %s", sentence, exc_info=True)

    def _wait_for_another(self) -> Endpoint | None:
        """Wait until another process has started a broker; None if the supervisor stops."""
        while not self._stopping.wait(WATCH_S):
            if found := Endpoint.read(self.home):
                return found
        return None

    def _restart(self) -> bool:
        """Restart the broker; return False after the last failed start."""
        died_s = time.monotonic()
        for attempt in range(1, TRIES + 1):
            try:
                self._endpoint = self._start_as_before(is_last=attempt == TRIES)
            # RuntimeError: the system allows no more threads. ValueError: the stored flags are not
            # JSON.
            except (RocketMQError, OSError, psutil.Error, RuntimeError, ValueError) as error:
                log.warning("the broker does not start: %s", error)
                if attempt == TRIES:
                    self._on_failure(self._as_refusal(error))
                elif self._stopping.wait(self._retry_s):
                    return False
                continue
            self.restarts += 1
            away_s = time.monotonic() - died_s
            self._say(
                f"The broker died; restarted as process {self._endpoint.pid} after {away_s:.1f} s."
            )
            return True
        return False

    def _start_as_before(self, *, is_last: bool) -> Endpoint:
        """Start a broker with the flags of the dead one, regardless of RMQ_SETTINGS.

        Addresses equal to the stored ones are omitted, so that a free port can replace a taken
        one. On a full disk the home may have the flags of an earlier run, so differing addresses
        are given explicitly. The last try omits all addresses.
        """
        was, kept = self._endpoint, Flags.remembered(self.home)
        endpoints = {"flight": was.flight, "grpc": was.grpc, "grpc_tls": was.grpc_tls}
        served = {name: address or NO_ENDPOINT for name, address in endpoints.items()}
        given = {name: at for name, at in served.items() if at != getattr(kept, name)}
        if is_last:
            given = {}
        return process.start(
            self.home,
            listening=Listening(
                **given, tls=self._listening.tls, insecure=self._listening.insecure
            ),
            upkeep=cast("Upkeep", was.upkeep),
            flush=cast("Flush", was.flush),
            settings=self._settings or {},
        )

    def _as_refusal(self, error: Exception) -> RocketMQError:
        if isinstance(error, RocketMQError):
            return error
        return OperatorError(f"The broker of {self.home} does not start: {error}.")


class SupervisedError(HomeLockedError):
    """Another process supervises the broker of the home."""

    remedy = "Use that one, or stop it first with Ctrl-C where it runs."


class Supervision:
    """Lock of the home's supervisor; the system releases it when the process ends."""

    def __init__(self, lock: int) -> None:
        self._lock = lock

    @classmethod
    def begin(cls, home: Path) -> Self:
        """Lock the home against other supervisors; creates a missing home.

        Raises:
            SupervisedError: another supervisor has the lock; the error has its process id.
        """
        durable_files.make_folder(home)
        # Child processes do not inherit the descriptor: a broker that survives its supervisor
        # must not hold the lock.
        lock = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise SupervisedError(
                f"Process {holder} already supervises the broker of {home}."
            ) from None
        # The process id serves only that error message; a full disk must not prevent the lock.
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        return cls(lock)

    def end(self) -> None:
        """Release the lock."""
        os.close(self._lock)
