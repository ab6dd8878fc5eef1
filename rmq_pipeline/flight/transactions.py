"""Transactions from another process: half messages, their ends, and the checks."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline.errors import (
    BusyError,
    FencedError,
    RocketMQError,
    StorageError,
    StoreFullError,
    UnauthorizedError,
)
from rmq_pipeline.flight.calls import Calls, Window
from rmq_pipeline.transaction import COMMIT, ROLLBACK

log = logging.getLogger(__name__)

#: What would be said of every part of a request, too: it is no single transaction's fault.
_OF_THE_WHOLE: Final = (BusyError, FencedError, StorageError, StoreFullError, UnauthorizedError)


class Transactions(Calls):
    """The verbs of producers that tell of something else they do."""

    def send_half(
        self,
        topic: str,
        messages: pa.Table,
        *,
        producer_group: str,
        immunity_ms: int | None = None,
    ) -> pa.Table:
        """Store half messages, all or none: nobody sees them before they are committed.

        Args:
            messages: schema.SEND, without message groups and delays.
            producer_group: who is asked about them when they stay open.
            immunity_ms: how long they are not; None for the broker's setting, 6 s.

        Returns:
            schema.SENT_HALF, row for row.
        """
        return self._table(
            "send_half",
            topic=topic,
            messages=messages,
            producer_group=producer_group,
            immunity_ms=immunity_ms,
        )

    def end_transactions(
        self,
        resolutions: pa.Table,
        *,
        producer_group: str | None = None,
        window: Window | None = None,
    ) -> pa.Table:
        """End transactions, all or none; again with the same resolution nothing happens.

        Args:
            resolutions: schema.RESOLUTION; unknown leaves a transaction open.
            producer_group: that began them; None is not compared.
            window: of the run that says so.

        Returns:
            schema.ENDED, row for row.

        Raises:
            TransactionNotFoundError: an id that was never given.
            TransactionEndedError: it was ended otherwise before.
            TransactionError: it is of another producer group.
            FencedError: the window has been taken over.
        """
        return self._table(
            "end_transactions",
            resolutions=resolutions,
            producer_group=producer_group,
            window=window,
        )

    def fetch_checks(
        self,
        *,
        topics: Sequence[str] | None = None,
        producer_group: str | None = None,
        client_id: str = "",
        limit: int = 1_000,
        wait_ms: int = 0,
        window: Window | None = None,
    ) -> pa.Table:
        """Half messages that somebody is asked about; each is given to one caller.

        Args:
            topics: only those for these topics.
            producer_group: only those of this group, as one of its producers. None: those of groups
                of which no producer has asked for a minute.
            client_id: who asks, for the log.
            limit: of rows.
            wait_ms: how long to wait for the first.

        Returns:
            schema.CHECK.
        """
        return self._table(
            "fetch_checks",
            topics=None if topics is None else list(topics),
            producer_group=producer_group,
            client_id=client_id,
            limit=limit,
            wait_ms=wait_ms,
            window=window,
        )

    def check_transactions(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Count and offer the checks that are due, waiting up to ``wait_ms`` for the first.

        Returns:
            {"checked", "given_up", "dropped", "next_due_ms"}.
        """
        return self._facts("check_transactions", wait_ms=wait_ms, limit=limit, window=window)

    @contextmanager
    def transaction(
        self,
        topic: str,
        messages: pa.Table,
        *,
        producer_group: str,
        immunity_ms: int | None = None,
    ) -> Iterator["Transaction"]:
        """Half messages around local work: committed at the end of the block, unless it raises.

        An exception rolls them back. A process that dies in the block leaves them to the check, and
        so does a ``commit`` in it that raises: it may have been carried out.

        Raises:
            BrokerUnavailableError: the end did not get through; the check decides.
        """
        sent = self.send_half(
            topic, messages, producer_group=producer_group, immunity_ms=immunity_ms
        )
        begun = Transaction(self, sent, producer_group=producer_group)
        try:
            yield begun
        except BaseException:
            begun.give_back()
            raise
        begun.finish()


class Transaction:
    """Half messages that were sent, until they are ended."""

    def __init__(self, client: Transactions, sent: pa.Table, *, producer_group: str) -> None:
        self._client = client
        #: schema.SENT_HALF.
        self.sent = sent
        self._producer_group = producer_group
        self._decided = False

    def commit(self) -> None:
        """Let consumers have the messages now."""
        self._end(COMMIT)

    def rollback(self) -> None:
        """Let nobody ever have them."""
        self._end(ROLLBACK)

    def unknown(self) -> None:
        """Leave it to the check."""
        self._decided = True

    def finish(self) -> None:
        """Commit, unless it was decided before."""
        if not self._decided:
            self.commit()

    def give_back(self) -> None:
        """Roll back, unless it was decided before; a broker that is away leaves it to the check."""
        if self._decided:
            return
        try:
            self.rollback()
        except RocketMQError:
            log.exception("A transaction was not rolled back; the check decides.")

    def _end(self, resolution: str) -> None:
        ids = self.sent.column("transaction_id")
        ends = pa.table({"transaction_id": ids, "resolution": [resolution] * len(ids)})
        # Before the call: where its answer gets lost, the other end would be one that nobody chose.
        # What refuses it, as ended otherwise or unknown, leaves nothing to be rolled back either.
        self._decided = True
        self._client.end_transactions(ends, producer_group=self._producer_group)


def end_all(
    client: Transactions,
    said: pa.Table,
    *,
    producer_group: str | None = None,
    window: Window | None = None,
) -> int:
    """End what can be ended of schema.RESOLUTION; how many could not, each of them logged.

    Between a check and its answer a half message may be ended otherwise; the rest is for all that.

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
