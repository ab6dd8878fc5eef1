"""A producer of transactions: sends half messages, and answers when it is asked about them."""

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from rmq_pipeline.errors import BusyError
from rmq_pipeline.flight.transactions import Transaction, Transactions, end_all
from rmq_pipeline.transaction import Checker, answers

log = logging.getLogger(__name__)

#: How long a question waits at the broker: ``close`` takes as long at most.
_POLL_MS: Final = 1_000
#: After an error, before it asks again.
_PAUSE_S: Final = 1.0


class Producer:
    """Sends half messages of a producer group. A thread asks the broker which of them are open.

    What the checker raises is logged, and the broker asks again at the next check.
    """

    def __init__(
        self,
        client: Transactions,
        producer_group: str,
        *,
        checker: Checker,
        topics: Sequence[str] | None = None,
    ) -> None:
        """Begin to ask.

        Args:
            client: stays open as long as this.
            producer_group: whose transactions these are; any producer of it may be asked.
            checker: gets schema.CHECK, says commit, rollback or unknown of each, in order.
            topics: asked about; None for all that the group sends to.
        """
        self._client = client
        self._group = producer_group
        self._checker = checker
        self._topics = topics
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmq-producer", daemon=True)
        self._thread.start()

    def transaction(
        self, topic: str, messages: pa.Table, *, immunity_ms: int | None = None
    ) -> AbstractContextManager[Transaction]:
        """Half messages around local work; see ``Client.transaction``."""
        return self._client.transaction(
            topic, messages, producer_group=self._group, immunity_ms=immunity_ms
        )

    def close(self) -> None:
        """Ask no more, once the questions at hand are answered."""
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
        )
        if not checks.num_rows:
            return
        end_all(self._client, answers(checks, self._checker(checks)), producer_group=self._group)
