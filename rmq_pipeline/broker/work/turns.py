"""The turns in which frames are taken, decided and written."""

import threading


class Turns:
    """Turns of frames, which are taken, decided and written in order; safe for all threads.

    A bulk frame may be decided while the bulk frame before it is written. During the short write of
    a small frame that gains nothing: it takes the interpreter from the thread that answers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        #: Number of frames taken so far; of those decided; of those written.
        self._taken = 0
        self._decided = 0
        self._written = 0
        #: True if the last frame taken is bulk.
        self._bulk = False
        #: Number of threads in ``take``; ``try_take`` does not overtake them.
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
        """Return the number of a frame to decide now.

        The result is None if another thread has the turn or waits for it.
        """
        with self._changed:
            if self._waiting or not self._is_free(bulk=bulk):
                return None
            return self._take(bulk=bulk)

    def take(self, *, bulk: bool) -> int:
        """Wait for the turn; return the number of a frame to decide."""
        with self._changed:
            if self._waiting or not self._is_free(bulk=bulk):
                self._waiting += 1
                self._changed.wait_for(lambda: self._is_free(bulk=bulk))
                self._waiting -= 1
            return self._take(bulk=bulk)

    def decided(self) -> None:
        """Mark the last frame taken as decided; the next frame may be taken."""
        with self._changed:
            self._decided = self._taken
            self._changed.notify_all()

    def wait_to_write(self, frame: int) -> bool:
        """Wait until all earlier frames are written.

        Returns:
            False if an earlier frame has failed while this one is being decided. Then deciding must
            stop.
        """
        with self._changed:
            while self._written != frame - 1:
                if self._stopped and self._decided == frame - 1:
                    return False
                self._changed.wait()
            return True

    def has_before(self, frame: int) -> bool:
        """Return True if an earlier frame is not written yet."""
        return self._written < frame - 1

    def written(self) -> None:
        """Mark the frame as written; the next one may be written."""
        with self._changed:
            self._written += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop the deciding of frames; return when no frame is being decided."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._taken == self._decided)

    def go_on(self) -> None:
        """Allow the deciding of frames again."""
        with self._changed:
            self._stopped = False
            self._changed.notify_all()

    def close(self) -> None:
        """Let no frame be taken from now on; return when all are written."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._taken == self._written)
