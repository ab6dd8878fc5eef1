"""The official Python client at work, in a process of its own; and a raw stub beside it.

``python -m benchmarks.grpc_load`` reads jobs as lines of JSON (what, address, topic, seconds), and
prints what each measured: messages per second, or latencies in ms.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import grpc
import numpy as np
from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
)

from rmq_pipeline.rocketmq import protocol as pb

BODY: Final = b"x" * 1024
#: As many sends as wait for their answers.
OUTSTANDING: Final = 64
#: Of one receive, and of one request of a raw stub.
BATCH: Final = 32
BULK: Final = 256
BULKS: Final = 4
INVISIBLE_S: Final = 60
LOOK_S: Final = 0.0005
RATE_PER_S: Final = 200
_NUMBERS: Final = count(1)


@dataclass(frozen=True)
class Job:
    """What to measure, where, and for how long."""

    what: str
    address: str
    topic: str
    seconds: float


def configuration(address: str) -> ClientConfiguration:
    """How the client connects."""
    return ClientConfiguration(address, Credentials())


def message(topic: str, body: bytes = BODY) -> Message:
    """A message of 1 KiB, unless it says something."""
    made = Message()
    made.topic, made.body = topic, body
    return made


def send_in_threads(job: Job, *, threads: int) -> float:
    """Threads that each wait for the answer before they send the next."""
    producer = Producer(configuration(job.address), (job.topic,))
    producer.startup()
    producer.send(message(job.topic))
    sent = [0] * threads
    until = time.perf_counter() + job.seconds

    def work(number: int) -> None:
        while time.perf_counter() < until:
            producer.send(message(job.topic))
            sent[number] += 1

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    taken = time.perf_counter() - start
    producer.shutdown()
    return sum(sent) / taken


def send_async(job: Job) -> float:
    """One thread that has up to OUTSTANDING sends under way."""
    producer = Producer(configuration(job.address), (job.topic,))
    producer.startup()
    producer.send(message(job.topic))
    room, answered = threading.Semaphore(OUTSTANDING), count()

    def done(future: "Future[Any]") -> None:
        future.result()
        next(answered)
        room.release()

    start = time.perf_counter()
    while time.perf_counter() < start + job.seconds:
        room.acquire()
        producer.send_async(message(job.topic)).add_done_callback(done)
    for _ in range(OUTSTANDING):
        room.acquire()
    taken = time.perf_counter() - start
    producer.shutdown()
    return next(answered) / taken


def receive_and_ack(job: Job) -> float:
    """Receives of 32, each followed by 32 acks that do not wait for each other."""
    subscription = {job.topic: FilterExpression()}
    consumer = SimpleConsumer(configuration(job.address), "simple", subscription, await_duration=1)
    consumer.startup()
    found = 0
    start = last = time.perf_counter()
    while last < start + job.seconds:
        got = consumer.receive(BATCH, INVISIBLE_S)
        # Its public ack_async returns nothing to wait for, and this a future of asyncio.
        for acked in [consumer._ack_async(one) for one in got]:  # noqa: SLF001
            while not acked.done():
                time.sleep(LOOK_S)
            acked.result()
        found += len(got)
        last = time.perf_counter()
        if not got:
            raise RuntimeError(f"Only {found} messages were there.")
    consumer.shutdown()
    return found / (last - start)


class Counting(MessageListener):  # type: ignore[misc]
    """Counts, and notes how long the way of those took that say when they were sent."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.latencies: list[float] = []

    def consume(self, message: Message) -> ConsumeResult:
        """One message."""
        now = time.perf_counter()
        self.moments.append(now)
        if len(message.body) < len(BODY):
            self.latencies.append((now - float(message.body)) * 1000)
        return ConsumeResult.SUCCESS


def push(job: Job) -> float:
    """A push consumer with 20 threads, from its first message on."""
    listener = Counting()
    consumer = PushConsumer(
        configuration(job.address), "push", listener, {job.topic: FilterExpression()}
    )
    consumer.startup()
    while not listener.moments:
        time.sleep(0.01)
    time.sleep(job.seconds)
    moments = list(listener.moments)
    consumer.shutdown()
    return len(moments) / (moments[-1] - moments[0])


def push_latency(job: Job) -> list[float]:
    """From before the send until the listener has it, at RATE_PER_S; p50 and p99."""
    listener = Counting()
    subscription = {job.topic: FilterExpression()}
    consumer = PushConsumer(configuration(job.address), "latency", listener, subscription)
    producer = Producer(configuration(job.address), (job.topic,))
    consumer.startup()
    producer.startup()
    producer.send(message(job.topic))
    while not listener.moments:
        time.sleep(0.01)
    n = int(job.seconds * RATE_PER_S)
    start = time.perf_counter()
    for number in range(n):
        time.sleep(max(0.0, start + number / RATE_PER_S - time.perf_counter()))
        producer.send(message(job.topic, repr(time.perf_counter()).encode()))
    while len(listener.latencies) < n:
        time.sleep(0.01)
    producer.shutdown()
    consumer.shutdown()
    return [float(np.quantile(listener.latencies, q)) for q in (0.5, 0.99)]


def send_bulk(job: Job) -> float:
    """A raw stub with 256 messages a request, four requests under way."""
    channel = grpc.insecure_channel(job.address, options=[("grpc.max_send_message_length", -1)])
    stub = pb.MessagingServiceStub(channel)
    metadata = [("x-mq-client-id", f"bulk@{next(_NUMBERS)}"), ("x-mq-language", "PYTHON")]
    # Built once, as the server is what is measured: the ids of a retried send are the same, too.
    requests = [_bulk(job.topic) for _ in range(BULKS)]
    start, sent = time.perf_counter(), 0
    waiting: list[Any] = []
    while time.perf_counter() < start + job.seconds:
        waiting.append(stub.SendMessage.future(requests[len(waiting) % BULKS], metadata=metadata))
        if len(waiting) == BULKS:
            sent += _answered(waiting.pop(0))
    sent += sum(map(_answered, waiting))
    taken = time.perf_counter() - start
    channel.close()
    return sent / taken


def _bulk(topic: str) -> Any:
    request = pb.SendMessageRequest()
    for _ in range(BULK):
        one = request.messages.add(body=BODY)
        one.topic.name = topic
        own = one.system_properties
        own.message_id = f"{next(_NUMBERS):034X}"
        own.message_type = pb.MessageType.NORMAL
        own.body_encoding = pb.Encoding.IDENTITY
        own.born_timestamp.GetCurrentTime()
        own.born_host = "127.0.0.1"
    return request


def _answered(call: Any) -> int:
    reply = call.result()
    if reply.status.code != pb.Code.OK:
        raise RuntimeError(reply.status.message)
    return len(reply.entries)


JOBS: Final[dict[str, Callable[..., Any]]] = {
    "send_1": partial(send_in_threads, threads=1),
    "send_8": partial(send_in_threads, threads=8),
    "send_async": send_async,
    "receive": receive_and_ack,
    "push": push,
    "latency": push_latency,
    "bulk": send_bulk,
}


def main() -> None:
    """Do the jobs as they come."""
    for line in sys.stdin:
        job = Job(**json.loads(line))
        print(json.dumps(JOBS[job.what](job)), flush=True)


if __name__ == "__main__":
    main()
