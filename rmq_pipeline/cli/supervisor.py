"""A broker of our own: started, started again when it dies, and ended."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import ConflictError, OperatorError, RocketMQError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.flags import AS_LAST_TIME, Flags, Listening, Values

log = logging.getLogger(__name__)

#: A dead broker is noticed within this time.
WATCH_S: Final = 0.1
#: A broker that does not start is tried again, with a pause, until it has failed this often.
TRIES: Final = 5
RETRY_S: Final = 2.0


class Supervisor:
    """Keeps the broker of a home running, with its background work left to Dagster, until ``stop``.

    A broker that was stopped on purpose stays stopped; one that somebody starts then is watched.
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
            tell: told, in the watching thread, what became of the broker, a sentence each time.
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
        self._watcher = threading.Thread(target=self._watch, name="rmq-supervisor", daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        """Where the broker answers, or did before it died."""
        return self._endpoint

    def start(self) -> Endpoint:
        """The endpoint of the home's broker; one that was left running for Dagster is taken over.

        Raises:
            ConflictError: a broker with another upkeep, or other settings, serves the home.
            OperatorError: the broker does not start.
        """
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
        kept = Flags.remembered(self.home)
        if self._settings and Flags.remembered(self.home, settings=self._settings) != kept:
            raise ConflictError(
                f"A broker with other settings serves {self.home}; end it with `rmq stop` first."
            )
        self._endpoint = endpoint
        self._watcher.start()
        return endpoint

    def stop(self) -> None:
        """End the broker and wait until it is gone."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        process.stop(self.home)

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
            except OSError as error:
                # Too many open files, say: nobody else would notice a dead broker.
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
            self._endpoint = left
            return True
        return self._stopping.is_set() or self._restart()

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
                # As it was: nothing is given anew, not even by RMQ_SETTINGS.
                as_before = Listening(insecure=self._listening.insecure)
                self._endpoint = process.start(self.home, listening=as_before, settings={})
            # RuntimeError: a thread more than the system allows.
            except (RocketMQError, OSError, RuntimeError) as error:
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

    def _as_refusal(self, error: Exception) -> RocketMQError:
        if isinstance(error, RocketMQError):
            return error
        return OperatorError(f"The broker of {self.home} cannot be started: {error}.")
