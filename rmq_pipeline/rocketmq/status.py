"""Errors as the protocol's status: one table for all RPCs."""

import logging
from typing import Any, Final

from rmq_pipeline import errors
from rmq_pipeline.rocketmq.protocol import Code, Status

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
