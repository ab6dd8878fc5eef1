"""What the handlers of the door work with."""

from dataclasses import dataclass

from rmq_pipeline.access.access import Access
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.clock import Clock
from rmq_pipeline.rocketmq.alarm import Alarm
from rmq_pipeline.rocketmq.bridge import Bridge
from rmq_pipeline.rocketmq.clients import Clients
from rmq_pipeline.rocketmq.groups import Groups
from rmq_pipeline.rocketmq.leases import Leases
from rmq_pipeline.rocketmq.polls import Polls
from rmq_pipeline.settings import Settings


@dataclass(frozen=True)
class Context:
    """One open door: the broker behind it, and what is known in front of it."""

    broker: Broker
    bridge: Bridge
    clients: Clients
    groups: Groups
    alarm: Alarm
    #: Receives that wait, and what push consumers hold.
    polls: Polls
    leases: Leases
    #: host:port that it listens on.
    address: str
    #: None: nobody has to show who it is.
    access: Access | None

    @property
    def engine(self) -> Engine:
        """The parts of the broker."""
        return self.broker.engine

    @property
    def clock(self) -> Clock:
        """The broker's."""
        return self.broker.engine.clock

    @property
    def settings(self) -> Settings:
        """The broker's."""
        return self.broker.engine.settings
