"""The telemetry stream: clients send their settings, and the broker pushes commands."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError

from rmq_pipeline import limits
from rmq_pipeline.errors import RequestError
from rmq_pipeline.rocketmq import rights
from rmq_pipeline.rocketmq.caller import Caller
from rmq_pipeline.rocketmq.clients import Client, Stream
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.negotiation import agreed, check
from rmq_pipeline.rocketmq.protocol import (
    HeartbeatResponse,
    Language,
    NotifyClientTerminationResponse,
    TelemetryCommand,
)
from rmq_pipeline.rocketmq.status import OK
from rmq_pipeline.rocketmq.transactions import Checks

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
        await stream.send(reply)
        if client.language == _NODE:
            self._send_again(reply, stream)
        if client.topics:  # checks may be waiting for this producer
            self._checks.look()

    def _send_again(self, reply: Any, stream: Stream) -> None:
        now_ms = self._context.clock.now_ms()
        for wait_ms in _AGAIN_MS:
            send = partial(stream.send_if_open, reply)
            self._context.timers.at(now_ms + wait_ms, partial(self._context.bridge.spawn, send))

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
