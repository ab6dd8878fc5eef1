"""Whatever tables and requests come, the broker lives, answers, and stores no foreign byte.

RMQ_MUTATION_SECONDS says for how long (`make chaos`: an hour), RMQ_FUZZ_SEED where it begins.
"""

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.table_mutations import Attack
from tests.conformance.brokers import serving
from tests.memory import bytes_of, limit_memory

SECONDS: Final = float(os.environ.get("RMQ_MUTATION_SECONDS", "15"))
SEED: Final = int(os.environ.get("RMQ_FUZZ_SEED", "1"))
MEMORY_BYTES: Final = 2 << 30
#: Attacks that last as long have payloads of up to 240 MiB, three at a time.
LONG_S: Final = 60.0

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


def test_mutated_tables_end_no_process_and_store_no_foreign_byte(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving(home) as served:
        pid = served.process.pid
        group = limit_memory(pid, MEMORY_BYTES)
        attack = Attack(served, seed=SEED, large=SECONDS >= LONG_S)
        try:
            attack.run(SECONDS, attackers=2)
        finally:
            attack.close()
        print(attack.findings.report(), *attack.findings.broken, sep="\n")
        assert served.process.poll() is None
        peak = bytes_of(pid, "VmHWM")
        assert not attack.findings.broken
        print(f"peak {peak >> 20} MiB, limited: {group is not None}")
        assert peak < MEMORY_BYTES
        endpoints = {where for where, _ in attack.findings.answers}
        assert endpoints == {"flight", "Flight's messages", "grpc"}
        assert attack.findings.stored > 10
    if group is not None:
        group.rmdir()
    shutil.rmtree(home)
