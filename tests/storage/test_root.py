"""Addresses: what messages show of them."""

from pathlib import Path

import pytest

from rmq_pipeline.storage.root import address_of, below, path_in, shown, split


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("s3://bucket/x", "s3://bucket/x"),
        ("s3://bucket/x?region=y&secret_key=abc", "s3://bucket/x?region=y&secret_key=***"),
        ("s3://AK:abc@bucket/x?region=y", "s3://***@bucket/x?region=y"),
        ("s3://AK:abc/def+gh@bucket/x", "s3://***@bucket/x"),
        ("s3://AK:abc?def#gh@bucket/x", "s3://***@bucket/x"),
        ("s3://AK:a@b/c@bucket/x", "s3://***@bucket/x"),
        ("s3://AK:[abc@bucket/x", "s3://***@bucket/x"),
        ("/data/a@b", "/data/a@b"),
    ],
)
def test_secrets_of_an_address_are_not_shown(address: str, expected: str) -> None:
    assert shown(address) == expected


def test_options_stay_behind_the_path() -> None:
    folder = "s3://bucket/a?endpoint_override=x:1/y"

    path = path_in(folder, "%RETRY%g/hour=1/b c.parquet")

    assert path == "s3://bucket/a/%25RETRY%25g/hour=1/b%20c.parquet?endpoint_override=x:1/y"
    above = str(below(folder, "%RETRY%g/hour=1"))
    assert split(path) == (above, "b c.parquet")
    assert path_in("/a?b", "%c") == "/a?b/%c"
    assert below(folder, "") == folder


@pytest.mark.parametrize("address", ["", "file://host/x", "file:///x?a=b", "file:///x#y"])
def test_an_address_that_names_another_place_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"is empty|must be file:///"):
        address_of(address)


def test_the_uri_of_a_local_path_is_a_path() -> None:
    assert address_of("file:///x%20y") == address_of("file://localhost/x%20y") == Path("/x y")
