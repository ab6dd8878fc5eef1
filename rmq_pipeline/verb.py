"""A verb of the broker as both ends of the Flight endpoint know it, with its types."""

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    Final,
    Self,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import pyarrow as pa

#: Name and epoch of an open window.
Window: TypeAlias = tuple[str, int]
#: Receipts of deliveries: a table with the column receipt_handle, or the handles themselves.
Receipts: TypeAlias = pa.Table | Sequence[str]
_NEXT: Final = b"next_offsets"


@dataclass(frozen=True, slots=True)
class PullResult:
    """Messages that were read by offset, without a lease."""

    #: schema.READ, by queue_id and queue_offset.
    messages: pa.Table
    #: By queue_id, for every queue that was read: the first offset that the pull did not look at.
    #: Filtered and expired messages lie before it.
    next_offsets: Mapping[int, int]

    def to_table(self) -> pa.Table:
        """Return the result as one table, for the Flight endpoint."""
        return self.messages.replace_schema_metadata({_NEXT: json.dumps(dict(self.next_offsets))})

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """Return the result from the output of ``to_table``."""
        offsets = json.loads(table.schema.metadata[_NEXT])
        by_queue = {int(queue_id): offset for queue_id, offset in offsets.items()}
        return cls(table.replace_schema_metadata(None), by_queue)


@dataclass(frozen=True)
class Verb:
    """Facts about a verb that the client needs to call it."""

    name: str
    #: Arguments that are tables, or None; a list of receipt handles becomes a table.
    tables: tuple[str, ...] = ()
    #: Arguments that map names to tables.
    table_maps: tuple[str, ...] = ()
    #: Repeating the call does no harm, so the client repeats it when the answer was lost.
    repeatable: bool = False
    #: The same, but only if all of these arguments are given.
    repeatable_with: tuple[str, ...] = ()
    #: The answer is small and comes at once, so the call is a Flight action: it costs half of an
    #: exchange, but cannot be cancelled.
    quick: bool = False

    def may_repeat(self, args: Mapping[str, Any]) -> bool:
        """Return True if a call with these arguments may be repeated."""
        with_these = bool(self.repeatable_with) and all(map(args.get, self.repeatable_with))
        return self.repeatable or with_these


def restored(value: Any, hint: Any) -> Any:
    """Return a decoded answer as the type that the verb returns.

    JSON has no tuples and no numbers as keys; a pull's answer is a table.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is PullResult:
        return PullResult.from_table(value)
    if value is None or origin in {Union, types.UnionType}:
        return value
    if is_typeddict(hint):
        hints = get_type_hints(hint)
        return {name: restored(each, hints.get(name, Any)) for name, each in value.items()}
    if origin is dict:
        key, of = inner
        return {(int(k) if key is int else k): restored(v, of) for k, v in value.items()}
    if origin is list:
        return [restored(each, inner[0]) for each in value]
    if origin is tuple:
        return tuple(restored(each, of) for each, of in zip(value, inner, strict=True))
    return value
