"""Where the sinks of consumers lie."""

import os
from pathlib import Path

import dagster as dg

from rmq_pipeline.endpoint import default_home


class SinkResource(dg.ConfigurableResource["SinkResource"]):
    """The folder that holds a folder for every sink."""

    #: RMQ_SINKS when not set, else ``sinks`` in the broker's home.
    root: str | None = None

    def folder(self, name: Path) -> Path:
        """The folder of a sink; an absolute name stays as it is."""
        return sinks_root(self.root) / name


def sinks_root(root: str | None = None) -> Path:
    """The folder of all sinks: as given, else RMQ_SINKS, else ``sinks`` in the broker's home."""
    named = root or os.environ.get("RMQ_SINKS")
    return Path(named) if named else default_home() / "sinks"
