"""The bytes of the commit log say what was meant, and nothing else passes for them."""

import zlib

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline.store.log import frame
from tests.store.log_batches import EVENT_SCHEMA, MESSAGE_SCHEMA, events

FRAME = frame.FrameHeader(position=4096, length=640, synced=64, sections=2)
SECTION = frame.SectionHeader(position=4160, length=77, kind=2, payload_crc=12345)


def test_headers_are_64_bytes_and_round_trip() -> None:
    packed = frame.pack_frame_header(FRAME, 7), frame.pack_section_header(SECTION, 7)
    data = memoryview(b"".join(packed))

    assert [len(each) for each in packed] == [64, 64]
    assert frame.unpack_frame_header(data, 0, position=4096, seed=7) == FRAME
    assert frame.unpack_section_header(data, 64, position=4160, seed=7) == SECTION
    assert SECTION.end == 4160 + 64 + 128


@given(bit=st.integers(0, 64 * 8 - 1))
def test_every_flipped_bit_of_a_header_is_seen(bit: int) -> None:
    for packed, unpack, position in (
        (frame.pack_frame_header(FRAME, 7), frame.unpack_frame_header, 4096),
        (frame.pack_section_header(SECTION, 7), frame.unpack_section_header, 4160),
    ):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack(memoryview(damaged), 0, position=position, seed=7) is None


def test_a_header_of_another_place_or_log_does_not_pass() -> None:
    data = memoryview(frame.pack_frame_header(FRAME, 7))

    assert frame.unpack_frame_header(data, 0, position=8192, seed=7) is None
    assert frame.unpack_frame_header(data, 0, position=4096, seed=8) is None
    assert frame.unpack_frame_header(data, 8, position=4096, seed=7) is None


def test_a_file_header_is_a_page_and_round_trips() -> None:
    header = frame.FileHeader(frame.VERSION, 9, 4096, frame.fingerprint({1: MESSAGE_SCHEMA}))

    page = frame.pack_file_header(header)

    assert len(page) == 4096
    assert frame.unpack_file_header(memoryview(page)) == header
    assert frame.unpack_file_header(memoryview(bytes(4096))) is None
    assert frame.unpack_file_header(memoryview(page[:-1])) is None


def test_the_fingerprint_follows_the_columns() -> None:
    schema = pa.schema([("a", pa.int32())])
    prints = {
        frame.fingerprint({1: schema}),
        frame.fingerprint({2: schema}),
        frame.fingerprint({1: pa.schema([("b", pa.int32())])}),
        frame.fingerprint({1: pa.schema([("a", pa.int64())])}),
        frame.fingerprint({1: schema, 2: schema}),
    }

    assert len(prints) == 5
    assert frame.fingerprint({1: schema, 2: EVENT_SCHEMA}) == frame.fingerprint(
        {2: EVENT_SCHEMA, 1: schema.with_metadata({"a": "b"})}
    )


@given(data=st.binary(max_size=300))
def test_the_checksum_is_a_standard_crc32(data: bytes) -> None:
    assert frame.crc32(data) == zlib.crc32(data)
    assert frame.aligned(len(data)) % 64 == 0
    assert 0 <= frame.aligned(len(data)) - len(data) < 64


def test_a_payload_with_its_schema_is_a_stream_anybody_can_read() -> None:
    batch = events(3).replace_schema_metadata({b"group_id": b"7"})

    payload = frame.encode(batch, None)

    assert pa.ipc.open_stream(payload).read_all().to_batches()[0].equals(batch)
    assert frame.decode(payload, None).equals(batch, check_metadata=True)
    assert frame.decode(frame.encode(events(3), EVENT_SCHEMA), EVENT_SCHEMA).equals(events(3))
