"""Connections without a byte, more than there are files: messages flow on, and the log rolls."""

import contextlib
import os
import resource
import socket
import subprocess
from pathlib import Path

import grpc
import pyarrow as pa
import pytest

from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.flight.client import Client
from tests.cli.conftest import RMQ
from tests.conftest import Eventually

pytestmark = pytest.mark.chaos

FILES = 1_024
CONNECTIONS = 1_100
MIB = 1 << 20


def connect(stack: contextlib.ExitStack, address: str) -> None:
    host, _, port = address.rpartition(":")
    for _ in range(CONNECTIONS):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        client.connect_ex((host, int(port)))


@pytest.mark.parametrize("name", ["flight", "grpc"])
def test_a_broker_serves_while_silent_connections_are_open(
    home: Path, name: str, eventually: Eventually
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CONNECTIONS:
        pytest.skip(f"a test may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * CONNECTIONS), hard))
    command = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", RMQ]
    command += ["broker", "--home", str(home), "--flight", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command += [f"--set=log_file_bytes={MIB}", f"--set=reserve_bytes={MIB}"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as broker,
        contextlib.ExitStack() as idle,
    ):
        try:
            assert broker.stdout is not None
            assert broker.stdout.readline().startswith(b"ready ")
            endpoint = Endpoint.read(home)
            assert endpoint is not None
            with Client(home=home, retry_s=30) as client:
                client.create_topic("plain", queues=1)
                connect(idle, getattr(endpoint, name))
                bodies: list[bytes] = []

                def sends() -> bool:
                    some = [os.urandom(200_000) for _ in range(3)]
                    try:
                        client.send("plain", pa.table({"body": some}))
                    except RocketMQError:
                        return False
                    bodies.extend(some)
                    return len(bodies) >= 30  # 6 MB, in files of 1 MiB

                eventually(sends, within_s=60)
                stored = client.read("plain", 0, offset=0, limit=1000)["body"].to_pylist()
                assert set(bodies) <= set(stored)
                assert client.status()["store"]["failing"] is None
                # Another one connects beside them, at either endpoint.
                with Client(home=home, retry_s=30) as another:
                    assert another.ping()["pid"] == broker.pid
                with grpc.insecure_channel(endpoint.grpc) as channel:
                    grpc.channel_ready_future(channel).result(timeout=30)
        finally:
            broker.kill()
            broker.communicate()
