"""A broker, a load and members in processes of their own, and what the members have noted."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.flight import flags, process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import Listening
from tests.free_address import free_address
from tests.waiting import until

ROOT: Final = Path(__file__).parents[2]
TOPIC: Final = "orders"
GROUP: Final = "desks"
QUEUES: Final = 6
KEYS: Final = 40
#: Messages of a send, and how long to wait for the next one.
SENT: Final = 40
TURN_S: Final = 0.1
WORK_S: Final = 0.01
#: Calls at a time of a member, as member.py has it.
THREADS: Final = 4

Place = tuple[int, int]


class Load(threading.Thread):
    """Sends messages, each ``key:number``, until it is stopped."""

    def __init__(self, client: Client) -> None:
        super().__init__(name="load")
        self._client = client
        self._over = threading.Event()
        #: Seconds between two sends.
        self.turn_s = TURN_S
        self.sent: list[str] = []

    def run(self) -> None:
        while not self._over.wait(self.turn_s):
            start = len(self.sent)
            bodies = [f"k{i % KEYS}:{i // KEYS}" for i in range(start, start + SENT)]
            keys = [body.partition(":")[0] for body in bodies]
            # What is sent again for want of an answer is stored once.
            table = {
                "body": [body.encode() for body in bodies],
                "message_group": keys,
                "message_id": bodies,
            }
            self._send(pa.table(table))
            self.sent += bodies

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _send(self, messages: pa.Table) -> None:
        """Send until it is answered, after ``stop`` too: only what was answered counts as sent."""

        def answered() -> bool:
            try:
                self._client.send(TOPIC, messages)
            except BrokerUnavailableError:
                return False
            return True

        until(answered, within_s=120, what="a broker that takes the messages")


@dataclass(frozen=True)
class Call:
    """A listener that was called with a message; ``end_ms`` None: it was killed meanwhile."""

    member: str
    place: Place
    body: str
    begin_ns: int
    begin_ms: int
    end_ms: int | None


class Scene:
    """A broker, a load, and members."""

    def __init__(
        self,
        folder: Path,
        *,
        order: str,
        group_order: str,
        settings: dict[str, Any] | None = None,
        pace: dict[str, Any] | None = None,
    ) -> None:
        self._folder, self._order = folder, order
        self._settings, self._pace = {**(flags.given() or {}), **(settings or {})}, pace or {}
        self.home, self.journal = folder / "home", folder / "journal"
        self._address = free_address()
        self.serve()
        self.client = Client(self._address)
        self.client.create_topic(TOPIC, type="fifo", queues=QUEUES, deduplicate="message_id")
        self.client.create_group(GROUP, order=group_order)
        self.load = Load(self.client)
        self.members: dict[str, subprocess.Popen[bytes]] = {}
        self.journal.touch()
        self._read, self._notes = 0, list[dict[str, Any]]()

    def serve(self) -> None:
        self._broker = process.start(
            self.home, listening=Listening(flight=self._address), settings=self._settings
        )

    def kill_broker(self) -> None:
        """kill -9, and another one for its home."""
        os.kill(self._broker.pid, signal.SIGKILL)
        until(lambda: not self._broker.is_alive())
        self.serve()

    def start(self, name: str) -> None:
        told = {
            "address": self._address,
            "name": name,
            "group": GROUP,
            "topic": TOPIC,
            "order": self._order,
            "journal": str(self.journal),
            "work_s": WORK_S,
            "pace": self._pace,
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            self.members[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.consumer.member", json.dumps(told)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def end(self, name: str, how: signal.Signals) -> int:
        """Send a signal, and wait for the end; its exit code."""
        self.members[name].send_signal(how)
        return self.members[name].wait(60)

    def close(self) -> None:
        if self.load.is_alive():
            self.load.stop()
        for member in self.members.values():
            member.kill()
            member.wait()
        self.client.close()
        process.stop(self.home)

    def sql(self, query: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.client.sql(query).to_pylist()
        return rows

    def notes(self) -> list[dict[str, Any]]:
        """The journal so far; what a kill has cut off is no line."""
        with self.journal.open("rb") as journal:
            journal.seek(self._read)
            whole, _, _ = journal.read().rpartition(b"\n")
        if whole:
            self._read += len(whole) + 1
            self._notes += map(json.loads, whole.split(b"\n"))
        return self._notes

    def calls(self) -> list[Call]:
        """Every call of a listener, in the order of their begin."""
        open_calls: dict[tuple[str, Place], dict[str, Any]] = {}
        found = []
        for note in self.notes():
            place = note["queue_id"], note["queue_offset"]
            key = note["member"], place
            if note["what"] == "begin":
                assert key not in open_calls, f"{key} was called while it ran"
                open_calls[key] = note
            else:
                found.append(_call(open_calls.pop(key), end_ms=note["at_ms"]))
        found += [_call(note, end_ms=None) for note in open_calls.values()]
        return sorted(found, key=lambda call: call.begin_ns)

    def counts(self) -> Counter[str]:
        """How many calls each member has begun."""
        return Counter(note["member"] for note in self.notes() if note["what"] == "begin")

    def wait_for_calls(self, more: int, *names: str) -> None:
        """Wait until each of these members has begun so many calls more."""
        before = self.counts()

        def are_there() -> bool:
            now = self.counts()
            for name in names:
                assert self.members[name].poll() is None, (self._folder / f"{name}.log").read_text()
            return all(now[name] >= before[name] + more for name in names)

        until(
            are_there,
            within_s=60,
            what=f"{more} more calls of each of {', '.join(names)}, who had {before}",
        )

    def holders(self) -> set[str]:
        """Owners of queue locks; an empty name stands for queues without an owner."""
        names = [row["client_id"] for row in self.sql("SELECT client_id FROM queue_locks")]
        return {*names, *([""] if len(names) < QUEUES else [])}

    def is_drained(self) -> bool:
        """Whether the group is done with everything."""
        rows = self.sql(f"SELECT lag FROM lag WHERE consumer_group = '{GROUP}'")
        return bool(rows) and all(row["lag"] == 0 for row in rows)


def _call(note: dict[str, Any], *, end_ms: int | None) -> Call:
    place = note["queue_id"], note["queue_offset"]
    return Call(note["member"], place, note["body"], note["at_ns"], note["at_ms"], end_ms)
