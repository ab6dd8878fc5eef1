"""Small JSON files with a checksum: a flipped bit raises an error and never yields a value.

``crc32`` is the checksum of the other entries, as compact JSON with sorted keys. A file without it
was written by an older version or edited by hand, and is accepted.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from rmq_pipeline.errors import OperatorError

CHECKSUM: Final = "crc32"


class DamagedFileError(OperatorError):
    """A small file of a home does not match its checksum, or is not JSON."""

    remedy = "Restore it from a copy; if it was edited by hand, delete its entry crc32."


def dump(value: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return the content of a file with this value and its checksum."""
    return f"{json.dumps({**value, CHECKSUM: _crc(value)}, indent=indent)}\n".encode()


def load(content: bytes) -> dict[str, Any]:
    """Return the value of a file, without its checksum.

    Raises:
        ValueError: it is not a JSON object, or does not match its checksum.
    """
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - not the caller's mistake
    expected = value.pop(CHECKSUM, None)
    if expected is not None and expected != _crc(value):
        raise ValueError("it does not match its checksum")
    return value


def _crc(value: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(value, sort_keys=True, separators=(',', ':')).encode()):08x}"
