"""A TCP proxy that loses answers: the server has done what it was asked, unknown to the client."""

import contextlib
import socket
import threading
from typing import Self


class BrokenWire:
    """Forwards connections to a server until it is told to lose an answer, or to cut them all."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._losing = threading.Event()
        self._is_cut = threading.Event()
        #: What clients send waits for the last of these; older ones have parts that wait.
        self._gates = [_opened()]
        #: Connections with a request that was held, and that the server has not answered yet.
        self.held = 0
        #: Answers lost so far.
        self.lost = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def lose_next_answer(self) -> None:
        """Drop the next bytes of the server, and the connection with them."""
        self._losing.set()

    def hold_requests(self) -> None:
        """Hold what clients send until ``release``; then it arrives, though they left."""
        self._gates.append(threading.Event())

    def pass_new_requests(self) -> None:
        """Pass what is sent from now on; what is held stays so."""
        self._gates.append(_opened())

    def release(self) -> None:
        """Pass everything."""
        for gate in self._gates:
            gate.set()

    def cut(self) -> None:
        """End all connections, and refuse new ones until ``mend``."""
        self._is_cut.set()
        for pair in self._pairs:
            _shut(*pair)

    def mend(self) -> None:
        """Take connections again."""
        self._is_cut.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.release()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut.is_set():
                client.close()
                continue
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((client, server))
            held = threading.Event()
            for source, sink, answers in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._forward,
                    args=(source, sink, held),
                    kwargs={"answers": answers},
                    daemon=True,
                ).start()

    def _forward(
        self, source: socket.socket, sink: socket.socket, held: threading.Event, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and held.is_set():
                    self.held -= 1
                    break
                if answers and self._losing.is_set():
                    self._losing.clear()
                    self.lost += 1
                    break
                gate = self._gates[-1]
                if not answers and not gate.is_set() and not held.is_set():
                    held.set()
                    self.held += 1
                if not answers:
                    gate.wait()
                sink.sendall(data)
            else:
                if held.is_set():  # the server goes on: its answer ends the connection
                    return
        _shut(source, sink)


def _opened() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
