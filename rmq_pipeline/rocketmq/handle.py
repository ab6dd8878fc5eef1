"""Single receipt handles in receipt.py's layout, without the cost of an Arrow column."""

import struct
from typing import Final, NamedTuple

#: Bit of delivery numbers whose lease the broker renews; random delivery numbers are smaller.
PROLONGED: Final = 1 << 62
#: The layout of receipt.py.
_LAYOUT: Final = struct.Struct(">qqiii")


class Handle(NamedTuple):
    """Fields of a receipt handle, in the order of its bytes."""

    delivery: int
    queue_offset: int
    queue_id: int
    topic_id: int
    group_id: int

    @property
    def is_prolonged(self) -> bool:
        """True if the broker renews the lease for a push consumer."""
        return bool(self.delivery & PROLONGED)

    def text(self) -> str:
        """Return the handle as clients get it: upper-case hex."""
        return _LAYOUT.pack(*self).hex().upper()


def parse(text: str) -> Handle | None:
    """Return the fields of a handle; None if the text is not a handle."""
    try:
        return Handle._make(_LAYOUT.unpack(bytes.fromhex(text)))
    except (ValueError, struct.error):
        return None
