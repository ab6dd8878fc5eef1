"""A client's telemetry stream, held open by a test."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, Self

import grpc

from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance.raw import Raw, resource
from tests.waiting import until


def publishing(*topics: str, language: str = "PYTHON", namespace: str = "") -> Any:
    """The settings of a producer."""
    settings = pb.Settings(client_type=pb.ClientType.PRODUCER)
    settings.publishing.topics.extend(resource(topic, namespace) for topic in topics)
    settings.user_agent.language = getattr(pb.Language, language)
    settings.access_point.scheme = pb.AddressScheme.DOMAIN_NAME
    settings.access_point.addresses.add(host="broker.example", port=1)
    return settings


def subscribing(
    group: str, *topics: str, kind: str = "PUSH_CONSUMER", language: str = "PYTHON"
) -> Any:
    """The settings of a consumer."""
    settings = pb.Settings(client_type=getattr(pb.ClientType, kind))
    settings.subscription.group.name = group
    for topic in topics:
        settings.subscription.subscriptions.add().topic.name = topic
    settings.user_agent.language = getattr(pb.Language, language)
    return settings


class Talk:
    """One open stream: what is said on it, and what comes."""

    def __init__(self, client: Raw) -> None:
        self._said: queue.Queue[Any] = queue.Queue()
        self.heard: list[Any] = []
        self.error: grpc.StatusCode | None = None
        self.over = threading.Event()
        self._stream = client.stub.Telemetry(iter(self._said.get, None), metadata=client.metadata)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        try:
            for command in self._stream:
                self.heard.append(command)
        except grpc.RpcError as error:
            self.error = error.code()
        self.over.set()

    def say(self, settings: Any) -> None:
        self._said.put(pb.TelemetryCommand(settings=settings))

    def settle(self, settings: Any) -> Any:
        """The settings that are answered."""
        before = len(self.heard)
        self.say(settings)
        until(lambda: len(self.heard) > before or self.over.is_set())
        answer = self.heard[before]
        assert answer.status.code == pb.Code.OK, answer
        return answer.settings

    def end(self) -> None:
        self._said.put(None)
        self._listener.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


@contextlib.contextmanager
def producer(client: Raw, *topics: str, **how: Any) -> Iterator[Talk]:
    """A producer that has settled its settings."""
    with Talk(client) as talk:
        talk.settle(publishing(*topics, **how))
        yield talk
