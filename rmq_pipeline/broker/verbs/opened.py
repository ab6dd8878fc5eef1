"""Base class of the groups of verbs."""

from rmq_pipeline.broker.work.engine import Engine


class Opened:
    """Open store with an engine that runs the verbs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
