"""Settings: the client's wishes, and the broker's reply."""

from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from rmq_pipeline import limits
from rmq_pipeline.errors import IllegalConsumerGroupError, UnknownClientTypeError
from rmq_pipeline.group import Group
from rmq_pipeline.rocketmq.clients import Client
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.protocol import (
    ClientType,
    CustomizedBackoff,
    ExponentialBackoff,
    Metric,
    RetryPolicy,
    Settings,
)
from rmq_pipeline.rocketmq.routes import endpoints, endpoints_of

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
    state = context.engine.state
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
