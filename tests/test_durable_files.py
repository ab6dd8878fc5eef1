import json

import pytest

from rmq_pipeline import durable_files

VALUE = {"users": [{"name": "reader", "policies": ["topic:plain"]}], "version": 3}


@pytest.mark.parametrize("indent", [None, 2])
def test_what_was_written_is_read(indent: int | None) -> None:
    assert durable_files.load_json(durable_files.dump_json(VALUE, indent=indent)) == VALUE


def test_no_flipped_bit_gives_another_value() -> None:
    content = durable_files.dump_json(VALUE)
    for at in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            try:
                found = durable_files.load_json(bytes(flipped))
            except ValueError:
                continue
            # The name of the checksum itself may be hit: then the rest is as it was.
            assert VALUE.items() <= found.items()


def test_a_file_without_a_checksum_is_taken_as_it_is() -> None:
    assert durable_files.load_json(json.dumps(VALUE).encode()) == VALUE


@pytest.mark.parametrize("content", [b"", b"[]", b"\0\0", b"{"])
def test_what_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        durable_files.load_json(content)
