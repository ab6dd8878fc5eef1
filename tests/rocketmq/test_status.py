"""Every error is a status of the protocol."""

from collections.abc import Iterator

import pytest

from rmq_pipeline import errors
from rmq_pipeline.rocketmq.protocol import Code, code_of, status_of


def classes(of: type[errors.RocketMQError]) -> Iterator[type[errors.RocketMQError]]:
    yield of
    for kind in of.__subclasses__():
        yield from classes(kind)


@pytest.mark.parametrize("kind", list(classes(errors.RocketMQError)), ids=lambda k: k.__name__)
def test_every_error_has_a_code_of_the_protocol(kind: type[errors.RocketMQError]) -> None:
    status = status_of(kind("what happened."))

    assert status.code in Code.values()
    assert status.code not in (Code.OK, Code.CODE_UNSPECIFIED, Code.MESSAGE_NOT_FOUND)
    assert status.message == f"what happened. {kind.remedy}"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (errors.TopicNotFoundError, "TOPIC_NOT_FOUND"),
        (errors.ConsumerGroupNotFoundError, "CONSUMER_GROUP_NOT_FOUND"),
        (errors.NotFoundError, "NOT_FOUND"),
        (errors.TransactionNotFoundError, "INVALID_TRANSACTION_ID"),
        (errors.TransactionEndedError, "INVALID_TRANSACTION_ID"),
        (errors.ReceiptHandleError, "INVALID_RECEIPT_HANDLE"),
        (errors.TableSchemaError, "BAD_REQUEST"),
        (errors.AlreadyExistsError, "BAD_REQUEST"),
        (errors.RecallError, "NOT_FOUND"),
        (errors.DispatchBehindError, "TOO_MANY_REQUESTS"),
        (errors.LiteSubscriptionQuotaError, "LITE_SUBSCRIPTION_QUOTA_EXCEEDED"),
        (errors.BrokerUnavailableError, "INTERNAL_SERVER_ERROR"),
        (errors.StoreFullError, "INTERNAL_SERVER_ERROR"),
        (errors.StorageError, "INTERNAL_SERVER_ERROR"),
        (errors.UnauthorizedError, "UNAUTHORIZED"),
        (errors.ForbiddenError, "FORBIDDEN"),
    ],
)
def test_errors_have_the_codes_that_clients_know(
    kind: type[errors.RocketMQError], name: str
) -> None:
    assert Code.Name(code_of(kind("x"))) == name


def test_an_unexpected_error_is_returned_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    status = status_of(ZeroDivisionError("by nothing"))

    assert status.code == Code.INTERNAL_SERVER_ERROR
    assert status.message == "ZeroDivisionError: by nothing"
    assert "a call failed unexpectedly" in caplog.text
