"""Errors as the protocol's status: one table, for every RPC."""

import logging
from typing import Any, Final

from rmq_pipeline import errors
from rmq_pipeline.rocketmq.protocol import Code, Status

log = logging.getLogger(__name__)

OK: Final = Status(code=Code.OK, message="OK")

#: Where a class has no code of the protocol, or one that clients take for something else. An error
#: that is not here has the code of its class.
_CODES: Final[dict[type[errors.RocketMQError], Any]] = {
    # MESSAGE_NOT_FOUND is an empty answer to clients.
    errors.NotFoundError: Code.NOT_FOUND,
    # PRECONDITION_FAILED is an unknown code to most clients.
    errors.ConflictError: Code.BAD_REQUEST,
    errors.RecallError: Code.NOT_FOUND,
    # Clients repeat a call that failed so; they take one too many for a reason to give up.
    errors.BrokerUnavailableError: Code.INTERNAL_SERVER_ERROR,
    # What was ended otherwise is no transaction any more, to whoever would end it now.
    errors.TransactionEndedError: Code.INVALID_TRANSACTION_ID,
}
_KNOWN: Final = frozenset(Code.values())


def status_of(error: BaseException) -> Any:
    """What a client is told of an error; one that nobody foresaw is logged, too."""
    if isinstance(error, errors.RocketMQError):
        return Status(code=code_of(error), message=str(error))
    log.error("a call has failed", exc_info=error)
    return Status(code=Code.INTERNAL_SERVER_ERROR, message=f"{type(error).__name__}: {error}")


def code_of(error: errors.RocketMQError) -> int:
    """The protocol's code of an error of ours."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return int(_CODES[kind])
        if "code" in vars(kind) and vars(kind)["code"] in _KNOWN:
            return int(vars(kind)["code"])
    return int(Code.INTERNAL_SERVER_ERROR)
