"""The clients' own stream: settings are settled on it, and commands are pushed through it."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

from google.protobuf.message import DecodeError

from rmq_pipeline import limits
from rmq_pipeline.errors import RequestError
from rmq_pipeline.rocketmq import authorising
from rmq_pipeline.rocketmq.caller import Caller
from rmq_pipeline.rocketmq.checks import Checks
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

#: Node forgets settings that come while it still asks for routes, and waits for ever: it is sent
#: them again after so long.
_AGAIN_MS: Final = (200, 1_000, 3_000)
_NODE: Final = "NODE_JS"

Authorise = Callable[..., None]


class Telemetry:
    """Telemetry, Heartbeat and NotifyClientTermination."""

    def __init__(self, context: Context, checks: Checks) -> None:
        self._context = context
        self._checks = checks
        self._clients = context.clients

    async def serve(
        self, commands: AsyncIterator[bytes], caller: Caller, *, authorise: Authorise
    ) -> None:
        """One stream, until the client ends it."""
        client, stream = self._clients.opened(caller)
        try:
            async for raw in commands:
                client.seen_ms = self._context.clock.now_ms()
                command = _command(raw)
                if command.WhichOneof("command") == "settings":
                    authorise(command.settings, caller, demands=authorising.settings)
                    await self._settle(command.settings, caller, at=(client, stream))
                # What else comes answers commands of ours, which the client need not know.
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
        if client.topics:  # it may be the one that checks wait for
            self._checks.look()

    def _send_again(self, reply: Any, stream: Stream) -> None:
        now_ms = self._context.clock.now_ms()
        for wait_ms in _AGAIN_MS:
            send = partial(stream.send_if_open, reply)
            self._context.alarm.at(now_ms + wait_ms, partial(self._context.bridge.spawn, send))

    async def heartbeat(self, request: Any, caller: Caller) -> Any:
        """The client is there, as every call of it shows.

        After a restart of the broker it may be minutes until Python tells its settings again: what
        a heartbeat says of the client is known until then.
        """
        client = self._clients.seen(caller)
        if not client.type:
            client.type = request.client_type
            client.group = caller.named(request.group) if request.group.name else None
        return HeartbeatResponse(status=OK)

    async def notify_client_termination(self, _: Any, caller: Caller) -> Any:
        """The client goes: nobody waits for a heartbeat of it any more."""
        self._clients.terminated(caller.client_id)
        return NotifyClientTerminationResponse(status=OK)


def _command(raw: bytes) -> Any:
    if len(raw) > limits.GRPC_OTHER_BYTES:
        raise RequestError(f"A TelemetryCommand of {len(raw)} bytes is too large.")
    try:
        return TelemetryCommand.FromString(raw)
    except DecodeError as error:
        raise RequestError("That is no TelemetryCommand.") from error


def _note(settings: Any, caller: Caller, *, client: Client) -> None:
    """Keep what the settings say of a client."""
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
