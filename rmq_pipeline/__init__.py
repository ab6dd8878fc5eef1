"""A message system with RocketMQ's semantics whose state is DuckDB and Parquet.

``import rmq_pipeline as rmq`` has the names that most programs need. Each is loaded when it is
first used, so a client loads neither Dagster nor Spark. Other modules are imported by their path.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # what ``__getattr__`` loads, for type checkers and editors
    from rmq_pipeline import errors, schema
    from rmq_pipeline.broker.broker import Broker
    from rmq_pipeline.consumer.listener import (
        ConcurrentContext,
        KeyContext,
        OrderlyContext,
        Result,
    )
    from rmq_pipeline.consumer.pull_consumer import PullConsumer
    from rmq_pipeline.consumer.push_consumer import PushConsumer
    from rmq_pipeline.consumer.received_message import ReceivedMessage
    from rmq_pipeline.flight.client import Client
    from rmq_pipeline.handling.handler import Outcome
    from rmq_pipeline.handling.sink import read_sink
    from rmq_pipeline.orchestration.consumer import python_consumer, spark_consumer
    from rmq_pipeline.orchestration.pipeline import Pipeline
    from rmq_pipeline.orchestration.resources import BrokerResource
    from rmq_pipeline.orchestration.transaction_checker import transaction_checker
    from rmq_pipeline.settings import Settings
    from rmq_pipeline.verbs import Verbs

__version__ = "0.1.0"

#: The modules of the public names.
_MODULES: Final = {
    "Broker": "broker.broker",
    "BrokerResource": "orchestration.resources",
    "Client": "flight.client",
    "ConcurrentContext": "consumer.listener",
    "KeyContext": "consumer.listener",
    "OrderlyContext": "consumer.listener",
    "Outcome": "handling.handler",
    "Pipeline": "orchestration.pipeline",
    "PullConsumer": "consumer.pull_consumer",
    "PushConsumer": "consumer.push_consumer",
    "ReceivedMessage": "consumer.received_message",
    "Result": "consumer.listener",
    "Settings": "settings",
    "Verbs": "verbs",
    "python_consumer": "orchestration.consumer",
    "read_sink": "handling.sink",
    "spark_consumer": "orchestration.consumer",
    "transaction_checker": "orchestration.transaction_checker",
}

__all__ = [
    "Broker",
    "BrokerResource",
    "Client",
    "ConcurrentContext",
    "KeyContext",
    "OrderlyContext",
    "Outcome",
    "Pipeline",
    "PullConsumer",
    "PushConsumer",
    "ReceivedMessage",
    "Result",
    "Settings",
    "Verbs",
    "errors",
    "python_consumer",
    "read_sink",
    "schema",
    "spark_consumer",
    "transaction_checker",
]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562).

    Raises:
        AttributeError: the package has no such name.
    """
    if name in {"errors", "schema"}:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
