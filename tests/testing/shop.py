"""A shop's pipeline, as a user writes one: what the example tests test."""

import json
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.handling.handler import RESULT, Outcome
from rmq_pipeline.orchestration.consumer import python_consumer, spark_consumer
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.transaction_checker import transaction_checker

ORDERS: Final = topic("orders", type="fifo", queues=4)
INVOICES: Final = topic("invoices", queues=2)
REMINDERS: Final = topic("reminders", type="delay", queues=1)
PAYMENTS: Final = topic("payments", type="transaction", queues=1)
PARCELS: Final = topic("parcels", type="fifo", queues=2)
OFFERS: Final = topic("offers", queues=1)

TOTAL: Final = pa.schema([("total", pa.int64())])
BILL: Final = pa.schema([("order", pa.string()), ("total", pa.int64()), ("born_at_ms", pa.int64())])
LABEL: Final = pa.schema([("order", pa.string()), ("born_at_ms", pa.int64())])


def sent(*bodies: dict[str, Any], **columns: Any) -> pa.Table:
    """Messages to publish."""
    table = pa.table({"body": [json.dumps(body).encode() for body in bodies]})
    for name, value in columns.items():
        table = table.append_column(name, pa.array([value] * table.num_rows))
    return table


@python_consumer(
    topic=ORDERS,
    group="billing",
    order_by="message_group",
    state=TOTAL,
    sink="bills",
    sink_schema=BILL,
    publishes=[INVOICES],
    max_attempts=3,
    backoff_ms=[10_000, 60_000],
)
def billing(messages: pa.Table, state: pa.Table) -> Outcome:
    """Add up the amounts of an order, and publish an invoice for each item."""
    total = state["total"][0].as_py() if state.num_rows else 0
    rows, invoices = [], []
    for message in messages.to_pylist():
        item = json.loads(message["body"])
        total += item["amount"]
        order = message["message_group"]
        rows.append({"order": order, "total": total, "born_at_ms": message["born_at_ms"]})
        invoices.append({"order": order, "amount": item["amount"]})
    return Outcome(
        rows=pa.Table.from_pylist(rows, schema=BILL),
        state=pa.table({"total": [total]}, schema=TOTAL),
        publish={"invoices": sent(*invoices)},
    )


@python_consumer(topic=INVOICES, group="dunning", publishes=[REMINDERS], filter="*")
def dunning(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Publish a reminder of each invoice for ten days later."""
    later_ms = messages["stored_at_ms"][0].as_py() + 10 * 86_400_000
    bodies = [json.loads(body) for body in messages["body"].to_pylist()]
    return Outcome(publish={"reminders": sent(*bodies, deliver_at_ms=later_ms)})


@python_consumer(topic=REMINDERS, group="mailing")
def mailing(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Do nothing: what it gets is of interest."""
    return Outcome()


@python_consumer(
    topic=PARCELS,
    group="packing",
    order_by="message_group",
    max_attempts=1,
    on_failure="park",
    sink="labels",
    sink_schema=LABEL,
)
def packing(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Write a label for each parcel; raise while the address is unknown."""
    if "nowhere" in messages["message_group"].to_pylist() and not ADDRESSES:
        raise LookupError("no address of nowhere")
    return Outcome(
        rows=pa.table(
            {"order": messages["message_group"], "born_at_ms": messages["born_at_ms"]},
        )
    )


#: Orders whose address has become known.
ADDRESSES: Final[list[str]] = []


@spark_consumer(topic=INVOICES, group="ledger", sink="ledger", sink_schema=LABEL)
def ledger(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Write a row for each invoice."""
    orders = [json.loads(body)["order"] for body in messages["body"].to_pylist()]
    return Outcome(rows=pa.table({"order": orders, "born_at_ms": messages["born_at_ms"]}))


@python_consumer(topic=OFFERS, group="summer", filter="summer || sale")
def summer(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Reject offers whose price is unknown."""
    empty = messages.filter(pc.equal(messages["body"], b"?"))
    places = empty.select(["queue_id", "queue_offset"])
    said = {"outcome": ["dead_letter"] * len(places), "reason": ["no price"] * len(places)}
    for name, values in said.items():
        places = places.append_column(RESULT.field(name), pa.array(values, pa.string()))
    return Outcome(results=places)


@python_consumer(topic=OFFERS, group="cheap", filter="price < 10", filter_type="sql92")
def cheap(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Ack."""
    return Outcome()


#: Calls of the bank.
CHARGED: Final[list[str]] = []


@python_consumer(topic=PAYMENTS, group="charging", idempotency_key="keys")
def charging(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
    """Charge a card once for each key."""
    new = messages.filter(pc.invert(messages["seen_before"]))
    CHARGED.extend(body.decode() for body in new["body"].to_pylist())
    return Outcome()


@transaction_checker(topic=PAYMENTS)
def payment_checker(checks: pa.Table) -> list[str]:
    """Decide as the body says: commit, rollback or unknown."""
    return [body.decode().partition(" ")[0] for body in checks["body"].to_pylist()]


PIPELINE: Final = Pipeline(
    "shop",
    topics=[ORDERS, INVOICES, REMINDERS, PAYMENTS, PARCELS, OFFERS],
    consumers=[billing, dunning, mailing, packing, ledger, summer, cheap, charging],
    checkers=[payment_checker],
)
