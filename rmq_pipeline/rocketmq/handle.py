"""One receipt handle at a time: as receipt.py has them, without the price of a column."""

import struct
from typing import Final, NamedTuple

#: In the number of a delivery, as those drawn are smaller: its lease lasts as long as its client.
PROLONGED: Final = 1 << 62
#: As receipt.py lays them out.
_LAYOUT: Final = struct.Struct(">qqiii")


class Handle(NamedTuple):
    """What a handle says; in the order of its bytes."""

    delivery: int
    queue_offset: int
    queue_id: int
    topic_id: int
    group_id: int

    @property
    def is_prolonged(self) -> bool:
        """Whether it is a listener's, for whom the broker prolongs it."""
        return bool(self.delivery & PROLONGED)

    def text(self) -> str:
        """As clients are given it."""
        return _LAYOUT.pack(*self).hex().upper()


def parse(text: str) -> Handle | None:
    """What a handle says; None when it is none."""
    try:
        return Handle._make(_LAYOUT.unpack(bytes.fromhex(text)))
    except (ValueError, struct.error):
        return None
