"""Batch size of a window: as many messages as can be handled well before its run ends.

A micro-batch is settled as a whole. If its run ended before the settle, the whole batch would be
redelivered to the next run, again and again.
"""

from typing import Final

#: Target duration of a batch. A window's run ends 600 s after the window should have stopped
#: receiving, and two batches may be in flight then.
BATCH_S: Final = 60.0
#: Maximum duration: a batch received while another is handled must also end in time.
LONGEST_S: Final = 290.0
#: Maximum share of a settle's size limit, estimated from the last batch.
_SHARE: Final = 0.5
#: Maximum growth factor from a batch that was handled in time, as few messages say little about
#: many.
_GROWTH: Final = 8
_SHORTEST_S: Final = 1e-3
#: After a refusal, a batch may grow by one part in this many beyond the largest settled one.
_CAREFUL: Final = 8


class Pace:
    """Limit of the next receive.

    Args:
        most: maximum limit.
        first: limit before the handler's speed is known.
        batch_s: target duration of a batch, in seconds.
        least: minimum limit, however long a batch takes; at most ``most``.
        at_once: number of concurrent messages. This many take as long as one, if they have
            different message groups.
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
        #: Upper bound after the broker refused a batch of twice this count for its size.
        self._ceiling = most
        self.limit = max(self._least, min(most, first))

    def handled(
        self, messages: int, seconds: float, *, failed: int = 0, parts: int = 1, share: float = 0.0
    ) -> None:
        """Adjust the limit to the duration of a batch.

        Args:
            messages: number of messages of the batch.
            seconds: time from its first call to its last.
            failed: number of failed messages. They may have failed at once, so they are ignored; if
                all failed, the limit does not grow.
            parts: number of parts that ran concurrently.
            share: share of a settle's size limit that the batch used.
        """
        done = messages - failed
        took_s = max(seconds, _SHORTEST_S)
        fits = int((done or messages) * self._batch_s / took_s)
        # If all concurrent messages have one message group, they are handled one after the other.
        each_s = took_s * min(parts, self._at_once) / (done or messages)
        abreast = min(self._at_once, int(LONGEST_S / each_s))
        tried = max(self.limit, _GROWTH * done)
        self.limit = max(self._least, min(self._most, tried, max(fits, abreast)))
        if share:
            self.limit = max(1, min(self.limit, int(messages * _SHARE / share)))
        self.limit = min(self.limit, self._ceiling)

    def refused(self, messages: int) -> None:
        """Halve the bound after the broker refused a batch of this many messages for its size.

        Only the broker knows its limit in bytes, so only the count can be used.
        """
        self._ceiling = min(self._ceiling, max(1, messages // 2))
        self.limit = min(self.limit, self._ceiling)

    def settled(self, messages: int) -> None:
        """Raise the bound after a batch that reached it was settled."""
        if messages >= self._ceiling:
            self._ceiling = min(self._most, messages + max(1, messages // _CAREFUL))
