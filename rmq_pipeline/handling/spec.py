"""Definition of a consumer: its topic, its handler, its state and its sink."""

from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from rmq_pipeline import state_columns
from rmq_pipeline.errors import FilterExpressionError, TableSchemaError
from rmq_pipeline.filter.expression import compile_filter
from rmq_pipeline.handling.handler import Handler, with_origin_columns
from rmq_pipeline.idempotency import Key
from rmq_pipeline.storage.root import Address, address_of

DEFAULT_BATCH_ROWS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """Definition of a consumer; an inconsistent one raises ValueError."""

    name: str
    topic: str
    group: str
    #: A function of an importable module: Spark's workers import it by name.
    handler: Handler
    #: "message_group": a call has messages of one group in offset order, and may keep its state.
    order_by: Literal["message_group"] | None = None
    #: Columns of a message group's state; the handler receives them as nullable.
    state: pa.Schema | None = None
    #: Folder of the sink or its URI, used by this group only, and the columns of its rows.
    sink: Address | None = None
    sink_schema: pa.Schema | None = None
    #: Sink column, ms since 1970 or a timestamp, whose hour is the row's partition.
    partition_time: str = "born_at_ms"
    #: Rows name their message: topic, queue_id and queue_offset (handling/handler.py) are added to
    #: the sink's schema.
    sink_offsets: bool = False
    #: Topics to which the handler may publish.
    publishes: tuple[str, ...] = ()
    #: Maximum number of messages of a micro-batch.
    max_batch: int = DEFAULT_BATCH_ROWS
    #: Filter of the subscription, as in ``receive``: tags, or a SQL92 condition.
    filter: str = "*"
    filter_type: str = "tag"
    #: Source of a message's key (rmq_pipeline.idempotency). The handler's messages then have the
    #: column seen_before, and acks remember the keys. With order, a sink or publishes, a call has
    #: one message.
    idempotency_key: Key | None = None

    def __post_init__(self) -> None:
        if self.order_by not in (None, "message_group"):
            raise ValueError(f"order_by must be message_group or None, not {self.order_by!r}.")
        if self.state is not None and self.order_by is None:
            raise ValueError(f"Consumer {self.name} keeps state, so it needs order_by.")
        if (self.sink is None) != (self.sink_schema is None):
            raise ValueError(f"Consumer {self.name} needs a sink and its schema, or neither.")
        if self.sink is not None:
            object.__setattr__(self, "sink", address_of(self.sink))
        if self.sink_offsets:
            if self.sink_schema is None:
                raise ValueError(f"Consumer {self.name} has sink_offsets, but no sink.")
            object.__setattr__(self, "sink_schema", with_origin_columns(self.sink_schema))
        if self.max_batch < 1:
            raise ValueError(f"max_batch of consumer {self.name} is {self.max_batch}.")
        try:
            compile_filter(self.filter, self.filter_type)
        except FilterExpressionError as error:
            raise ValueError(f"Consumer {self.name}: {error.message}") from error
        if self.sink_schema is not None:
            self._check_partition_time(self.sink_schema)
        if self.state is not None:
            self._check_state(self.state)

    def _check_state(self, state: pa.Schema) -> None:
        if taken := set(state_columns.RESERVED) & set(state.names):
            raise ValueError(f"State columns {sorted(taken)} are the broker's own.")
        try:
            state_columns.check(state)
        except TableSchemaError as error:
            raise ValueError(f"Consumer {self.name}: {error.message}") from error
        for field in state:
            try:
                pa.nulls(1, field.type).take(pa.array([0]))
            except pa.ArrowNotImplementedError as error:
                # A window could store such states, but not read them back next to their messages.
                raise ValueError(
                    f"Consumer {self.name}: column {field.name} of the state is {field.type},"
                    " and Arrow cannot select rows of this type."
                ) from error

    def _check_partition_time(self, schema: pa.Schema) -> None:
        at = schema.get_field_index(self.partition_time)
        if at < 0 or not (
            pa.types.is_int64(kind := schema.types[at]) or pa.types.is_timestamp(kind)
        ):
            raise ValueError(
                f"The sink of consumer {self.name} needs its partition_time"
                f" {self.partition_time!r} as int64 or timestamp."
            )

    @property
    def origin(self) -> str:
        """The topic that the sink's rows name; empty if they name none."""
        return self.topic if self.sink_offsets else ""

    @property
    def window(self) -> str:
        """The name of its windows."""
        return f"consumer/{self.group}"
