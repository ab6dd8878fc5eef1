"""Who may decide and who may write: one thread each, frames in the order they were decided.

A frame of bulk may be decided while the frame of bulk before it is written. Beside the short write
of a small frame that gains nothing, and takes the interpreter from who is to be answered.
"""

import threading


class Turns:
    """A frame is taken, decided, written; each has a number, in order. For any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        #: Frames so far that were taken; of these decided; of these written.
        self._taken = 0
        self._decided = 0
        self._written = 0
        #: Whether the frame taken last is bulk.
        self._bulk = False
        #: Threads in ``take``: nobody goes past them.
        self._waiting = 0
        self._stopped = False
        self._closed = False

    def _is_free(self, *, bulk: bool) -> bool:
        if self._stopped or self._closed or self._taken > self._decided:
            return False
        under_way = self._taken - self._written
        return not under_way or (under_way == 1 and bulk and self._bulk)

    def _take(self, *, bulk: bool) -> int:
        self._taken += 1
        self._bulk = bulk
        return self._taken

    def try_take(self, *, bulk: bool) -> int | None:
        """The number of a frame to decide now, if nobody else has or wants the turn."""
        with self._changed:
            if self._waiting or not self._is_free(bulk=bulk):
                return None
            return self._take(bulk=bulk)

    def take(self, *, bulk: bool) -> int:
        """The same, as soon as it is possible."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._is_free(bulk=bulk))
            self._waiting -= 1
            return self._take(bulk=bulk)

    def decided(self) -> None:
        """The frame taken last is decided; the next may be."""
        with self._changed:
            self._decided = self._taken
            self._changed.notify_all()

    def wait_to_write(self, frame: int) -> bool:
        """Wait until all frames before this one are written.

        Returns:
            False, if it is still being decided, when that has to stop: a frame before it failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._written == frame - 1 or (self._stopped and self._decided == frame - 1)
            )
            return self._written == frame - 1

    def has_before(self, frame: int) -> bool:
        """Whether a frame before this one is not written yet."""
        return self._written < frame - 1

    def written(self) -> None:
        """The frame that was to be written is; the next may be."""
        with self._changed:
            self._written += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nobody decide; returns when nobody does."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._taken == self._decided)

    def go_on(self) -> None:
        """Deciding may go on."""
        with self._changed:
            self._stopped = False
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody take a frame any more; returns when all are written."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._taken == self._written)
