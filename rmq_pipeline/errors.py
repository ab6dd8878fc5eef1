"""Every error of the system, in one tree; a family says what the caller should do.

RocketMQError
├── RequestError          change the request
├── AccessError           authenticate, or ask for the permission
├── NotFoundError         create it, or look elsewhere
├── ConflictError         another client was first, or the object is in use
├── BusyError             wait and retry
└── OperatorError         an operator must look

Each class has RocketMQ's v2 status code and a remedy. Where the class's remedy does not fit, the
``raise`` statement passes another one. Endpoints map classes to status codes, never texts.
"""

from typing import ClassVar


class RocketMQError(Exception):
    """A refusal by the broker; ``remedy`` says what to do about it."""

    code: ClassVar[int] = 50001
    remedy: str = "See the broker's log."

    def __init__(self, message: str = "", *, remedy: str | None = None) -> None:
        super().__init__(message)
        if remedy is not None:
            self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    @property
    def message(self) -> str:
        """The error text without the remedy."""
        return super().__str__()


class RequestError(RocketMQError):
    """The request is invalid."""

    code = 40000
    remedy = "Change the request."


class TableSchemaError(RequestError):
    """A table lacks a column, or a column has the wrong type."""


class IllegalTopicError(RequestError):
    """A topic name is invalid, or clients may not use the topic."""

    code = 40002
    remedy = "Use a topic that `rmq topic list` shows."


class IllegalConsumerGroupError(RequestError):
    """A consumer group name is invalid."""

    code = 40003
    remedy = "Use a consumer group that `rmq group list` shows."


class IllegalMessageTagError(RequestError):
    """A tag is blank, or contains | or a control character."""

    code = 40004
    remedy = "Use a tag without | and control characters."


class IllegalMessageKeyError(RequestError):
    """A key is blank or contains a control character."""

    code = 40005
    remedy = "Use keys that are not blank, without control characters; blanks separate keys."


class IllegalMessageGroupError(RequestError):
    """A message group is missing, blank or too long, or the topic does not take one."""

    code = 40006
    remedy = "Give every message of a fifo topic a message_group of under 64 bytes."


class IllegalLiteTopicError(RequestError):
    """A lite topic name is missing, blank or too long, or the topic does not take one."""

    code = 40020
    remedy = "Give every message of a topic of type lite a lite_topic of under 64 bytes."


class IllegalMessagePropertyError(RequestError):
    """A property has a reserved or blank name, or contains a control character."""

    code = 40007


class IllegalMessageIdError(RequestError):
    """A message id is blank."""

    code = 40009


class FilterExpressionError(RequestError):
    """A filter expression does not parse."""

    code = 40010


class InvisibleDurationError(RequestError):
    """An invisible duration is out of range."""

    code = 40011


class DeliveryTimeError(RequestError):
    """A delay level or delivery time is out of range."""

    code = 40012


class TransactionError(RequestError):
    """A transaction cannot be begun or ended like this; nothing was changed."""


class ReceiptHandleError(RequestError):
    """A receipt has ended, was settled, or belongs to another delivery; nothing was changed."""

    code = 40013
    remedy = "Receive the message again and settle that delivery."


class MessageTypeError(RequestError):
    """The topic's type does not allow the operation."""

    code = 40014
    remedy = "Use a topic of the right type: `rmq topic list` shows them."


class MessageCorruptedError(RequestError):
    """A send request has no message, several topics, or a body that is not valid gzip."""

    code = 40016
    remedy = "Send messages of one topic at a time, with plain or gzip bodies."


class ClientIdRequiredError(RequestError):
    """A call carries no client id."""

    code = 40017
    remedy = "Send the client id with every call, as x-mq-client-id."


class UnknownClientTypeError(RequestError):
    """The settings of a client fit no known client type."""

    code = 40015
    remedy = "Send client_type, and publishing or subscription to match it."


class IllegalOffsetError(RequestError):
    """An offset is outside the range that the queue retains."""

    code = 40019
    remedy = "Use an offset between the queue's min_offset and max_offset."


class IllegalQueueError(IllegalOffsetError):
    """A topic has no queue with this number."""

    remedy = "Use a queue_id from 0 to one below the number of queues; see `rmq topic show`."


class MessageBodyTooLargeError(RequestError):
    """A body is over 4 MiB, or a batch is over its limit."""

    code = 41301
    remedy = "Keep a body within 4 MiB and a batch within 256 MiB."


class MessageBodyEmptyError(RequestError):
    """A body is empty."""

    code = 41302
    remedy = "Give every message a body of at least one byte."


class MessagePropertiesTooLargeError(RequestError):
    """Properties, keys and tag together are too large."""

    code = 43101
    remedy = "Use at most 128 properties and 16 KiB per message."


class QueryError(RequestError):
    """A query is not a single read-only SELECT, does not parse, or timed out."""

    remedy = "Send one SELECT over the documented views."


class AllocationError(RequestError):
    """The queues of a topic cannot be shared out among the members of a consumer group."""


class ConsumerUsageError(RequestError):
    """A consumer does not support the operation, or is closed."""


class AccessError(RocketMQError):
    """The caller is not permitted to do this; nothing was changed."""

    code = 40300
    remedy = "Ask the broker's administrator."


class UnauthorizedError(AccessError):
    """Access control is on, and the call has no valid credentials."""

    code = 40100
    remedy = "Set user and password: RMQ_USER and RMQ_PASSWORD, or a client's own settings."


class ForbiddenError(AccessError):
    """No policy of the user allows this."""

    remedy = "Ask an administrator for `rmq acl allow USER RESOURCE --actions ...`."


class NotFoundError(RocketMQError):
    """The named object does not exist."""

    code = 40401
    remedy = "Create it, or check the name."


class TopicNotFoundError(NotFoundError):
    """No topic has this name."""

    code = 40402
    remedy = "Create it with `rmq topic create`, or check the name."


class ConsumerGroupNotFoundError(NotFoundError):
    """No consumer group has this name."""

    code = 40403
    remedy = "Create it with `rmq group create`, or check the name."


class OffsetNotFoundError(NotFoundError):
    """A consumer group has committed no offset of a queue."""

    code = 40404
    remedy = "Receive from the queue, or set the group's offset."


class TransactionNotFoundError(NotFoundError):
    """No half message has this transaction id; nothing was changed."""

    code = 40008
    remedy = "Use the transaction_id that the broker returned for the half message."


class ConflictError(RocketMQError):
    """The broker's present state does not allow this."""

    code = 40900
    remedy = "Check the current state and decide again."


class AlreadyExistsError(ConflictError):
    """The object exists with other settings."""

    remedy = "Alter it, or request the settings it has."


class InUseError(ConflictError):
    """The object has messages in flight or scheduled."""

    remedy = "Wait until they are settled, or force it."


class TransactionEndedError(ConflictError):
    """The transaction was ended before with another resolution; nothing was changed."""

    remedy = "The first resolution stands; check the outcome of the message."


class RecallError(ConflictError):
    """A message cannot be recalled: delivered, recalled before, or of another topic."""

    remedy = "Nothing was recalled; check the outcome of the message."


class SinkChangedError(ConflictError):
    """The files to replace in a sink are not its current ones; nothing was changed."""

    remedy = "Read the current files with sink_files, and replace those."


class FencedError(ConflictError):
    """A newer window of the same name has taken over; nothing was changed."""

    remedy = "End this window; the newer one receives its messages again."


class MixedFiltersError(ConflictError):
    """Members of a consumer group receive with different filters, which the broker refuses."""

    remedy = "Use the same filter in all members, or one group per filter."


class QueueLockedError(ConflictError):
    """Another client of the consumer group holds the lock of a queue; nothing was changed."""

    remedy = "Leave the queue to the client that holds it, or wait until its lock expires."

    #: The queue, the client that holds its lock, and the end of the lock.
    queue_id: int = -1
    holder: str = ""
    expires_at_ms: int = 0


class BusyError(RocketMQError):
    """The broker has reached a limit for now."""

    code = 42900
    remedy = "Wait and retry."


class QueryPostponedError(QueryError, BusyError):
    """A query found no turn or was stopped for other work of the broker; it may be repeated."""

    code = 42900
    remedy = "Wait and retry."


class LiteSubscriptionQuotaError(BusyError):
    """A client has as many lite topics as it may have."""

    code = 42902
    remedy = "Remove lite topics that it no longer reads, or use another client."


class DispatchBehindError(BusyError):
    """Dispatch is too far behind the commit log to take more messages."""


class BrokerUnavailableError(BusyError):
    """No broker answers."""

    code = 50003
    remedy = "Start it with `rmq broker` or `rmq up`."


class StandbyError(BrokerUnavailableError):
    """This broker is a standby: it answers reads only, until it leads. Nothing was changed."""

    remedy = "Call the broker that leads, or give the client the addresses of both."

    def __init__(self, message: str = "This broker is a standby.", *, remedy: str | None = None):
        super().__init__(message, remedy=remedy)


class OperatorError(RocketMQError):
    """The store or its home needs an operator."""


class StorageError(OperatorError):
    """A write or sync failed; unanswered requests may or may not be stored."""

    remedy = "Check the disk; the broker rebuilds its state from the commit log."


class StoreFullError(OperatorError):
    """The disk has too little free space."""

    code = 50004
    remedy = "Free space, or let seal and expire drop old log files."


class LogStoreError(StorageError):
    """The store of the commit log does not answer; unanswered requests may or may not be stored."""

    remedy = "Check the database, bucket or stream of log_store; the broker retries meanwhile."


class LogFencedError(OperatorError):
    """Another broker has taken over the commit log; this one stores and answers nothing more."""

    remedy = "Use the broker that leads. This one has ended; start it again after that one."


class LogHeldError(OperatorError):
    """Another broker leads the commit log in the same store."""

    remedy = "Use that broker, or stop it with `rmq stop` on its machine."


class CorruptLogError(OperatorError):
    """A frame of the commit log, or a segment, does not match its checksum."""

    remedy = (
        "Restore the file, or a backup (`rmq restore`). If a start fails, `rmq repair HOME"
        " --dry-run` says what can be kept."
    )


class HomeLockedError(OperatorError):
    """Another process has the home open."""

    remedy = "Connect to that broker, or stop it with `rmq stop`."


class HomeFormatError(OperatorError):
    """Another version wrote the home, in a format that this version does not read."""

    remedy = "Use the version of rmq_pipeline that wrote it, or create a new home."


class AccessFileError(OperatorError):
    """The file of users and policies is damaged; the broker does not start without it."""

    remedy = "Restore access.json from a copy; without the file there are no users."


class ArchiveError(OperatorError):
    """The archive root belongs to another home, or lacks this home's segments."""

    remedy = "Set archive_root to the folder of this home's segments, or to an empty one."


def by_name(name: str) -> type[RocketMQError]:
    """Return the error class with that name; RocketMQError for an unknown one of a newer broker."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, RocketMQError):
        return found
    return RocketMQError
