"""A broker of our own: started, started again when it dies, and ended."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import ConflictError, RocketMQError
from rmq_pipeline.flight import process

log = logging.getLogger(__name__)

#: A dead broker is noticed within this time.
WATCH_S: Final = 0.1
#: A broker that does not start is tried again, with a pause, until it has failed this often.
TRIES: Final = 5
RETRY_S: Final = 2.0


class Supervisor:
    """Keeps the broker of a home running, for background work done by Dagster, until ``stop``."""

    def __init__(
        self,
        home: Path,
        *,
        flight: str | None = None,
        on_restart: Callable[[Endpoint], None] | None = None,
        on_failure: Callable[[RocketMQError], None] | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            flight: address of the table door; None: what the home remembers.
            on_restart: told, in the watching thread, of every broker but the first.
            on_failure: told that the broker cannot be started again, and nobody tries any more.
        """
        self.home = home.absolute()
        self.restarts = 0
        self._flight = flight
        self._on_restart = on_restart
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rmq-supervisor", daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        """Where the broker answers, or did before it died."""
        return self._endpoint

    def start(self) -> Endpoint:
        """The endpoint of the home's broker; one that Dagster's upkeep left running is taken over.

        Raises:
            ConflictError: a broker with another upkeep serves the home.
            OperatorError: the broker does not start.
        """
        endpoint = process.start(self.home, flight=self._flight, upkeep="dagster")
        if endpoint.upkeep != "dagster":
            raise ConflictError(
                f"A broker with upkeep {endpoint.upkeep} serves {self.home}; end it with "
                "`rmq stop` first."
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
            if self._endpoint.is_alive():
                continue
            log.warning("the broker, process %s, has ended: starting it", self._endpoint.pid)
            if not self._restart():
                return

    def _restart(self) -> bool:
        """Whether there is a broker again, or none is wanted any more."""
        failures = 0
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                self._endpoint = process.start(self.home)
            except RocketMQError as error:
                failures += 1
                log.warning("the broker does not start: %s", error)
                if failures == TRIES:
                    if self._on_failure:
                        self._on_failure(error)
                    return False
                self._stopping.wait(RETRY_S)
                continue
            log.info("the broker is back after %.1f s", time.monotonic() - started_s)
            self.restarts += 1
            if self._on_restart:
                self._on_restart(self._endpoint)
            return True
        return True
