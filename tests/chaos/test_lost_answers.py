"""Receives whose answers get lost, by callers that go away and by kill -9 of the broker.

Every message comes to a caller whose answer arrived, or is a dead letter after all its attempts.
The attempts that arrived only go up.

An earlier crash history, of 60 kills, reported four messages that no answer had brought, and two
attempts that were one lower than before. This history found no such fault in 480 kills of the code
of that time, with groups of 2, 5, 8, 17 and 1,000 attempts, nor in 60 kills of today's code. The
earlier history was not kept. This one found two things that look like its report to the callers:

* A lost answer uses up an attempt, and the message is a dead letter after the last one. No answer
  had brought 11,428 of 129,300 messages to a group with 2 attempts, 95 of 18,840 to one with 5, and
  none of 25,520 to one with 8. All of them were dead letters with all their attempts.
* A lease may end while its answer is on the way to one caller, and another caller notes the next
  attempt first. So 2,337 of 111,642 repeated deliveries were noted with a lower attempt than the
  one before, 2,196 of them with one less. None of them was asked for after the other had come, and
  in the events each lease counts one more than the one before.

Today's code releases the messages of a receive whose caller has gone, and does not count the
attempt. Then the next receive has the same attempt, and is the first that any caller has of it:
this history fails if an attempt of a message comes twice. In 60 kills 21,524 were released, no
answer had brought 368 of 24,720 messages to the group with 2 attempts, and 153 deliveries were
noted late. RocketMQ's proxy counts such an attempt.

RMQ_CHAOS_ANSWER_KILLS sets how many kills (100).
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.process import serving
from tests.chaos.lost_answers import GROUPS, TOPIC, Accounts, Users
from tests.chaos.zygote import Zygote
from tests.conftest import Eventually
from tests.free_address import free_address

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

FEW = 3
KILLS = int(os.environ.get("RMQ_CHAOS_ANSWER_KILLS", "100"))
#: How long a broker lives after its first answers, or after upkeep was done; and one that is killed
#: while it starts.
LIFE_S = 0.4
STARTS_S = 0.25
#: Kinds of events that say how often a message was delivered.
OF_MESSAGES = ("lease", "ack", "retry", "release", "expire", "dead_letter", "invisible")
MIB = 1 << 20
SETTINGS = {
    "log_file_bytes": MIB,
    "reserve_bytes": MIB,
    "seal_after_ms": 0,
    "compact_min_inputs": 2,
    "snapshot_every_ms": 0,
    "snapshot_events": 50,
    "replaced_grace_ms": 0,
}


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path / "output")
    yield zygote
    zygote.close()


@pytest.mark.parametrize("kills", [FEW, pytest.param(KILLS, marks=pytest.mark.long)])
def test_messages_come_though_answers_get_lost_and_attempts_only_go_up(
    zygote: Zygote, home: Path, eventually: Eventually, kills: int, seed: int
) -> None:
    dice, address, started = random.Random(seed), free_address(), time.monotonic()

    def serve() -> int:
        return zygote.ask(serve=str(home), flight=address, settings=SETTINGS)

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert zygote.ask(reap=pid) == -signal.SIGKILL

    with Client(home=home) as client:
        pid = serve()
        eventually(lambda: serving(home))
        client.ensure_topic(TOPIC, queues=3)
        for group, max_attempts in GROUPS.items():
            client.ensure_group(group, max_attempts=max_attempts)
            client.subscribe(group, TOPIC)
        accounts = Accounts()
        users = Users(home, accounts, seed=dice.randrange(1 << 32))
        users.start()

        try:
            for _ in range(kills):
                kind = dice.choice(["arrived", "expire"])
                before = accounts.calls[kind]
                eventually(
                    lambda k=kind, n=before: users.go_on() and accounts.calls[k] > n, within_s=120
                )
                users.over.wait(dice.uniform(0, LIFE_S))
                kill(pid)
                pid = serve()
                if dice.random() < 0.3:
                    users.over.wait(dice.uniform(0, STARTS_S))
                    kill(pid)
                    pid = serve()
            killed_s = time.monotonic() - started
            users.settle_down()
            eventually(lambda: users.go_on() and lag(client) == 0, within_s=120)
        finally:
            users.stop()

        released = assert_counted(client)
        for group in GROUPS:
            assert_accounted(client, accounts, group=group)
        took_s = time.monotonic() - started
        print(
            f"{kills} kills in {killed_s:.0f} s, all in {took_s:.0f} s"
            f" (seed {seed}): {len(accounts.sent)} sent,"
            f" {released} given back, {dict(accounts.calls)}"
        )
        os.kill(pid, signal.SIGTERM)
        assert zygote.ask(reap=pid) == 0


def lag(client: Client) -> int:
    return int(client.sql("SELECT sum(lag)::BIGINT AS lag FROM lag")["lag"][0].as_py())


def assert_counted(client: Client) -> int:
    """Each lease counts one more than the event before it left; how many were given back.

    What is given back, because its caller has gone, counts one less: nobody has had it.
    """
    [found] = client.sql(
        f"""
        SELECT count(*) FILTER (kind = 'release') AS released,
               count(*) FILTER (kind = 'lease' AND attempt <> before + 1) AS wrong
        FROM (
            SELECT kind, attempt, lag(attempt, 1, 0) OVER (
                PARTITION BY consumer_group, queue_id, queue_offset ORDER BY position, "row"
            ) AS before
            FROM events
            WHERE topic = '{TOPIC}' AND kind IN ({", ".join(map(repr, OF_MESSAGES))})
        )
        """
    ).to_pylist()
    assert found["wrong"] == 0
    return int(found["released"])


def assert_accounted(client: Client, accounts: Accounts, *, group: str) -> None:
    """Each message was acked by who had it, or is a dead letter after its last attempt."""
    came = {message_id for of, message_id in accounts.seen if of == group}
    acked = {message_id for of, message_id in accounts.acked if of == group}
    tried = {message_id for of, message_id in accounts.tried if of == group}
    buried = dead_letters(client, group)
    assert {id_: n for id_, n in buried.items() if n != GROUPS[group]} == {}
    assert accounts.sent - came - buried.keys() == set()
    assert accounts.sent - tried - buried.keys() == set()
    assert acked & buried.keys() == set()
    assert len(accounts.sent) > 0
    print(
        f"{group}: {len(came)} came, {len(acked)} acked, {len(buried)} buried, of which"
        f" {len(buried.keys() - came)} never came"
    )


def dead_letters(client: Client, group: str) -> dict[str, int]:
    """The attempts of each of a group's."""
    found: dict[str, int] = {}
    topic = f"%DLQ%{group}"
    for queue in client.describe_topic(topic)["offsets"]:
        start = queue["min_offset"]
        while (some := client.read(topic, queue["queue_id"], offset=start, limit=1000)).num_rows:
            for row in some.to_pylist():
                properties = dict(row["properties"])
                assert properties["DLQ_ORIGIN_MESSAGE_ID"] not in found
                found[properties["DLQ_ORIGIN_MESSAGE_ID"]] = int(properties["DLQ_ATTEMPTS"])
            start += some.num_rows
    return found
