"""The broker: RocketMQ's verbs over one store, in one process."""

from rmq_pipeline import extras

extras.check("broker")

from rmq_pipeline.broker.broker import Broker  # noqa: E402 - its imports need the extra

__all__ = ["Broker"]
