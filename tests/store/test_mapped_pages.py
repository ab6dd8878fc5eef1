"""Pages of log files that a reader has in memory."""

import os

from tests.memory import MemoryWatch
from tests.store.log_batches import MESSAGES, OpenLog, messages

MIB = 1 << 20


def test_the_checksum_of_a_large_section_is_computed_in_little_memory(open_log: OpenLog) -> None:
    log = open_log(file_bytes=256 * MIB)
    position = log.stage(MESSAGES, messages(*[bytes(MIB)] * 200))
    log.commit()
    log.file_of(position).release()
    watch = MemoryWatch(os.getpid())

    [(_, [section])] = log.frames(position - 64, log.end)

    assert section.batch.num_rows == 200
    assert watch.rise() < 120 * MIB
