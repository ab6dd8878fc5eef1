"""Half messages around local work, answers to checks, and the producer that sends both."""

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.errors import (
    BusyError,
    FencedError,
    RocketMQError,
    StorageError,
    StoreFullError,
    UnauthorizedError,
)
from rmq_pipeline.transaction import COMMIT, ROLLBACK, Checker, Rollback, answers
from rmq_pipeline.verb import Window
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Errors that every part of a request would raise: they are not the fault of one transaction.
_OF_THE_WHOLE: Final = (BusyError, FencedError, StorageError, StoreFullError, UnauthorizedError)


class Transaction:
    """Sent half messages, until they are committed or rolled back."""

    def __init__(self, client: Verbs, sent: pa.Table, *, producer_group: str) -> None:
        self._client = client
        #: schema.SENT_HALF.
        self.sent = sent
        self._producer_group = producer_group
        self._decided = False

    def commit(self) -> None:
        """Deliver the messages to consumers now."""
        self._end(COMMIT)

    def rollback(self) -> None:
        """Discard the messages."""
        self._end(ROLLBACK)

    def unknown(self) -> None:
        """Leave the decision to the checker."""
        self._decided = True

    def finish(self) -> None:
        """Commit, unless the transaction was decided before."""
        if not self._decided:
            self.commit()

    def leave_open(self, error: BaseException) -> None:
        """Leave the decision to the checker after an error, unless it was decided before."""
        if not self._decided:
            self.unknown()
            log.warning(
                "the local work of a transaction raised; the check decides",
                extra={"error": repr(error), "messages": self.sent.num_rows},
            )

    def _end(self, resolution: str) -> None:
        ids = self.sent.column("transaction_id")
        ends = pa.table({"transaction_id": ids, "resolution": [resolution] * len(ids)})
        # Set before the call: if its answer is lost, the other resolution must not be sent. If the
        # broker refuses the call, there is nothing left to roll back either.
        self._decided = True
        self._client.end_transactions(ends, producer_group=self._producer_group)


@contextmanager
def transaction(
    client: Verbs, topic: str, *, messages: pa.Table, producer_group: str, immunity_ms: int | None
) -> Iterator[Transaction]:
    """Send half messages around local work; see ``Client.transaction``."""
    sent = client.send_half(topic, messages, producer_group=producer_group, immunity_ms=immunity_ms)
    begun = Transaction(client, sent, producer_group=producer_group)
    try:
        yield begun
    except Rollback:
        begun.rollback()
        return
    except BaseException as error:
        begun.leave_open(error)
        raise
    begun.finish()


@contextmanager
def kept_checks(
    client: Verbs, checks: pa.Table, *, holder: str, who: str, every_s: float
) -> Iterator[None]:
    """Keep checks for this caller while the block works on them, and release them after it.

    A thread tells the broker that the work continues. It logs the duration, and each time that the
    broker keeps fewer checks than before.

    Args:
        client: client of the broker; also used from the thread.
        checks: schema.CHECK.
        holder: the id under which the checks were fetched.
        who: name of the checker, for the log.
        every_s: interval of the thread in seconds.
    """
    over = threading.Event()
    kept = _Kept(client, checks.select(schema.CHECK_ID.names), holder=holder, who=who)

    def keep() -> None:
        while not over.wait(every_s):
            kept.tell_how_long()
            kept.keep()

    kept.keep()
    thread = threading.Thread(target=keep, name="rmq-kept-checks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        kept.release()


class _Kept:
    """Checks that a caller works on, and how many of them the broker keeps for it."""

    def __init__(self, client: Verbs, ids: pa.Table, *, holder: str, who: str) -> None:
        self._client, self._ids, self._holder, self._who = client, ids, holder, who
        self._n = ids.num_rows
        self._began = time.monotonic()

    def tell_how_long(self) -> None:
        """Log that the checker is still working."""
        log.warning(
            "the checker of %s has worked for %.0f s on %d half messages",
            self._who,
            time.monotonic() - self._began,
            self._ids.num_rows,
        )

    def keep(self) -> None:
        """Ask the broker to keep the checks for another minute."""
        try:
            n = self._client.keep_checks(self._holder, self._ids)
        except RocketMQError as error:
            log.warning(
                "the broker could not be told that the checker of %s still works: %s",
                self._who,
                error,
            )
            return
        if n < self._n:
            log.warning(
                "the broker keeps %d of %d half messages for the checker of %s: the others have"
                " ended, or another checker is asked about them",
                n,
                self._ids.num_rows,
                self._who,
            )
        self._n = n

    def release(self) -> None:
        """Let the broker ask again about unresolved checks when they are due."""
        try:
            self._client.keep_checks(self._holder, self._ids.slice(0, 0))
        except RocketMQError as error:
            log.info("the broker keeps the checks of %s for another minute: %s", self._who, error)


def end_all(
    client: Verbs,
    said: pa.Table,
    *,
    producer_group: str | None = None,
    window: Window | None = None,
) -> int:
    """End half messages as schema.RESOLUTION says; return how many could not be ended.

    A half message may be ended differently between its check and the answer. It is logged, and the
    others are still ended.

    Raises:
        FencedError: the window has been taken over.
        BusyError, StorageError, StoreFullError, UnauthorizedError: the broker ends none now.
    """
    try:
        client.end_transactions(said, producer_group=producer_group, window=window)
    except _OF_THE_WHOLE:
        raise
    except RocketMQError as error:
        if said.num_rows == 1:
            log.warning("a check was answered too late: %s", error)
            return 1
        middle = said.num_rows // 2
        halves = (said.slice(0, middle), said.slice(middle))
        return sum(
            end_all(client, part, producer_group=producer_group, window=window) for part in halves
        )
    return 0


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
