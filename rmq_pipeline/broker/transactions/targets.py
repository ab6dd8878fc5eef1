"""Topics of transactions, for endpoints that check the right to end them."""

import pyarrow as pa

from rmq_pipeline import schema, transaction
from rmq_pipeline.broker.request import Decision, Request
from rmq_pipeline.broker.state import State
from rmq_pipeline.tables import columns_of


class TargetsOf(Request):
    """Query for the topics of those transactions that are open."""

    def __init__(self, transactions: pa.Table) -> None:
        """Decode the ids of schema.CHECK_ID or schema.RESOLUTION.

        Raises:
            TableSchemaError: the column transaction_id is missing.
            TransactionNotFoundError: a value is not a transaction id.
        """
        names = transactions.column_names
        # The verb checks the other columns.
        ids = transactions.select([i for i, name in enumerate(names) if name == "transaction_id"])
        ids = columns_of(ids, schema.CHECK_ID)["transaction_id"]
        self._offsets, self._hashes = transaction.decode(ids)

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the set of topic names as the answer; store nothing."""
        rows, _ = state.halves.find(self._offsets, self._hashes)
        topics = (state.topics.get(topic_id) for topic_id in set(rows["target_topic_id"].tolist()))
        return Decision({found.topic.name for found in topics if found})
