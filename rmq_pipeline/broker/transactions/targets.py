"""Which topics transactions are about, for a door that asks who may end them."""

import pyarrow as pa

from rmq_pipeline import schema, transaction
from rmq_pipeline.broker.request import Decision, Request
from rmq_pipeline.broker.state import State
from rmq_pipeline.tables import columns_of


class TargetsOf(Request):
    """A question: the topics of those of schema.RESOLUTION that are open."""

    def __init__(self, resolutions: pa.Table) -> None:
        """Read the ids.

        Raises:
            TableSchemaError: there is no such column.
            TransactionNotFoundError: one is no transaction id.
        """
        ids = columns_of(resolutions, schema.RESOLUTION)["transaction_id"]
        self._offsets, self._hashes = transaction.decode(ids)

    def decide(self, state: State, now_ms: int) -> Decision:
        """Nothing is stored."""
        rows, _ = state.halves.find(self._offsets, self._hashes)
        topics = (state.topics.get(topic_id) for topic_id in set(rows["target_topic_id"].tolist()))
        return Decision({found.topic.name for found in topics if found})
