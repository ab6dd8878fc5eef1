"""A transactional producer: sends half messages, and answers the broker's checks."""

import logging
import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.errors import BusyError
from rmq_pipeline.flight.transactions import Transaction, end_all, kept_checks, transaction
from rmq_pipeline.transaction import Checker, answers
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Waiting time of ``fetch_checks``; ``close`` takes at most this long.
_POLL_MS: Final = 1_000
#: Pause after an error.
_PAUSE_S: Final = 1.0
#: Interval at which a slow checker is logged, and the broker is told that it is still working.
KEEP_S: Final = limits.PRODUCER_LIVE_MS / 1000 / 4


class Producer:
    """Sends half messages of a producer group; a thread fetches and answers its checks.

    An error of the checker is logged, and the broker asks again at the next check. While the
    checker works on half messages, however long, the broker asks no other client about them.
    """

    def __init__(
        self,
        client: Verbs,
        producer_group: str,
        *,
        checker: Checker,
        topics: Sequence[str] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            client: must stay open at least as long as the producer.
            producer_group: group of the transactions; the broker may ask any of its producers.
            checker: receives schema.CHECK; returns commit, rollback or unknown for each row, in
                order.
            topics: topics whose checks are fetched; None for all topics of the group.
        """
        self._client = client
        self._group = producer_group
        self._checker = checker
        self._topics = topics
        self._holder = uuid.uuid4().hex
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmq-producer", daemon=True)
        self._thread.start()

    def transaction(
        self, topic: str, messages: pa.Table, *, immunity_ms: int | None = None
    ) -> AbstractContextManager[Transaction]:
        """Send half messages around local work; see ``Client.transaction``."""
        return transaction(
            self._client,
            topic,
            messages=messages,
            producer_group=self._group,
            immunity_ms=immunity_ms,
        )

    def close(self) -> None:
        """Answer the current checks, then stop the thread."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._answer()
            except BusyError as error:
                log.info("no broker to ask: %s", error)
                self._closed.wait(_PAUSE_S)
            except Exception:
                log.exception("The checks of producer group %s are not answered.", self._group)
                self._closed.wait(_PAUSE_S)

    def _answer(self) -> None:
        checks = self._client.fetch_checks(
            topics=self._topics,
            producer_group=self._group,
            client_id=f"pid-{os.getpid()}",
            wait_ms=_POLL_MS,
            holder=self._holder,
        )
        if not checks.num_rows:
            return
        who = f"producer group {self._group}"
        with kept_checks(self._client, checks, holder=self._holder, who=who, every_s=KEEP_S):
            said = answers(checks, self._checker(checks))
            end_all(self._client, said, producer_group=self._group)
