"""What a consumer is: its topic, its handler, its state and its sink."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa

from rmq_pipeline import state_columns
from rmq_pipeline.errors import FilterExpressionError, TableSchemaError
from rmq_pipeline.filter.expression import compile_filter
from rmq_pipeline.handling.handler import Handler
from rmq_pipeline.handling.origins import with_origin_columns
from rmq_pipeline.idempotency import Key

DEFAULT_BATCH_ROWS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSpec:
    """A consumer; what does not fit together is refused with a ValueError."""

    name: str
    topic: str
    group: str
    #: A function of an importable module: Spark's workers import it by name.
    handler: Handler
    #: "message_group": a call has one group's messages in offset order, and keeps its state.
    order_by: Literal["message_group"] | None = None
    #: Columns of a message group's state; in what the handler is given they are nullable.
    state: pa.Schema | None = None
    #: The sink's folder, this group's alone, and the columns of its rows.
    sink: Path | None = None
    sink_schema: pa.Schema | None = None
    #: The sink's column, ms since 1970 or a timestamp, whose hour is the row's partition.
    partition_time: str = "born_at_ms"
    #: Rows say which message they are of: topic, queue_id and queue_offset (handling/origins.py)
    #: are columns of the sink, added to its schema.
    sink_offsets: bool = False
    #: Topics the handler may publish to.
    publishes: tuple[str, ...] = ()
    #: Most messages of a micro-batch.
    max_batch: int = DEFAULT_BATCH_ROWS
    #: What it wants of the topic, as ``receive`` takes it: tags, or a SQL92 condition.
    filter: str = "*"
    filter_type: str = "tag"
    #: Where a message's key comes from (rmq_pipeline.idempotency): the handler's messages then have
    #: the column seen_before, and their acks remember the keys; with order, a sink or publishes a
    #: call has one message.
    idempotency_key: Key | None = None

    def __post_init__(self) -> None:
        if self.order_by not in (None, "message_group"):
            raise ValueError(f"order_by is message_group or None, not {self.order_by!r}.")
        if self.state is not None and self.order_by is None:
            raise ValueError(f"Consumer {self.name} keeps state, so it needs order_by.")
        if (self.sink is None) != (self.sink_schema is None):
            raise ValueError(f"Consumer {self.name} needs a sink and its schema, or neither.")
        if self.sink_offsets:
            if self.sink_schema is None:
                raise ValueError(f"Consumer {self.name} has no sink to have offsets in.")
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
                # A window could keep states, and could not put them beside their messages again.
                raise ValueError(
                    f"Consumer {self.name}: column {field.name} of the state is {field.type},"
                    " of which Arrow cannot pick out rows."
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
        """The topic that the sink's rows name; empty where they name none."""
        return self.topic if self.sink_offsets else ""

    @property
    def window(self) -> str:
        """The name of its windows."""
        return f"consumer/{self.group}"
