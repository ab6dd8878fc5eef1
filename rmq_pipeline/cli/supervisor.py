"""A broker of our own: started, started again when it dies, and ended."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import psutil

from rmq_pipeline.cli.supervision import Supervision
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import ConflictError, OperatorError, RocketMQError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.connection import Connection
from rmq_pipeline.flight.flags import (
    AS_LAST_TIME,
    NO_DOOR,
    Flags,
    Flush,
    Listening,
    Upkeep,
    Values,
    checked,
)
from rmq_pipeline.flight.target import Target

log = logging.getLogger(__name__)

#: A dead broker is noticed within this time.
WATCH_S: Final = 0.1
#: A broker that does not start is tried again, with a pause, until it has failed this often.
TRIES: Final = 5
RETRY_S: Final = 2.0
#: A broker that has just been found is asked for its settings for this long.
ASK_S: Final = 10.0


class Supervisor:
    """Keeps the broker of a home running, with its background work left to Dagster, until ``stop``.

    A broker that was stopped on purpose stays stopped; one that somebody starts then is watched.
    A home has one supervisor: a second one would end the broker of the first.
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
        """Nothing is started yet.

        Args:
            listening: where and how; what it leaves open is as the home remembers it.
            settings: changes to those that the home keeps.
            tell: told what became of the broker, in the watching thread, and whom its end waits
                for, a sentence each time.
            on_failure: told that the broker does not start again, and nobody tries any more.
            retry_s: the pause after a start that failed.
        """
        self.home = home.absolute()
        self.restarts = 0
        self._listening = listening
        self._settings = settings
        self._tell = tell
        self._on_failure = on_failure
        self._retry_s = retry_s
        self._stopping = threading.Event()
        #: From the start until the broker is gone; without it the broker is nothing to us.
        self._supervision: Supervision | None = None
        self._watcher = threading.Thread(target=self._watch, name="rmq-supervisor", daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        """Where the broker answers, or did before it died."""
        return self._endpoint

    def start(self) -> Endpoint:
        """The endpoint of the home's broker; one that was left running for Dagster is taken over.

        Raises:
            HomeLockedError: another supervisor keeps the home's broker, which is left alone.
            ConflictError: a broker with another upkeep, or other settings, serves the home.
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
                f"A broker with upkeep {endpoint.upkeep} serves {self.home}; end it with "
                "`rmq stop` first."
            )
        self._check_settings()
        return endpoint

    def _check_settings(self) -> None:
        """Refuse a broker whose settings are not those that were given.

        The broker itself is asked: on a full disk the home may not say what it was started with.
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
                f"A broker with other settings serves {self.home}; end it with `rmq stop` first."
            )

    def stop(self) -> None:
        """End the broker and wait until it is gone; nothing, unless it was started.

        A stop that fails can be tried again: the broker is still ours.
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
                # Too many open files, say, or a process that may not be looked at: nobody else
                # would notice a dead broker.
                log.warning("the broker cannot be watched: %s", error)
                self._stopping.wait(self._retry_s)

    def _look(self) -> bool:
        """See that the broker runs; False when it does not start again."""
        if self._endpoint.is_alive():
            return True
        # A broker takes its endpoint with it when it ends in order, not when it dies.
        left = Endpoint.read(self.home)
        if left is None:
            self._say("The broker was stopped; it stays so until `rmq broker` starts it.")
            left = self._wait_for_another()
        if left is not None and left.is_alive():
            self._take_over(left)
            return True
        return self._stopping.is_set() or self._restart()

    def _take_over(self, endpoint: Endpoint) -> None:
        """Watch somebody else's broker, which our settings and addresses are nothing to."""
        self._endpoint = endpoint
        self._settings = None
        self._listening = Listening(insecure=self._listening.insecure)

    def _say(self, sentence: str) -> None:
        """Tell, to whom there may be nobody left: a pipe that is closed ends no watch."""
        try:
            self._tell(sentence)
        except Exception:
            log.warning("nobody could be told: %s", sentence, exc_info=True)

    def _wait_for_another(self) -> Endpoint | None:
        """The endpoint that somebody else's broker has left; None when we are to end."""
        while not self._stopping.wait(WATCH_S):
            if found := Endpoint.read(self.home):
                return found
        return None

    def _restart(self) -> bool:
        """Start the broker again; False when it will not."""
        died_s = time.monotonic()
        for attempt in range(1, TRIES + 1):
            try:
                self._endpoint = self._start_as_before(is_last=attempt == TRIES)
            # RuntimeError: a thread more than the system allows. ValueError: what the home
            # remembers is no JSON.
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
                f"The broker died; it is back as process {self._endpoint.pid} after {away_s:.1f} s."
            )
            return True
        return False

    def _start_as_before(self, *, is_last: bool) -> Endpoint:
        """Start a broker that is as the dead one was, whatever RMQ_SETTINGS says by now.

        What the home remembers is not given again: a port that is taken is exchanged then. But on
        a full disk it may remember an earlier broker; the last try does without the addresses.
        """
        was, kept = self._endpoint, Flags.remembered(self.home)
        doors = {"flight": was.flight, "grpc": was.grpc, "grpc_tls": was.grpc_tls}
        served = {name: address or NO_DOOR for name, address in doors.items()}
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
        return OperatorError(f"The broker of {self.home} cannot be started: {error}.")
