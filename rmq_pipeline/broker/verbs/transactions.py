"""Half messages, their ends, and the checks of those that stay open."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker import arguments
from rmq_pipeline.broker.transactions.asking import fetch_checks
from rmq_pipeline.broker.transactions.checking import check_transactions
from rmq_pipeline.broker.transactions.ending import end_transactions
from rmq_pipeline.broker.transactions.transaction import prepare
from rmq_pipeline.broker.verbs.opened import Opened, Window


class Transactions(Opened):
    """Messages that count once what they tell of has happened."""

    def send_half(
        self,
        topic: str,
        messages: pa.Table,
        *,
        producer_group: str,
        immunity_ms: int | None = None,
    ) -> pa.Table:
        """Store half messages, whole or not at all; answers schema.SENT_HALF row for row.

        Args:
            messages: schema.SEND, without message groups and delays.
            producer_group: who is asked about them when they stay open.
            immunity_ms: how long they are not; None for the broker's setting.
        """
        engine = self._engine
        engine.admit()
        own = engine.settings.transaction_immunity_ms if immunity_ms is None else immunity_ms
        request = prepare(
            engine,
            topic,
            messages=messages,
            producer_group=producer_group,
            immunity_ms=arguments.immunity_ms(own),
        )
        half: pa.Table = engine.submit(request)
        return half

    def end_transactions(
        self,
        resolutions: pa.Table,
        *,
        producer_group: str | None = None,
        window: Window | None = None,
    ) -> pa.Table:
        """End transactions as schema.RESOLUTION says, all or none; schema.ENDED row for row.

        Ended again with the same resolution, a transaction is answered as the first time, and
        nothing happens. ``unknown`` leaves it open.

        Raises:
            TransactionNotFoundError: an id that was never given.
            TransactionEndedError: it was ended otherwise before.
            TransactionError: it is of another producer group.
            FencedError: the window has been taken over.
        """
        asked = arguments.sound(resolutions, "resolutions")
        return end_transactions(self._engine, asked, producer_group=producer_group, window=window)

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
        """Half messages that somebody is asked about, as schema.CHECK; each is given to one caller.

        Args:
            topics: only those for these topics.
            producer_group: only those of this group, as one of its producers. None: those of groups
                of which no producer has asked for a minute.
            client_id: who asks, for the log.
            limit: of rows.
            wait_ms: how long to wait for the first.
        """
        return fetch_checks(
            self._engine,
            topics=topics,
            producer_group=producer_group,
            client_id=arguments.text(client_id, "client_id"),
            limit=arguments.count(limit, high=limits.RECEIVE_ROWS),
            wait_ms=arguments.poll_ms(wait_ms),
            window=window,
        )

    def check_transactions(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Count and offer the checks that are due now and within ``wait_ms``; a report."""
        wait = arguments.poll_ms(wait_ms)
        return check_transactions(self._engine, wait_ms=wait, limit=limit, window=window)
