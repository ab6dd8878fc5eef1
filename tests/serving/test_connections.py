"""Connections never take the files that the store needs."""

import contextlib
import errno
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from rmq_pipeline.serving import connections
from rmq_pipeline.serving.connections import ConnectionGuard
from rmq_pipeline.store import descriptors
from tests.conftest import Eventually

CLIENTS = 12


@pytest.fixture
def limits() -> Iterator[None]:
    """A process whose limits may be changed, and are as they were afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    descriptors._kept.clear()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_those_that_have_said_nothing_are_closed_first(eventually: Eventually) -> None:
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        other = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = server.getsockname()[1]
        clients, accepted = [], []
        for at in [port] * CLIENTS + [other.getsockname()[1]]:
            clients.append(opened.enter_context(socket.create_connection(("127.0.0.1", at))))
            listening = server if at == port else other
            accepted.append(opened.enter_context(listening.accept()[0]))
        for client, connection in zip(clients[:3], accepted, strict=False):
            client.sendall(b"x")
            eventually(lambda connection=connection: connection.recv(1, socket.MSG_PEEK) == b"x")
        files = len(list(Path("/proc/self/fd").iterdir()))
        guard = ConnectionGuard([port])

        assert guard.look() == 0
        guard._most = files - 7
        closed = guard.look()

        assert CLIENTS - 3 > closed >= 7
        gone = [at for at, client in enumerate(clients) if not is_open(client)]
        assert len(gone) == closed
        assert set(gone) <= set(range(3, CLIENTS)), "who has spoken, or is at no endpoint of ours"


def is_opened(path: Path, stack: contextlib.ExitStack) -> bool:
    try:
        stack.enter_context(path.open())
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return False
    return True


@pytest.mark.usefixtures("limits")
def test_the_store_opens_files_that_nobody_else_may(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(list(Path("/proc/self/fd").iterdir())) + 200
    descriptors._kept[:] = [most - descriptors.RESERVED, most]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - descriptors.RESERVED, hard))
    path = tmp_path / "file"
    path.touch()
    with contextlib.ExitStack() as opened:
        while is_opened(path, opened):
            pass

        opened.enter_context(descriptors.with_reserve(path.open))

        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
        assert not descriptors.use_reserve()


@pytest.mark.usefixtures("limits")
def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    limit = descriptors.reserve()

    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    assert limit == min(hard, 65_536) - descriptors.RESERVED
    assert descriptors.use_reserve()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit + descriptors.RESERVED


class Failing(ConnectionGuard):
    """A guard whose first look fails."""

    looks = 0

    @override
    def look(self) -> int:
        self.looks += 1
        if self.looks == 1:
            raise ValueError("an address that is none")
        return super().look()


def test_a_look_that_fails_is_not_the_last(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LOOK_S", 0.01)
    guard = Failing([0])
    guard.start()

    eventually(lambda: guard.looks > 1)

    guard.stop()
    descriptors._kept.clear()
