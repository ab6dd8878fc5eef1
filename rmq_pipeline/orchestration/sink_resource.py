"""Folder of the consumers' sinks, and size of their micro-batches."""

import os
from pathlib import Path

import dagster as dg

from rmq_pipeline.endpoint import default_home


class SinkResource(dg.ConfigurableResource["SinkResource"]):
    """The parent folder of all sinks."""

    #: Default: RMQ_SINKS, else ``sinks`` in the broker's home.
    root: str | None = None
    #: Maximum messages of a micro-batch, unless the run's config sets it. 0: RMQ_MICRO_BATCH, else
    #: as the consumer declares.
    micro_batch: int = 0

    def most(self) -> int:
        """Return the maximum messages of a micro-batch; 0: as the consumer declares."""
        return self.micro_batch or int(os.environ.get("RMQ_MICRO_BATCH") or 0)

    def folder(self, name: Path) -> Path:
        """Return the folder of a sink; an absolute path is unchanged."""
        return sinks_root(self.root) / name


def sinks_root(root: str | None = None) -> Path:
    """Return the folder of all sinks: ``root``, else RMQ_SINKS, else ``sinks`` in the home."""
    named = root or os.environ.get("RMQ_SINKS")
    return Path(named) if named else default_home() / "sinks"
