"""Prefetch of a topic for a pull consumer: one thread, one long poll for all its queues."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from rmq_pipeline.consumer.positions import Position
from rmq_pipeline.consumer.reading import Reading
from rmq_pipeline.consumer.rebalancing import Model
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.subscription import Subscription
from rmq_pipeline.errors import BusyError, IllegalOffsetError, RocketMQError
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Wait at the broker while a full queue is left out of the fetch, in ms.
HELD_BACK_MS: Final = 50
#: Pause after an error.
_PAUSE_S: Final = 1.0
#: Time that ``close`` waits for a fetch, beyond the fetch's own wait.
_PATIENCE_S: Final = 2.0
#: Maximum number of messages of a fetch.
_FETCH_ROWS: Final = 1_000


class Fetcher:
    """Thread that fetches messages for a Reading."""

    def __init__(
        self,
        verbs: Verbs,
        subscription: Subscription,
        *,
        reading: Reading,
        statistics: Statistics,
        wait_ms: int,
    ) -> None:
        """Start the thread.

        Args:
            wait_ms: how long a fetch waits at the broker.
        """
        self._wait_ms = wait_ms
        self._verbs, self._subscription = verbs, subscription
        self._reading, self._statistics = reading, statistics
        self._closed = threading.Event()
        name = f"rmq-fetch-{subscription.topic}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def fetch_moved(self) -> None:
        """Fetch, without waiting, the queues whose offset the running fetch does not know."""
        moved = self._reading.wanted(self._subscription.topic, only_moved=True)
        try:
            if moved:
                self._fetch(moved, wait_ms=0)
        except RocketMQError as error:
            # The thread will get the same error and handle it.
            log.debug("%s: %s", self._subscription.topic, error)

    def close(self) -> None:
        """Stop the thread; wait for a running fetch, for a bounded time."""
        self._closed.set()
        with self._reading.changed:
            self._reading.changed.notify_all()
        self._thread.join(_PATIENCE_S + self._wait_ms / 1000)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._fetch_once()
            except IllegalOffsetError:
                self._correct()
            except BusyError as error:
                log.info("cannot fetch from %s now: %s", self._subscription.topic, error)
                self._closed.wait(_PAUSE_S)
            except RocketMQError as error:
                self._reading.in_trouble(self._subscription.topic, error)
                self._closed.wait(_PAUSE_S)
            except Exception:
                if self._closed.is_set():
                    return  # the client may be closed too
                log.exception("a fetch of %s failed", self._subscription.topic)
                self._closed.wait(_PAUSE_S)

    def _fetch_once(self) -> None:
        topic = self._subscription.topic
        with self._reading.changed:  # so that no notification is lost between check and wait
            wanted = self._reading.wanted(topic)
            if not wanted and not self._closed.is_set():
                # The wait is bounded, because a lock becomes live without a notification.
                self._reading.changed.wait(self._wait_ms / 1000)
        if wanted:
            held_back = self._reading.is_held_back(topic)
            self._fetch(wanted, wait_ms=HELD_BACK_MS if held_back else self._wait_ms)

    def _fetch(self, wanted: dict[int, int], *, wait_ms: int) -> None:
        began = time.perf_counter()
        pulled = self._verbs.pull(
            self._subscription.topic,
            wanted,
            limit=_FETCH_ROWS,
            filter=self._subscription.filter,
            filter_type=self._subscription.filter_type,
            wait_ms=wait_ms,
        )
        took_ms = (time.perf_counter() - began) * 1000
        rows = pulled.messages.num_rows
        if rows:
            self._statistics.pulled(self._subscription.topic, messages=rows, took_ms=took_ms)
        self._reading.add(self._subscription.topic, wanted, pulled=pulled)

    def _correct(self) -> None:
        """Correct offsets past the end of their queue: the topic was deleted and recreated."""
        topic = self._subscription.topic
        try:
            rows = self._verbs.describe_topic(topic)["offsets"]
        except RocketMQError as error:
            self._reading.in_trouble(topic, error)
            self._closed.wait(_PAUSE_S)
            return
        bounds = {row["queue_id"]: (row["min_offset"], row["max_offset"]) for row in rows}
        self._reading.correct(topic, bounds)


def described(
    positions: Mapping[str, list[Position]], *, model: Model, statistics: Statistics
) -> dict[str, Any]:
    """Return the details of a pull consumer for the heartbeat: queues, rates, cached messages."""
    return {
        "model": model,
        "order": "pull",
        "queues": {
            topic: sorted(position.queue.queue_id for position in own)
            for topic, own in positions.items()
        },
        "statistics": {
            topic: {
                **statistics.report(topic),
                "cached": sum(position.waiting for position in own),
                "cached_bytes": sum(position.waiting_bytes for position in own),
            }
            for topic, own in positions.items()
        },
    }
