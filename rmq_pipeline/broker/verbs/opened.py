"""What every group of verbs stands on."""

from rmq_pipeline.broker.engine import Engine

#: Name and epoch of a window.
Window = tuple[str, int]


class Opened:
    """An open store, which the verbs work on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
