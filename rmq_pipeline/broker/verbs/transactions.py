"""Verbs: transactions."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.access.rights import UPKEEP, Rights, on_topic
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work import arguments
from rmq_pipeline.broker.work.transaction import end_transactions, prepare
from rmq_pipeline.broker.work.transaction_checks import (
    check_transactions,
    fetch_checks,
    keep_checks,
)
from rmq_pipeline.tables import sound
from rmq_pipeline.verb import Window


class Transactions(Opened):
    """Verbs for transactions."""

    @verb(rights=on_topic("pub"), quick=True)
    def send_half(
        self,
        topic: str,
        messages: pa.Table,
        *,
        producer_group: str,
        immunity_ms: int | None = None,
    ) -> pa.Table:
        """Store half messages, all or none: no consumer sees one before it is committed.

        Args:
            topic: topic of the messages.
            messages: schema.SEND, without message groups and delays.
            producer_group: producers that the broker asks about open transactions.
            immunity_ms: time before the first check; None: the broker's setting, 6 s.

        Returns:
            schema.SENT_HALF, row for row.
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

    @verb(rights=Rights(ends="resolutions"), repeatable=True, quick=True)
    def end_transactions(
        self,
        resolutions: pa.Table,
        *,
        producer_group: str | None = None,
        window: Window | None = None,
    ) -> pa.Table:
        """End transactions, all or none. Repeating the same resolution does nothing.

        Args:
            resolutions: schema.RESOLUTION; unknown leaves a transaction open.
            producer_group: group that began them; None is not compared.
            window: name and epoch of the window that decides.

        Returns:
            schema.ENDED, row for row.

        Raises:
            TransactionNotFoundError: the broker never returned such an id.
            TransactionEndedError: the transaction was ended otherwise before.
            TransactionError: the transaction is of another producer group.
            FencedError: a newer window has taken over.
        """
        asked = sound(resolutions, "resolutions")
        return end_transactions(self._engine, asked, producer_group=producer_group, window=window)

    @verb(rights=on_topic("pub", "topics"))
    def fetch_checks(
        self,
        *,
        topics: Sequence[str] | None = None,
        producer_group: str | None = None,
        client_id: str = "",
        limit: int = 1_000,
        wait_ms: int = 0,
        window: Window | None = None,
        holder: str = "",
    ) -> pa.Table:
        """Take half messages whose outcome the broker asks for; each is given to one caller.

        Args:
            topics: only half messages for these topics.
            producer_group: only those of this group, as one of its producers. None: those of groups
                without a producer that has asked within a minute.
            client_id: caller, for the log.
            limit: number of rows at most.
            wait_ms: how long to wait for the first.
            window: refuse the call when this window has been taken over.
            holder: id of the caller, for ``keep_checks``.

        Returns:
            schema.CHECK.
        """
        return fetch_checks(
            self._engine,
            topics=topics,
            producer_group=producer_group,
            client_id=arguments.text(client_id, "client_id"),
            limit=arguments.count(limit, high=limits.RECEIVE_ROWS),
            wait_ms=arguments.poll_ms(wait_ms),
            window=window,
            holder=arguments.text(holder, "holder"),
        )

    @verb(
        # A holder's id is random, so only its caller knows it.
        rights=Rights(ends="checks"),
        repeatable=True,
    )
    def keep_checks(self, holder: str, checks: pa.Table | None = None) -> int:
        """Keep checks for a caller that is still working on them.

        For a minute the broker gives them to no other caller and counts no check.

        Args:
            holder: the id under which they were fetched. It has these checks and no others from
                now on.
            checks: schema.CHECK_ID. A broker that has forgotten them, after a restart or a minute
                without a call, keeps them again. An empty table releases all. None: what the
                holder fetched last.

        Returns:
            The number of checks that the holder has. Where it named more, the others have ended,
            or another holder has them.

        Raises:
            TransactionNotFoundError: the broker never returned such an id.
        """
        known = None if checks is None else sound(checks, "checks")
        return keep_checks(self._engine, arguments.text(holder, "holder"), checks=known)

    @verb(rights=UPKEEP, repeatable=True)
    def check_transactions(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Count and offer the checks that are due.

        Args:
            wait_ms: wait this long for the first.
            limit: number of checks at most.
            window: refuse the call when this window has been taken over.

        Returns:
            {"checked", "given_up", "dropped", "next_due_ms"}.
        """
        wait = arguments.poll_ms(wait_ms)
        return check_transactions(self._engine, wait_ms=wait, limit=limit, window=window)
