"""The broker: RocketMQ's verbs over one store, in one process."""

from rmq_pipeline.broker.broker import Broker

__all__ = ["Broker"]
