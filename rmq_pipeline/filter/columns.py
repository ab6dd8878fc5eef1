"""Message properties as columns, for the evaluation of a SQL92 expression."""

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.filter import numerals
from rmq_pipeline.filter.numerals import Parsed

#: RocketMQ's system properties that have a column of their own. The broker refuses user
#: properties with these names.
COLUMN_OF: Final = {
    "TAGS": "tag",
    "KEYS": "keys",
    "UNIQ_KEY": "message_id",
    "__SHARDINGKEY": "message_group",
}

_Found = TypeVar("_Found")


def columns_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the message columns that hold the named properties, each once."""
    return tuple(dict.fromkeys(COLUMN_OF.get(name, "properties") for name in names))


class Columns:
    """Properties of a batch of messages; each is looked up and parsed at most once."""

    def __init__(self, messages: pa.RecordBatch) -> None:
        self._messages = messages
        self._found: dict[tuple[str, str], object] = {}

    def __len__(self) -> int:
        return int(self._messages.num_rows)

    def texts(self, name: str) -> pa.StringArray:
        """Return a property as strings; null where a message lacks it."""
        return self._once("texts", name, find=lambda: self._look_up(name))

    def wholes(self, name: str) -> Parsed:
        """Return a property parsed as 64-bit integers."""
        return self._once("wholes", name, find=lambda: numerals.wholes(self.texts(name)))

    def decimals(self, name: str) -> Parsed:
        """Return a property parsed as doubles."""
        return self._once("decimals", name, find=lambda: numerals.decimals(self.texts(name)))

    def booleans(self, name: str) -> Parsed:
        """Return a property parsed as booleans."""
        return self._once("booleans", name, find=lambda: numerals.booleans(self.texts(name)))

    def _once(self, kind: str, name: str, *, find: Callable[[], _Found]) -> _Found:
        key = kind, name
        if key not in self._found:
            self._found[key] = find()
        found: _Found = self._found[key]  # type: ignore[assignment]
        return found

    def _look_up(self, name: str) -> pa.StringArray:
        column = self._messages.column(COLUMN_OF.get(name, "properties"))
        if name == "KEYS":
            joined = pc.binary_join(column, " ")
            return pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)
        if name in COLUMN_OF:
            return column
        if column.null_count == len(column):
            return pa.nulls(len(column), pa.string())
        return pc.map_lookup(column, name, "last")
