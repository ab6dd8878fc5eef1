"""What the groups of verbs share: a connection, and what a verb gives."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline.flight.connection import Connection

#: Receipts of deliveries: a table with the column receipt_handle, or the handles themselves.
Receipts = pa.Table | Sequence[str]
#: Name and epoch of an open window.
Window = tuple[str, int]


class Calls:
    """Verbs made into calls."""

    _connection: Connection

    def _table(self, verb: str, **args: Any) -> pa.Table:
        return self._connection.call(verb, args)

    def _facts(self, verb: str, **args: Any) -> dict[str, Any]:
        facts = self._connection.call(verb, args)
        assert isinstance(facts, dict), facts
        return facts
