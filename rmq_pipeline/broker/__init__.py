"""The broker: RocketMQ's verbs over one store, in one process."""

from rmq_pipeline import extras

try:
    from rmq_pipeline.broker.broker import Broker
except ModuleNotFoundError as error:
    raise extras.named(error) from error

__all__ = ["Broker"]
