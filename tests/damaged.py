"""Bodies whose bytes were flipped on disk after they had been answered."""

from typing import Final

from rmq_pipeline.broker import Broker
from rmq_pipeline.store.log.frame import FILE_HEADER_BYTES

#: The body that is damaged; of a size that no other is.
MARK: Final = b"damaged on disk " * 50


def damage(broker: Broker) -> None:
    """Flip a bit of each body MARK in the log files."""
    broker.engine.dispatched()  # else it finds the damage first, and the broker stops
    found = 0
    for path in (broker.engine.home.path / "log").glob("*.log"):
        data = path.read_bytes()
        at = data.find(MARK, FILE_HEADER_BYTES)
        while at >= 0:
            found += 1
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 0x10]))
            at = data.find(MARK, at + len(MARK))
    assert found
