"""A closed home with a file of every kind, and what became of it after one bit of it flipped."""

import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from rmq_pipeline.access.users import read_rules
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.verification import Verified, verify
from rmq_pipeline.errors import OperatorError, RocketMQError
from tests.broker import sealed_home

#: reported: rmq verify names the file. refused: the home does not open, or a read of it fails, and
#: says so. harmless: all is there and right: no byte of use was hit, or it was made again. silent:
#: something else than messages is not what it was. wrong: messages are not what they were.
Outcome: TypeAlias = Literal["reported", "refused", "harmless", "silent", "wrong"]
SETTINGS: dict[str, Any] = {"compact_min_inputs": 2, "snapshot_events": 50, "snapshot_every_ms": 0}


def fill(home: Path) -> dict[str, Any]:
    """Make the home; what it answers to ``ask``."""
    with opened(home) as broker:
        sealed_home.fill(broker, rounds=3)
        broker.create_group("keepers", order="message_group")
        sealed_home.seal_all(broker)
        got = broker.receive("keepers", "ordered", limit=20)
        outcomes = {"receipt_handle": got["receipt_handle"], "outcome": ["ack"] * got.num_rows}
        state = pa.table({"message_group": ["g0", "g1"], "turn": [1, 2]})
        broker.settle("keepers", pa.table(outcomes), state=state, topic="ordered")
        broker.compact()
        broker.send("plain", sealed_home.messages(300, body_bytes=4000))
        sealed_home.seal_all(broker)
        broker.create_user("root", password="a-long-password", type="super")
        broker.create_user("reader", password="another-password")
        broker.put_policy("reader", resource="topic:plain", actions=["sub"])
        broker.send("plain", sealed_home.messages(30, body_bytes=4000))
    with opened(home) as broker:
        return ask(broker, home)


def opened(home: Path) -> Broker:
    return sealed_home.open_broker(home, **SETTINGS)


def ask(broker: Broker, home: Path) -> dict[str, Any]:
    """Everything that readers, consumers and the endpoints would be given."""
    found: dict[str, Any] = {}
    for topic in sorted(broker.list_topics()["name"].to_pylist()):
        for row in broker.describe_topic(topic)["offsets"]:
            at, stop = row["min_offset"], row["max_offset"]
            found[f"{topic}/{row['queue_id']}"] = (at, stop)
            for offset in range(at, stop, 50):
                read = broker.read(topic, row["queue_id"], offset=offset, limit=50)
                found[f"{topic}/{row['queue_id']}/{offset}"] = read
    found["key"] = sorted(broker.find("plain", key="k7")["message_id"].to_pylist())
    state = broker.keyed_state("keepers", "ordered")
    found["state"] = state.sort_by("message_group") if state is not None else None
    found["lag"] = broker.sql("SELECT * FROM lag ORDER BY ALL")
    events = "SELECT * FROM events ORDER BY position, row"
    found["events"] = broker.sql(events).to_pylist()
    found["progress"] = broker.sql("SELECT * FROM progress_at(now()) ORDER BY ALL").to_pylist()
    found["access"] = read_rules(home).to_json()
    return found


@dataclass(frozen=True)
class Flip:
    """One bit of one file."""

    path: str
    byte: int
    bit: int

    def do(self, home: Path) -> None:
        """Flip it; all names of the file have it."""
        with (home / self.path).open("r+b") as file:
            file.seek(self.byte)
            value = file.read(1)[0]
            file.seek(self.byte)
            file.write(bytes([value ^ (1 << self.bit)]))


def kind_of(path: str) -> str:
    """What a file of a home is, for the table."""
    name = Path(path).name
    for ending, kind in (
        (".kept", "segment"),
        (".index", "index"),
        ("_manifest.json", "manifest"),
        (".log", "log"),
        ("state.duckdb", "database"),
    ):
        if name.endswith(ending):
            return kind
    return path.partition("/")[0]


def flips(home: Path, dice: random.Random, n: int) -> list[Flip]:
    """``n`` bits, of each kind of file as many; only of bytes that were written."""
    kinds: dict[str, list[str]] = {}
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home).as_posix()
        is_other_name = name.startswith("topics/") and name.endswith(".parquet")
        if path.is_file() and path.stat().st_size and not is_other_name:
            kinds.setdefault(kind_of(name), []).append(name)
    for unread in ("lock", "handoff", "log/reserve"):
        kinds.pop(unread, None)
    kinds["log"] = [name for name in kinds["log"] if not name.endswith("reserve")]
    found = []
    chosen = list(kinds.values())
    dice.shuffle(chosen)
    for _, names in zip(range(n), _cycle(chosen), strict=False):
        name = dice.choice(names)
        content = (home / name).read_bytes().rstrip(b"\0")
        found.append(Flip(name, dice.randrange(len(content)), dice.randrange(8)))
    return found


def _cycle(values: list[list[str]]) -> Any:
    while True:
        yield from values


def outcome(full: Path, home: Path, flip: Flip, *, expected: dict[str, Any]) -> Outcome:
    """What becomes of a copy of the home with that flip."""
    subprocess.run(["cp", "-a", str(full), str(home)], check=True)
    flip.do(home)
    reported = [each for each in verify(home) if each.damage is not None]
    given = _given(home, expected=expected)
    shutil.rmtree(home)
    if given in ("wrong", "refused"):
        return given
    return "reported" if _names(reported, flip) else given


def _names(reported: list[Verified], flip: Flip) -> bool:
    return any(flip.path.endswith(each.path) for each in reported)


def _same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].equals(value) if isinstance(value, pa.Table) else found[name] == value
        for name, value in expected.items()
    )


def _given(home: Path, *, expected: dict[str, Any]) -> Outcome:
    try:
        with opened(home) as broker:
            found = ask(broker, home)
    except (OperatorError, RocketMQError):
        return "refused"
    tables = {name for name, value in expected.items() if isinstance(value, pa.Table)}
    if any(not found[name].equals(expected[name]) for name in tables & found.keys()):
        return "wrong"
    return "harmless" if _same(found, expected) else "silent"
