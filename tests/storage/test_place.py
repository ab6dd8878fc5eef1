"""Roots at addresses: nothing is asked for opening one."""

import pytest

from rmq_pipeline.broker.work import home as homes
from rmq_pipeline.errors import ArchiveError
from rmq_pipeline.storage.place import at


@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_a_bucket_opens_without_a_request(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "eu-west-3")
    # A request would fail.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")

    root = at(f"s3://{variable.lower().replace('_', '-')}/x")

    assert str(root).endswith("-region/x")


def test_an_archive_whose_address_cannot_be_opened_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(_: object) -> None:
        raise OSError("When resolving region for bucket 'bucket': away")

    monkeypatch.setattr(homes, "at", away)

    with pytest.raises(ArchiveError, match="s3://bucket/x cannot be used: When resolving"):
        homes._marked("s3://bucket/x", "id", is_claimed=True)


@pytest.mark.parametrize("scheme", ["abfs", "abfss"])
def test_azure_is_refused(scheme: str) -> None:
    with pytest.raises(ValueError, match="have not been tried") as told:
        at(f"{scheme}://container@account.dfs.core.windows.net/x")

    assert f"{scheme}://***@account" in str(told.value)
