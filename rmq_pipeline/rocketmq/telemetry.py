"""The telemetry stream: clients send their settings, and the broker pushes commands."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from rmq_pipeline import limits
from rmq_pipeline.errors import IllegalConsumerGroupError, RequestError, UnknownClientTypeError
from rmq_pipeline.group import Group
from rmq_pipeline.rocketmq import rights
from rmq_pipeline.rocketmq.clients import Caller, Client, Stream
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.protocol import (
    OK,
    ClientType,
    CustomizedBackoff,
    ExponentialBackoff,
    HeartbeatResponse,
    Language,
    Metric,
    NotifyClientTerminationResponse,
    RetryPolicy,
    Settings,
    TelemetryCommand,
)
from rmq_pipeline.rocketmq.routes import endpoints, endpoints_of
from rmq_pipeline.rocketmq.transactions import Checks

_CONSUMERS: Final = frozenset(
    (
        ClientType.PUSH_CONSUMER,
        ClientType.SIMPLE_CONSUMER,
        ClientType.PULL_CONSUMER,
        ClientType.LITE_PUSH_CONSUMER,
        ClientType.LITE_SIMPLE_CONSUMER,
    )
)
_LITE: Final = frozenset((ClientType.LITE_PUSH_CONSUMER, ClientType.LITE_SIMPLE_CONSUMER))
#: Node and Java accept only an exponential backoff for producers.
_SEND_ATTEMPTS: Final = 3
_SEND_BACKOFF: Final = ExponentialBackoff(
    initial=Duration(nanos=10_000_000), max=Duration(seconds=1), multiplier=2
)
#: As RocketMQ's proxy: a poll of 20 s for up to 32 messages.
POLL_MS: Final = 20_000
RECEIVE_ROWS: Final = 32
#: Node knows only exponential backoff, and reads its seconds as ms.
_ONLY_EXPONENTIAL: Final = "NODE_JS"


def check(settings: Any) -> None:
    """Refuse settings that are incomplete.

    Raises:
        UnknownClientTypeError: the client is neither a producer nor a consumer.
        IllegalConsumerGroupError: a consumer names no group.
    """
    if settings.client_type == ClientType.PRODUCER and settings.HasField("publishing"):
        return
    if settings.client_type in _CONSUMERS and settings.HasField("subscription"):
        if not settings.subscription.group.name:
            raise IllegalConsumerGroupError("The consumer group has no name.")
        return
    raise UnknownClientTypeError(
        f"Client type {settings.client_type} is unknown, or its settings are incomplete."
    )


def agreed(settings: Any, client: Client, *, context: Context) -> Any:
    """Return the client's own settings with those that the broker decides."""
    reply = Settings()
    reply.CopyFrom(settings)
    dialled = endpoints(settings.access_point) or endpoints_of(context.address)
    # Python's reader of this stream raises on settings without metrics, and ends.
    reply.metric.CopyFrom(Metric(on=True, endpoints=dialled))
    if settings.client_type == ClientType.PRODUCER:
        reply.publishing.max_body_size = limits.BODY_BYTES
        reply.publishing.validate_message_type = True
        reply.backoff_policy.CopyFrom(
            RetryPolicy(max_attempts=_SEND_ATTEMPTS, exponential_backoff=_SEND_BACKOFF)
        )
        return reply
    assert client.group is not None
    state = context.bridge.engine.state
    group = state.groups.get(state.group_ids.get(client.group, 0))
    subscription = reply.subscription
    subscription.fifo = group is not None and group.order != "none"
    subscription.receive_batch_size = RECEIVE_ROWS
    if not subscription.long_polling_timeout.ToMilliseconds():
        subscription.long_polling_timeout.FromMilliseconds(POLL_MS)
    if settings.client_type in _LITE:
        subscription.lite_subscription_quota = limits.LITE_TOPICS_PER_CLIENT
        subscription.max_lite_topic_size = limits.MESSAGE_GROUP_BYTES + 1
    reply.backoff_policy.CopyFrom(_backoff(group, client.language))
    return reply


def _backoff(group: Group | None, language: str) -> Any:
    """Return the group's retry policy in a form that the client's language supports."""
    attempts = limits.DEFAULT_MAX_ATTEMPTS if group is None else group.max_attempts
    if language == _ONLY_EXPONENTIAL:
        return RetryPolicy(max_attempts=attempts, exponential_backoff=_exponential(group))
    delays = limits.BACKOFF_MS if group is None else _delays(group)
    durations = []
    for delay in delays:
        duration = Duration()
        duration.FromMilliseconds(delay)
        durations.append(duration)
    return RetryPolicy(max_attempts=attempts, customized_backoff=CustomizedBackoff(next=durations))


def _delays(group: Group) -> list[int]:
    """Return the delay after each failure, without repetitions of the last one."""
    if group.backoff is None:
        return list(group.backoff_ms)
    delays = [group.backoff.delay_ms(n) for n in range(1, max(2, group.max_attempts))]
    while len(delays) > 1 and delays[-1] == delays[-2]:
        delays.pop()
    return delays[: limits.BACKOFF_GROWTHS]


def _exponential(group: Group | None) -> Any:
    """Return the group's exponential backoff, or one with the group's first and longest delay."""
    initial_ms, max_ms, multiplier = limits.BACKOFF_INITIAL_MS, limits.BACKOFF_MAX_MS, 2.0
    if group is not None and group.backoff is not None:
        grows = group.backoff
        initial_ms, max_ms, multiplier = grows.initial_ms, grows.max_ms, grows.multiplier
    elif group is not None:
        initial_ms, max_ms = group.backoff_ms[0], max(group.backoff_ms)
    made = ExponentialBackoff(multiplier=multiplier)
    made.initial.FromMilliseconds(initial_ms)
    made.max.FromMilliseconds(max_ms)
    return made


#: Node loses settings that arrive while it still queries routes, and then waits without limit.
#: The broker sends them again after these times.
_AGAIN_MS: Final = (200, 1_000, 3_000)
_NODE: Final = "NODE_JS"

Authorise = Callable[..., None]


class Telemetry:
    """Handlers of Telemetry, Heartbeat and NotifyClientTermination."""

    def __init__(self, context: Context, checks: Checks) -> None:
        self._context = context
        self._checks = checks
        self._clients = context.clients

    async def serve(
        self, commands: AsyncIterator[bytes], caller: Caller, *, authorise: Authorise
    ) -> None:
        """Serve one stream until the client ends it."""
        client, stream = self._clients.opened(caller)
        try:
            async for raw in commands:
                client.seen_ms = self._context.clock.now_ms()
                command = _command(raw)
                if command.WhichOneof("command") == "settings":
                    authorise(command.settings, caller, demands=rights.settings)
                    await self._settle(command.settings, caller, at=(client, stream))
                # Other commands answer the broker's pushes and need no reply.
        finally:
            self._clients.closed(client, stream)

    async def _settle(self, settings: Any, caller: Caller, *, at: tuple[Client, Stream]) -> None:
        client, stream = at
        check(settings)
        _note(settings, caller, client=client)
        if client.group is not None:
            entries = settings.subscription.subscriptions
            topics = [caller.named(entry.topic) for entry in entries]
            await self._context.groups.ensure(client.group, topics)
        reply = TelemetryCommand(
            status=OK, settings=agreed(settings, client, context=self._context)
        )
        if client.language == _NODE:
            # Before the first send: the times count from before the client has its settings.
            self._send_again(reply, stream)
        await stream.send(reply)
        if client.topics:  # checks may be waiting for this producer
            self._checks.look()

    def _send_again(self, reply: Any, stream: Stream) -> None:
        now_ms = self._context.clock.now_ms()
        for wait_ms in _AGAIN_MS:
            send = partial(stream.send_if_open, reply)
            self._context.bridge.timers.at(
                now_ms + wait_ms, partial(self._context.bridge.spawn, send)
            )

    async def heartbeat(self, request: Any, caller: Caller) -> Any:
        """Note that the client is alive.

        After a broker restart the Python client may not send its settings for minutes. Until then
        the heartbeat's type and group are used.
        """
        client = self._clients.seen(caller)
        if not client.type:
            client.type = request.client_type
            client.group = caller.named(request.group) if request.group.name else None
        return HeartbeatResponse(status=OK)

    async def notify_client_termination(self, _: Any, caller: Caller) -> Any:
        """Forget the client at once, without waiting for its heartbeats to stop."""
        self._clients.terminated(caller.client_id)
        return NotifyClientTerminationResponse(status=OK)


def _command(raw: bytes) -> Any:
    if len(raw) > limits.GRPC_OTHER_BYTES:
        raise RequestError(
            f"The TelemetryCommand takes {len(raw)} bytes; the limit is {limits.GRPC_OTHER_BYTES}."
        )
    try:
        return TelemetryCommand.FromString(raw)
    except DecodeError as error:
        raise RequestError("The command is not a valid TelemetryCommand.") from error


def _note(settings: Any, caller: Caller, *, client: Client) -> None:
    """Store the relevant settings of a client."""
    client.type = settings.client_type
    language = settings.user_agent.language
    if language:
        client.language = (
            Language.Name(language) if language in Language.values() else str(language)
        )
    client.topics = {caller.named(topic): topic for topic in settings.publishing.topics}
    has_group = settings.HasField("subscription") and settings.subscription.group.name
    client.group = caller.named(settings.subscription.group) if has_group else None
    subscribed = settings.subscription.subscriptions
    client.subscribed = tuple(sorted(caller.named(entry.topic) for entry in subscribed))
