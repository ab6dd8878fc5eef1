"""A bit that flipped in a Parquet file of ours is an error for every reader of ours."""

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from rmq_pipeline import checked_parquet

#: Fixed bytes: of random ones, a flipped bit now and then hits the length of a body, which is an
#: error without a checksum, too.
DICE = random.Random(4)
ROWS = pa.table({"n": range(100), "body": [DICE.randbytes(50) for _ in range(100)]})
READERS: dict[str, Callable[[Path], pa.Table]] = {
    "read": checked_parquet.read,
    "scan": lambda path: checked_parquet.scan(path, pc.field("n") >= 0),
    "batches": lambda path: in_batches(checked_parquet.open_file(path)),
}


def in_batches(file: pq.ParquetFile) -> pa.Table:
    return pa.Table.from_batches(file.iter_batches(), file.schema_arrow)


def at_once(path: Path) -> None:
    checked_parquet.write(ROWS, path, compression="zstd")


def in_parts(path: Path) -> None:
    with checked_parquet.writer(path, ROWS.schema, compression="zstd") as file:
        file.write_table(ROWS)


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("write", [at_once, in_parts])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_flipped_bit_of_a_page_is_an_error(
    tmp_path: Path, write: Callable[[Path], None], read: Callable[[Path], pa.Table]
) -> None:
    path = tmp_path / "rows.parquet"
    write(path)
    assert read(path).equals(ROWS)
    column = pq.read_metadata(path).row_group(0).column(1)

    start = column.dictionary_page_offset or column.data_page_offset
    flip(path, start + column.total_compressed_size // 2)

    assert not pq.read_table(path).equals(ROWS)
    with pytest.raises(OSError, match="CRC"):
        read(path)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_any_flipped_bit_of_the_footer_is_an_arrow_error_or_harmless(
    tmp_path: Path, read: Callable[[Path], pa.Table]
) -> None:
    path = tmp_path / "rows.parquet"
    at_once(path)
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    ends = set()

    for byte in range(footer, len(whole) - 8):
        content = bytearray(whole)
        content[byte] ^= 0x80
        path.write_bytes(content)
        try:
            read(path)
        except (OSError, pa.ArrowException) as error:
            ends.add(str(error).partition(":")[0])

    assert "the name of a column is damaged" in ends or read is READERS["scan"]


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.parquet"
    pq.write_table(ROWS, path)

    for read in READERS.values():
        assert read(path).equals(ROWS)
