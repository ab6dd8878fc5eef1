"""Tables that are not what their types say: Arrow streams in which a few bytes are others."""

import struct
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

#: Three texts, and their offsets as Arrow keeps them.
TEXTS: Final = ["zzzzz", "zzzzz", "zzzz"]
_ENDS: Final = struct.pack("<4i", 0, 5, 10, 14)


@dataclass(frozen=True)
class Damage:
    """A sound column of three values, some bytes of it, and what becomes of them."""

    column: pa.Array
    sound: bytes
    damaged: bytes

    def stream(self, name: str, **others: Any) -> bytes:
        """An Arrow stream of a table with this column, and others that are sound."""
        table = pa.table({**others, name: self.column})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        found: bytes = sink.getvalue().to_pybytes()
        at = found.rindex(self.sound)
        assert len(self.sound) == len(self.damaged)
        return found[:at] + self.damaged + found[at + len(self.sound) :]

    def table(self, name: str, **others: Any) -> pa.Table:
        """The same as a table: Arrow opens it."""
        return pa.ipc.open_stream(self.stream(name, **others)).read_all()


def offsets(of_type: pa.DataType, *ends: int) -> Damage:
    """Three texts or bodies with these offsets."""
    column = pa.array(TEXTS).cast(of_type)
    return Damage(column, _ENDS, struct.pack("<4i", *ends))


def _damages() -> dict[str, Damage]:
    text = pa.array(TEXTS)
    each = pa.array([0, 1, 2, 3], pa.int32())
    ends, far = struct.pack("<4i", 0, 1, 3, 6), struct.pack("<4i", 0, 1, 3, 6000)
    beyond, back = struct.pack("<4i", 0, 5, 10, 1 << 20), struct.pack("<4i", 0, 10, 4, 14)
    numbers = [[1], [2, 3], [4, 5, 6]]
    return {
        "beyond": offsets(pa.binary(), 0, 5, 10, 1 << 20),
        "back": offsets(pa.binary(), 0, 10, 4, 14),
        "negative": offsets(pa.binary(), 0, -8, 10, 14),
        "text beyond": offsets(pa.string(), 0, 5, 10, 1 << 20),
        "text back": offsets(pa.string(), 0, 10, 4, 14),
        "large": Damage(
            text.cast(pa.large_string()),
            struct.pack("<4q", 0, 5, 10, 14),
            struct.pack("<4q", 0, 5, 10, 1 << 40),
        ),
        "view": Damage(
            pa.array(["z" * 5000] * 3, pa.string_view()),
            struct.pack("<i4sii", 5000, b"zzzz", 0, 0),
            struct.pack("<i4sii", 5000, b"zzzz", 0, 1 << 16),
        ),
        "null view": Damage(
            pa.array(["z" * 5000, None, "z" * 20], pa.string_view()),
            bytes(16) + struct.pack("<i4s", 20, b"zzzz"),
            struct.pack("<i12s", -51, b"zzzz") + struct.pack("<i4s", 20, b"zzzz"),
        ),
        "null view in a list": Damage(
            pa.array([["z" * 5000], [None], ["z" * 20]], pa.list_(pa.string_view())),
            bytes(16) + struct.pack("<i4s", 20, b"zzzz"),
            struct.pack("<i12s", -51, b"zzzz") + struct.pack("<i4s", 20, b"zzzz"),
        ),
        "list": Damage(pa.array(numbers), ends, far),
        "text in a list": Damage(pa.ListArray.from_arrays(each, text), _ENDS, beyond),
        "text in a map": Damage(
            pa.MapArray.from_arrays(each, text, pa.array(["v"] * 3)), _ENDS, back
        ),
        "dictionary": Damage(
            pa.array(["aa", "bb", "cc"]).dictionary_encode(),
            struct.pack("<3i", 0, 1, 2),
            struct.pack("<3i", 0, 1, 7),
        ),
        "list view": Damage(
            pa.array(numbers, pa.list_view(pa.int64())),
            struct.pack("<3i", 1, 2, 3),
            struct.pack("<3i", 1, 2, 300),
        ),
    }


#: By what is wrong.
DAMAGES: Final = _damages()
