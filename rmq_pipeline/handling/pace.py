"""How many messages a window takes at a time: what is worked on in good time before it ends.

A micro-batch is settled as a whole: one that its run does not live to settle comes again whole, to
the next run, for ever.
"""

from typing import Final

#: What a batch should take. The windows' runs end 600 s after they were to take in nothing more,
#: and two batches may be in flight then.
BATCH_S: Final = 60.0
#: A batch has at most so many times the messages of what was tried before.
_GROWTH: Final = 8
_SHORTEST_S: Final = 1e-3


class Pace:
    """The limit of the next receive.

    Args:
        most: never more than this.
        first: as long as nothing is known of the handler.
        batch_s: what a batch should take, in seconds.
    """

    def __init__(self, most: int, *, first: int, batch_s: float = BATCH_S) -> None:
        self._most = most
        self._batch_s = batch_s
        self.limit = min(most, first)

    def worked(self, messages: int, seconds: float) -> None:
        """A batch has taken so long."""
        fits = int(messages * self._batch_s / max(seconds, _SHORTEST_S))
        self.limit = max(1, min(self._most, fits, _GROWTH * self.limit))
