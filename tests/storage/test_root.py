"""Addresses: what messages show of them."""

import pytest

from rmq_pipeline.storage.root import shown


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
