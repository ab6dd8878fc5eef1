"""Where the sinks of consumers lie, and how much goes into them at once."""

import os
from pathlib import Path

import dagster as dg

from rmq_pipeline.endpoint import default_home


class SinkResource(dg.ConfigurableResource["SinkResource"]):
    """The folder that holds a folder for every sink."""

    #: RMQ_SINKS when not set, else ``sinks`` in the broker's home.
    root: str | None = None
    #: Most messages of a micro-batch, for consumers whose run says nothing else. RMQ_MICRO_BATCH
    #: when 0; without that each consumer's own.
    micro_batch: int = 0

    def most(self) -> int:
        """Most messages of a micro-batch; 0 leaves it to the consumer."""
        return self.micro_batch or int(os.environ.get("RMQ_MICRO_BATCH") or 0)

    def folder(self, name: Path) -> Path:
        """The folder of a sink; an absolute name stays as it is."""
        return sinks_root(self.root) / name


def sinks_root(root: str | None = None) -> Path:
    """The folder of all sinks: as given, else RMQ_SINKS, else ``sinks`` in the broker's home."""
    named = root or os.environ.get("RMQ_SINKS")
    return Path(named) if named else default_home() / "sinks"
