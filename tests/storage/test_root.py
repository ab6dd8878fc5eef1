"""Addresses: what messages show of them."""

import pytest

from rmq_pipeline.storage.root import below, path_in, shown, split


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
