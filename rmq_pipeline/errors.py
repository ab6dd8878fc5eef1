"""Every error of the system, in one tree; families answer what the caller should do.

RocketMQError
├── RequestError          change the request
├── AccessError           show who you are, or ask for the right
├── NotFoundError         create it, or look elsewhere
├── ConflictError         somebody else was first, or the thing is in use
├── BusyError             wait and retry
└── OperatorError         an operator must look

Each class carries RocketMQ's v2 status code and a remedy. Doors translate classes, never texts.
"""

from typing import ClassVar


class RocketMQError(Exception):
    """A refusal by the broker; ``remedy`` says what to do about it."""

    code: ClassVar[int] = 50001
    remedy: ClassVar[str] = "Look at the broker's log."

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} {self.remedy}" if text else self.remedy

    @property
    def message(self) -> str:
        """What happened, without the remedy."""
        return super().__str__()


class RequestError(RocketMQError):
    """The request cannot be carried out as it is."""

    code = 40000
    remedy = "Change the request."


class TableSchemaError(RequestError):
    """A table lacks a column, or a column has the wrong type."""

    remedy = "Give the table the columns that rmq_pipeline.schema names."


class IllegalTopicError(RequestError):
    """A topic name breaks the rules."""

    code = 40002
    remedy = "Use 1 to 127 of the characters A-Z a-z 0-9 _ - % |."


class IllegalConsumerGroupError(RequestError):
    """A consumer group name breaks the rules."""

    code = 40003
    remedy = "Use 1 to 120 of the characters A-Z a-z 0-9 _ - % |."


class IllegalMessageTagError(RequestError):
    """A tag is blank, or holds | or a control character."""

    code = 40004
    remedy = "Use a tag without | and control characters."


class IllegalMessageKeyError(RequestError):
    """A key is blank or holds a control character."""

    code = 40005
    remedy = "Use keys without spaces and control characters."


class IllegalMessageGroupError(RequestError):
    """A message group is missing, blank, too long, or not taken by the topic."""

    code = 40006
    remedy = "Give every message of a fifo topic a message_group of under 64 bytes."


class IllegalLiteTopicError(RequestError):
    """The name of a lite topic is missing, blank, too long, or not taken by the topic."""

    code = 40020
    remedy = "Give every message of a topic of type lite a lite_topic of under 64 bytes."


class IllegalMessagePropertyError(RequestError):
    """A property has a reserved or blank name, or a control character."""

    code = 40007
    remedy = "Rename the property."


class IllegalMessageIdError(RequestError):
    """A message id is blank."""

    code = 40009
    remedy = "Leave message_id out, or give every message its own."


class FilterExpressionError(RequestError):
    """A filter expression does not parse."""

    code = 40010
    remedy = "A tag filter is * or tags joined by ||; a SQL92 filter is a condition on properties."


class InvisibleDurationError(RequestError):
    """An invisible duration is out of range."""

    code = 40011
    remedy = "Use 1 ms to 12 h."


class DeliveryTimeError(RequestError):
    """A delay level or delivery time is out of range."""

    code = 40012
    remedy = "Use a level from 1 on, or a time at most one year ahead."


class TransactionError(RequestError):
    """A transaction cannot be begun or ended like this; nothing was changed."""

    remedy = "End it with commit, rollback or unknown, as the producer group that began it."


class ReceiptHandleError(RequestError):
    """A receipt has ended, was settled, or belongs to another delivery; nothing was changed."""

    code = 40013
    remedy = "Receive the message again and settle that delivery."


class MessageTypeError(RequestError):
    """The topic does not take messages of this type."""

    code = 40014
    remedy = "Send it to a topic of its type."


class MessageCorruptedError(RequestError):
    """A request to send has no message, or of several topics, or a body that does not unpack."""

    code = 40016
    remedy = "Send messages of one topic at a time, with bodies as they are or in GZIP."


class ClientIdRequiredError(RequestError):
    """A call does not say which client makes it."""

    code = 40017
    remedy = "Give every call the client's identity as x-mq-client-id."


class UnknownClientTypeError(RequestError):
    """The settings of a client are those of no kind of client that there is."""

    code = 40015
    remedy = "Give a client_type, and publishing or subscription to go with it."


class IllegalOffsetError(RequestError):
    """An offset lies outside what the queue keeps."""

    code = 40019
    remedy = "Use an offset between the queue's min_offset and max_offset."


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
    remedy = "Keep them within 128 entries and 16 KiB a message."


class QueryError(RequestError):
    """A SQL query is not one read-only SELECT, does not parse, or ran out of time."""

    remedy = "Give one SELECT over the documented views."


class AllocationError(RequestError):
    """The queues of a topic cannot be shared among the members of a consumer group."""

    remedy = "Check the allocation strategy's settings, the client ids and the names of brokers."


class ConsumerUsageError(RequestError):
    """A consumer was asked for what it is not there for, or is closed."""

    remedy = "Subscribe or assign, not both; make a new consumer in place of a closed one."


class AccessError(RocketMQError):
    """The caller may not do this; nothing was changed."""

    code = 40300
    remedy = "Ask who runs the broker."


class UnauthorizedError(AccessError):
    """The broker has access control, and the call does not prove who makes it."""

    code = 40100
    remedy = "Give user and password: RMQ_USER and RMQ_PASSWORD, or a client's own settings."


class ForbiddenError(AccessError):
    """The user who calls has no policy that allows this."""

    code = 40300
    remedy = "Have it allowed: `rmq acl allow USER RESOURCE --actions ...`."


class NotFoundError(RocketMQError):
    """The thing named does not exist."""

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
    """A consumer group has read nothing of a queue: it stands nowhere."""

    code = 40404
    remedy = "Receive from the queue, or say how far the group is."


class TransactionNotFoundError(NotFoundError):
    """No half message has this transaction id; nothing was changed."""

    code = 40008
    remedy = "Use the transaction_id that the broker gave with the half message."


class ConflictError(RocketMQError):
    """The state of the broker does not allow it now."""

    code = 40900
    remedy = "Look at the current state and decide again."


class AlreadyExistsError(ConflictError):
    """It exists already, with other settings."""

    remedy = "Alter it, or ask for the settings it has."


class InUseError(ConflictError):
    """Messages are in flight or scheduled for it."""

    remedy = "Wait until they are settled, or force it."


class TransactionEndedError(ConflictError):
    """It was ended before, and otherwise; nothing was changed."""

    remedy = "The first end stands: look at what became of the message."


class RecallError(ConflictError):
    """A message cannot be called back: delivered, called back before, or not of this topic."""

    remedy = "Nothing was called back. What was delivered can only be answered by another message."


class SinkChangedError(ConflictError):
    """Files that are to be replaced in a sink are not those that count; nothing was changed."""

    remedy = "Ask for the files that count now, and make the replacement of those."


class FencedError(ConflictError):
    """A newer window of the same name has taken over; nothing was changed."""

    remedy = "End this window: its messages come again in the newer one."


class QueueLockedError(ConflictError):
    """Another client of the consumer group holds the lock of a queue; nothing was changed."""

    remedy = "Leave the queue to the client that holds it, or wait for the end of its lock."

    #: Which one, whose it is, and until when.
    queue_id: int = -1
    holder: str = ""
    expires_at_ms: int = 0


class BusyError(RocketMQError):
    """The broker cannot take more now."""

    code = 42900
    remedy = "Wait and retry."


class LiteSubscriptionQuotaError(BusyError):
    """A client has subscribed to as many lite topics as one may."""

    code = 42902
    remedy = "Remove lite topics that it no longer reads, or use another client."


class DispatchBehindError(BusyError):
    """Dispatch is too far behind the commit log to take more messages."""


class BrokerUnavailableError(BusyError):
    """No broker answers."""

    code = 50003
    remedy = "Start it with `rmq broker` or `rmq up`."


class OperatorError(RocketMQError):
    """The store or its home needs an operator."""


class StorageError(OperatorError):
    """A write or sync failed; what was not answered may or may not be stored."""

    remedy = "Check the disk; the broker rebuilds its state from what is on it."


class StoreFullError(OperatorError):
    """The disk has no room for this."""

    code = 50004
    remedy = "Free space, or let seal and expire drop old log files."


class CorruptLogError(OperatorError):
    """A frame of the commit log does not match its checksum."""

    remedy = "Restore the file from a copy; the broker does not start over a damaged log."


class HomeLockedError(OperatorError):
    """Another process has the home open."""

    remedy = "Connect to that broker, or stop it with `rmq stop`."


class HomeFormatError(OperatorError):
    """Another version wrote the home, in a format that this one does not read."""

    remedy = "Use the version of rmq_pipeline that wrote it, or begin a new home."


class AccessFileError(OperatorError):
    """The file of users and policies is damaged; the broker does not start without it."""

    remedy = "Restore access.json from a copy; without the file there are no users."


class ArchiveError(OperatorError):
    """The archive root is another home's, or not the one this home has its segments in."""

    remedy = "Set archive_root to where this home's segments are, or to an empty folder."


def by_name(name: str) -> type[RocketMQError]:
    """The error class of that name; RocketMQError when there is none (a newer broker's)."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, RocketMQError):
        return found
    return RocketMQError
