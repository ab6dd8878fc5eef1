"""What callers without credentials can make the process of a broker hold through gRPC."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.limits import GRPC_REQUEST_BYTES, MIB
from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.rocketmq.metrics import SERVICE
from tests.conformance import raw
from tests.conformance.brokers import Served, serving
from tests.memory import MemoryWatch

CALLERS = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("memory") / "home"
    with Broker.open(home, upkeep="none") as broker:
        broker.create_topic("t", queues=1)
        broker.create_user("ann", password="anns-password")
    with serving(home) as served:
        yield served


@pytest.mark.parametrize("rpc", ["SendMessage", "ReceiveMessage"])
def test_a_caller_without_credentials_costs_no_memory(served: Served, rpc: str) -> None:
    watch = MemoryWatch(served.process.pid)
    request = raw.sends(raw.message("t", bytes(GRPC_REQUEST_BYTES - MIB))).SerializeToString()
    reply = getattr(pb, f"{rpc}Response").FromString

    def call(number: int) -> str:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        metadata = [("x-mq-client-id", f"stranger-{number}")]
        with grpc.insecure_channel(served.grpc, options=options) as channel:
            kind = channel.unary_stream if rpc == "ReceiveMessage" else channel.unary_unary
            method = kind(f"/{pb.SERVICE}/{rpc}", response_deserializer=reply)
            answer = method(request, metadata=metadata, timeout=60)
            return raw.code(list(answer) if rpc == "ReceiveMessage" else answer)

    with ThreadPoolExecutor(CALLERS) as pool:
        codes = list(pool.map(call, range(CALLERS)))

    assert codes == ["UNAUTHORIZED"] * CALLERS
    assert watch.rise() < 64 * MIB


def test_metrics_of_a_stranger_cost_no_memory(served: Served) -> None:
    watch = MemoryWatch(served.process.pid)
    options = [("grpc.max_send_message_length", -1)]

    with grpc.insecure_channel(served.grpc, options=options) as channel:
        export = channel.unary_unary(f"/{SERVICE}/Export")
        with pytest.raises(grpc.RpcError) as refused:
            export(bytes(100 * MIB), metadata=[("x-mq-client-id", "stranger")], timeout=60)

    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert watch.rise() < 64 * MIB
