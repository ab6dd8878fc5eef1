"""Objects that the handlers of the gRPC endpoint share."""

from dataclasses import dataclass

from rmq_pipeline.access.access import Access
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.clock import Clock
from rmq_pipeline.rocketmq.bridge import Bridge
from rmq_pipeline.rocketmq.clients import Clients
from rmq_pipeline.rocketmq.groups import Groups
from rmq_pipeline.rocketmq.leases import Leases
from rmq_pipeline.rocketmq.polls import Polls
from rmq_pipeline.rocketmq.timers import Timers
from rmq_pipeline.settings import Settings


@dataclass(frozen=True)
class Context:
    """One open endpoint: its broker, and its clients, polls and leases."""

    broker: Broker
    bridge: Bridge
    clients: Clients
    groups: Groups
    timers: Timers
    #: Waiting receives, and the leases of push consumers.
    polls: Polls
    leases: Leases
    #: The host:port that the endpoint listens on.
    address: str
    #: None: callers need no credentials.
    access: Access | None

    @property
    def engine(self) -> Engine:
        """The broker's engine."""
        return self.broker.engine

    @property
    def clock(self) -> Clock:
        """The broker's clock."""
        return self.broker.engine.clock

    @property
    def settings(self) -> Settings:
        """The broker's settings."""
        return self.broker.engine.settings
