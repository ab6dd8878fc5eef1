"""Push and pull consumers in a Python process, on any object with the broker's verbs."""

from rmq_pipeline.consumer.allocation import (
    Configured,
    MachineRoom,
    MachineRoomNearby,
    average,
    average_by_circle,
    consistent_hash,
)
from rmq_pipeline.consumer.listener import Result
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import Thresholds
from rmq_pipeline.consumer.pull_consumer import PullConsumer
from rmq_pipeline.consumer.push_consumer import PushConsumer

__all__ = [
    "Configured",
    "MachineRoom",
    "MachineRoomNearby",
    "MessageQueue",
    "PullConsumer",
    "PushConsumer",
    "Result",
    "Thresholds",
    "average",
    "average_by_circle",
    "consistent_hash",
]
