"""The protocol's messages from the official Python client; the only module that imports them.

Importing the whole client takes OpenTelemetry and a quarter of a second, and makes a folder in the
user's home directory. The generated modules need none of it, so the package itself is not executed.
"""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from rmq_pipeline import errors

_CLIENT: Final = "rocketmq"
SERVICE: Final = "apache.rocketmq.v2.MessagingService"


@contextmanager
def _client_left_out() -> Iterator[None]:
    """Make submodules of the client importable without running its ``__init__``.

    The client may be imported before or afterwards: the modules are the same.
    """
    if _CLIENT in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(_CLIENT)
    if spec is None:
        raise ModuleNotFoundError("The package rocketmq-python-client is not installed.")
    sys.modules[_CLIENT] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[_CLIENT]


with _client_left_out():
    from rocketmq.grpc_protocol.definition_pb2 import (
        Address,
        AddressScheme,
        Assignment,
        Broker,
        ClientType,
        Code,
        CustomizedBackoff,
        DeadLetterQueue,
        Digest,
        DigestType,
        Encoding,
        Endpoints,
        ExponentialBackoff,
        FilterExpression,
        FilterType,
        Language,
        LiteSubscriptionAction,
        Message,
        MessageQueue,
        MessageType,
        Metric,
        Permission,
        Publishing,
        QueryOffsetPolicy,
        Resource,
        RetryPolicy,
        Settings,
        Status,
        Subscription,
        SubscriptionEntry,
        SystemProperties,
        TransactionResolution,
        TransactionSource,
    )
    from rocketmq.grpc_protocol.service_pb2 import (
        AckMessageEntry,
        AckMessageRequest,
        AckMessageResponse,
        AckMessageResultEntry,
        ChangeInvisibleDurationRequest,
        ChangeInvisibleDurationResponse,
        EndTransactionRequest,
        EndTransactionResponse,
        ForwardMessageToDeadLetterQueueRequest,
        ForwardMessageToDeadLetterQueueResponse,
        GetOffsetRequest,
        GetOffsetResponse,
        HeartbeatRequest,
        HeartbeatResponse,
        NotifyClientTerminationRequest,
        NotifyClientTerminationResponse,
        PullMessageRequest,
        PullMessageResponse,
        QueryAssignmentRequest,
        QueryAssignmentResponse,
        QueryOffsetRequest,
        QueryOffsetResponse,
        QueryRouteRequest,
        QueryRouteResponse,
        RecallMessageRequest,
        RecallMessageResponse,
        ReceiveMessageRequest,
        ReceiveMessageResponse,
        ReconnectEndpointsCommand,
        RecoverOrphanedTransactionCommand,
        SendMessageRequest,
        SendMessageResponse,
        SendResultEntry,
        SyncLiteSubscriptionRequest,
        SyncLiteSubscriptionResponse,
        TelemetryCommand,
        UpdateOffsetRequest,
        UpdateOffsetResponse,
    )
    from rocketmq.grpc_protocol.service_pb2_grpc import MessagingServiceStub

__all__ = [
    "SERVICE",
    "AckMessageEntry",
    "AckMessageRequest",
    "AckMessageResponse",
    "AckMessageResultEntry",
    "Address",
    "AddressScheme",
    "Assignment",
    "Broker",
    "ChangeInvisibleDurationRequest",
    "ChangeInvisibleDurationResponse",
    "ClientType",
    "Code",
    "CustomizedBackoff",
    "DeadLetterQueue",
    "Digest",
    "DigestType",
    "Encoding",
    "EndTransactionRequest",
    "EndTransactionResponse",
    "Endpoints",
    "ExponentialBackoff",
    "FilterExpression",
    "FilterType",
    "ForwardMessageToDeadLetterQueueRequest",
    "ForwardMessageToDeadLetterQueueResponse",
    "GetOffsetRequest",
    "GetOffsetResponse",
    "HeartbeatRequest",
    "HeartbeatResponse",
    "Language",
    "LiteSubscriptionAction",
    "Message",
    "MessageQueue",
    "MessageType",
    "MessagingServiceStub",
    "Metric",
    "NotifyClientTerminationRequest",
    "NotifyClientTerminationResponse",
    "Permission",
    "Publishing",
    "PullMessageRequest",
    "PullMessageResponse",
    "QueryAssignmentRequest",
    "QueryAssignmentResponse",
    "QueryOffsetPolicy",
    "QueryOffsetRequest",
    "QueryOffsetResponse",
    "QueryRouteRequest",
    "QueryRouteResponse",
    "RecallMessageRequest",
    "RecallMessageResponse",
    "ReceiveMessageRequest",
    "ReceiveMessageResponse",
    "ReconnectEndpointsCommand",
    "RecoverOrphanedTransactionCommand",
    "Resource",
    "RetryPolicy",
    "SendMessageRequest",
    "SendMessageResponse",
    "SendResultEntry",
    "Settings",
    "Status",
    "Subscription",
    "SubscriptionEntry",
    "SyncLiteSubscriptionRequest",
    "SyncLiteSubscriptionResponse",
    "SystemProperties",
    "TelemetryCommand",
    "TransactionResolution",
    "TransactionSource",
    "UpdateOffsetRequest",
    "UpdateOffsetResponse",
]


log = logging.getLogger(__name__)

OK: Final = Status(code=Code.OK, message="OK")

#: Classes without a code of the protocol, or with a code that clients misread. Any other class uses
#: its own code.
_CODES: Final[dict[type[errors.RocketMQError], Any]] = {
    # Clients take MESSAGE_NOT_FOUND for an empty answer.
    errors.NotFoundError: Code.NOT_FOUND,
    # Most clients do not know PRECONDITION_FAILED.
    errors.ConflictError: Code.BAD_REQUEST,
    errors.RecallError: Code.NOT_FOUND,
    # Clients repeat a call after this code; they treat TOO_MANY_REQUESTS as a reason to stop.
    errors.BrokerUnavailableError: Code.INTERNAL_SERVER_ERROR,
    # A transaction that ended in the other way is unknown to a caller that ends it now.
    errors.TransactionEndedError: Code.INVALID_TRANSACTION_ID,
}
_KNOWN: Final = frozenset(Code.values())


def status_of(error: BaseException) -> Any:
    """Return the status that tells a client of an error; unexpected errors are logged."""
    if isinstance(error, errors.RocketMQError):
        return Status(code=code_of(error), message=str(error))
    log.error("a call failed unexpectedly", exc_info=error)
    return Status(code=Code.INTERNAL_SERVER_ERROR, message=f"{type(error).__name__}: {error}")


def code_of(error: errors.RocketMQError) -> int:
    """Return the protocol's code of a broker error."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return int(_CODES[kind])
        if "code" in vars(kind) and vars(kind)["code"] in _KNOWN:
            return int(vars(kind)["code"])
    return int(Code.INTERNAL_SERVER_ERROR)
