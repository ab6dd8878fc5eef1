"""How many messages a window takes at a time: what is worked on in good time before it ends.

A micro-batch is settled as a whole: one that its run does not live to settle comes again whole, to
the next run, for ever.
"""

from typing import Final

#: What a batch should take. The windows' runs end 600 s after they were to take in nothing more,
#: and two batches may be in flight then.
BATCH_S: Final = 60.0
#: And what it may take at most: one that is received while another is worked on ends in time, too.
LONGEST_S: Final = 290.0
#: A batch may have so many times the messages of one that was worked on in time: what is known of
#: few says little about many.
_GROWTH: Final = 8
_SHORTEST_S: Final = 1e-3


class Pace:
    """The limit of the next receive.

    Args:
        most: never more than this.
        first: as long as nothing is known of the handler.
        batch_s: what a batch should take, in seconds.
        least: never fewer, whatever a batch takes, unless ``most`` is.
        at_once: how many are worked on side by side: so many take no longer than one, if they are
            of different message groups.
    """

    def __init__(
        self,
        most: int,
        *,
        first: int,
        batch_s: float = BATCH_S,
        least: int = 1,
        at_once: int = 1,
    ) -> None:
        self._most = most
        self._least = min(most, least)
        self._at_once = at_once
        self._batch_s = batch_s
        self.limit = max(self._least, min(most, first))

    def worked(self, messages: int, seconds: float, *, failed: int = 0, parts: int = 1) -> None:
        """A batch has taken so long; a small one is no reason to take fewer, if it was quick.

        Args:
            messages: of the batch.
            seconds: from its first call to its last.
            failed: as many of them say nothing of how long one takes that is done: they may have
                failed at once. With nothing but them the limit does not grow.
            parts: of the batch, as many as were worked on side by side.
        """
        done = messages - failed
        took_s = max(seconds, _SHORTEST_S)
        fits = int((done or messages) * self._batch_s / took_s)
        # If all that are taken at once are of one message group, they come one after the other.
        each_s = took_s * min(parts, self._at_once) / (done or messages)
        abreast = min(self._at_once, int(LONGEST_S / each_s))
        tried = max(self.limit, _GROWTH * done)
        self.limit = max(self._least, min(self._most, tried, max(fits, abreast)))
