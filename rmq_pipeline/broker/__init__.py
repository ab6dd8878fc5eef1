"""The broker: every verb of RocketMQ over one store, in process."""

from rmq_pipeline.broker.broker import Broker

__all__ = ["Broker"]
