"""Server processes on one core and the client on the other, and what they take of their cores."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from benchmarks.peers.driver import Driver
from tests.waiting import until

_CORES: Final = sorted(os.sched_getaffinity(0))
SERVER_CORE: Final = _CORES[0]
CLIENT_CORE: Final = _CORES[-1]
_STOP_S: Final = 30.0


def pin(pid: int, core: int) -> None:
    """Move all threads of a process to a core; later threads and children inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def started(driver: Driver, folder: Path) -> Iterator[None]:
    """Run a peer's server on its core, and this process on the other."""
    # Runtimes such as Go's count their cores when they start, so they start on the right one.
    pin(os.getpid(), SERVER_CORE)
    try:
        try:
            driver.start(folder)
        finally:
            pin(os.getpid(), CLIENT_CORE)
        yield
    finally:
        driver.stop()


class Server:
    """A server process that listens at a port."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        port: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = folder / "server.log"
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            until(lambda: self._listens(port), what=lambda: self._log.read_text()[-2000:])
        except BaseException:
            self.stop()
            raise

    def _listens(self, port: int) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def stop(self) -> None:
        """Stop it, and kill it if it takes too long."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Busy:
    """The share of their cores that server and client take, over the time between two calls."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._before = self._now()

    def shares(self) -> tuple[float, float]:
        """Return the server's and the client's share since the start."""
        seconds, server, client = (
            now - before for now, before in zip(self._now(), self._before, strict=True)
        )
        return server / seconds, client / seconds

    def _now(self) -> tuple[float, float, float]:
        server = 0.0
        for pid in self._driver.pids():
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                server += sum(_cpu_s(each) for each in (root, *root.children(recursive=True)))
        return time.perf_counter(), server, time.process_time()


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        # Children that have ended, such as PostgreSQL's of a closed connection, count too.
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0
