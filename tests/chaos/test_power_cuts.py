"""The power goes while a home is used: it opens again, and has what was answered.

RMQ_CHAOS_POWER_CUTS sets how many cuts there are of each file system in the long run (30).
"""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from tests.chaos.power import Disk
from tests.chaos.test_kill_points import Facts, assert_whole
from tests.chaos.victim import ARCHIVING
from tests.chaos.zygote import Zygote
from tests.conftest import Eventually

pytestmark = pytest.mark.chaos
CUTS = int(os.environ.get("RMQ_CHAOS_POWER_CUTS", "30"))
KINDS = ["ext4", "xfs"]
#: How long a home is used before a cut, from its first file on: many of its first second, some of
#: its first half minute, some of later.
MOMENTS = [(0.0, 0.3), (0.3, 1.0), (0.0, 1.0), (1.0, 5.0), (5.0, 30.0), (30.0, 45.0)]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "output")
    yield zygote
    zygote.close()


@pytest.fixture
def new_disk(tmp_path: Path) -> Iterator[Callable[[str], Disk]]:
    disks: list[Disk] = []

    def make(kind: str) -> Disk:
        folder = tmp_path / f"{len(disks)}"
        folder.mkdir()
        disks.append(Disk(folder, kind))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


def cut_once(
    disk: Disk, zygote: Zygote, *, facts: Path, after_s: float, eventually: Eventually
) -> int:
    """Use a home, cut the power after a time, open the home again; how much was answered."""
    home = disk.folder / "home"
    task = {"home": str(home), "facts": str(facts), "step": "", "times": 0, "rounds": 100_000}
    pid = zygote.ask(victim={**task, "archive": True})
    eventually(home.exists)
    threading.Event().wait(after_s)
    disk.cut()
    os.kill(pid, signal.SIGKILL)
    assert zygote.ask(reap=pid)  # killed, or ended by a disk that is gone
    disk.power_up()

    known = Facts.read(facts)
    later = ManualClock(time.time_ns() // 1_000_000 + 600_000)
    with Broker.open(home, clock=later, upkeep="none", settings=ARCHIVING) as broker:
        assert_whole(broker, known)
        broker.seal()
        assert broker.sql("SELECT count(*) AS n FROM events")["n"][0].as_py() > 0
    with Broker.open(home, clock=later, upkeep="none", settings=ARCHIVING):
        return len(known.sent)


@pytest.mark.parametrize("kind", KINDS)
def test_a_home_outlives_a_power_cut_in_its_first_second(
    new_disk: Callable[[str], Disk],
    zygote: Zygote,
    tmp_path: Path,
    eventually: Eventually,
    kind: str,
    seed: int,
) -> None:
    after_s = random.Random(seed).uniform(0, 1)
    cut_once(
        new_disk(kind), zygote, facts=tmp_path / "facts", after_s=after_s, eventually=eventually
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_homes_outlive_power_cuts_whenever_they_come(
    new_disk: Callable[[str], Disk],
    zygote: Zygote,
    tmp_path: Path,
    eventually: Eventually,
    kind: str,
    seed: int,
) -> None:
    dice, answered, bad = random.Random(seed), 0, []
    for cut, moments in zip(range(CUTS), itertools.cycle(MOMENTS), strict=False):
        disk, after_s = new_disk(kind), dice.uniform(*moments)
        try:
            facts = tmp_path / f"facts{cut}"
            answered += cut_once(disk, zygote, facts=facts, after_s=after_s, eventually=eventually)
        except Exception as error:  # noqa: BLE001 - all of them are told at the end
            bad.append(f"cut {cut} after {after_s:.2f} s: {type(error).__name__}: {error}"[:300])
        disk.close()
    print(f"{CUTS} cuts of {kind} (seed {seed}), {answered} answered messages, bad starts: {bad}")
    assert not bad
