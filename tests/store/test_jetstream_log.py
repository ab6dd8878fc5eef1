"""A commit log in NATS JetStream: frames of several messages, settings of streams, bad input."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.errors import LogFencedError, LogStoreError, RequestError
from rmq_pipeline.store.log.engines.chain_entry import Kind
from rmq_pipeline.store.log.engines.jetstream_log import JetStreamLog
from rmq_pipeline.store.log.engines.nats_connection import NatsConnection
from rmq_pipeline.store.log.log_store import Layout
from tests.log_stores import StreamLogs
from tests.nats_server import NatsServer

LEASE_S = 0.3
FRAME = b"a" * 64
#: Four messages of the server's max_payload.
LONG = b"".join(bytes([number]) * (1 << 20) for number in range(3)) + b"end" * 1000
Open = Callable[..., JetStreamLog]


@pytest.fixture
def logs(nats_server: NatsServer) -> StreamLogs:
    return StreamLogs(nats_server)


@pytest.fixture
def address(logs: StreamLogs) -> str:
    return logs.new()


@pytest.fixture
def open_store(address: str) -> Iterator[Open]:
    opened: list[JetStreamLog] = []

    def open_it(
        at: str = address, *, claim: bool = True, force: bool = False, timeout_s: float = 10.0
    ) -> JetStreamLog:
        opened.append(JetStreamLog(at, timeout_s=timeout_s, lease_s=LEASE_S, home_format=1))
        opened[-1].look()
        if claim:
            opened[-1].claim(seconds=5.0, force=force)
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def admin(nats_server: NatsServer) -> Iterator[NatsConnection]:
    connection = NatsConnection("admin", [f"nats://{nats_server.address}"], timeout_s=5.0)
    yield connection
    connection.close()


def stream_of(address: str) -> str:
    return address.partition("?")[0].rpartition("/")[2]


def fail_after(store: JetStreamLog, puts: int, patch: pytest.MonkeyPatch, *, stored: bool) -> None:
    """Let the answers of all puts after some be lost, or the puts themselves."""
    put, left = store._slots.put, [puts]

    def count(number: int, data: bytes, *, stays: bool) -> bool:
        left[0] -= 1
        if left[0] < 0:
            if stored:
                put(number, data, stays=stays)
            raise LogStoreError("The store does not answer.")
        return put(number, data, stays=stays)

    patch.setattr(store._slots, "put", count)


# ------------------------------------------------------------------------- frames of several parts


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("puts", [0, 1, 2, 3])
def test_a_frame_that_was_stored_in_part_is_completed_once(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, puts: int, *, stored: bool
) -> None:
    store = open_store()
    store.append(0, FRAME)
    with monkeypatch.context() as patch:
        fail_after(store, puts, patch, stored=stored)
        with pytest.raises(LogStoreError):
            store.append(64, LONG)

    reader = open_store(claim=False)
    is_whole = stored and puts == 3
    assert [frame for _, frame in reader.frames(0)] == [FRAME] + [LONG] * is_whole
    store.settle(64, LONG)
    store.append(64 + len(LONG), FRAME)

    assert [frame for _, frame in open_store(claim=False).frames(0)] == [FRAME, LONG, FRAME]


def test_a_claim_ends_a_frame_that_was_stored_in_part(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, logs: StreamLogs, address: str
) -> None:
    old = open_store()
    with monkeypatch.context() as patch:
        fail_after(old, 2, patch, stored=True)
        with pytest.raises(LogStoreError):
            old.append(0, LONG)
    new = open_store(force=True)
    new.append(0, FRAME)
    new.append(64, LONG)

    with pytest.raises(LogFencedError):
        old.settle(0, LONG)
    assert [frame for _, frame in new.frames(0)] == [FRAME, LONG]
    found = [each.kind for each in logs.entries(address)]
    assert found == [Kind.CLAIM, *[Kind.PART] * 3, Kind.CLAIM, Kind.FRAME, *[Kind.PART] * 3, 2]


def test_a_frame_stays_with_its_parts_when_those_before_it_go(open_store: Open) -> None:
    store = open_store()
    positions = [0, 64, 64 + len(LONG), 128 + len(LONG)]
    for position, frame in zip(positions, [FRAME, LONG, FRAME, LONG], strict=True):
        store.append(position, frame)

    store.trim(64)
    assert [frame for _, frame in store.frames(0)] == [LONG, FRAME, LONG]
    store.trim(positions[3])
    assert [frame for _, frame in open_store(claim=False).frames(0)] == [LONG]
    last = store.last()
    assert last is not None
    assert last.position == positions[3]


def test_rules_that_are_longer_than_a_message_are_handed_on(open_store: Open) -> None:
    store = open_store()
    store.put_file("access.json", LONG)
    store.append(0, FRAME)
    store.append(64, FRAME)
    store.trim(64)

    assert open_store(force=True).file("access.json") == LONG


def test_a_limit_of_the_stream_makes_more_parts(
    open_store: Open, admin: NatsConnection, address: str
) -> None:
    open_store().close()
    info = admin.call(f"STREAM.INFO.{stream_of(address)}", {})
    admin.call(f"STREAM.UPDATE.{stream_of(address)}", {**info["config"], "max_msg_size": 2000})
    store = open_store()

    store.append(0, LONG[:50_000])

    assert [frame for _, frame in store.frames(0)] == [LONG[:50_000]]
    assert store._chain.tip is not None
    assert store._chain.tip.number > 30


# ------------------------------------------------------------------------------------- leadership


def test_a_claim_that_took_what_number_came_may_lose_the_entry_before_it(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = open_store(), open_store(claim=False)
    leader.append(0, FRAME)
    positions = [0]

    def come_second(*_: object, **__: object) -> bool:
        positions.append(positions[-1] + 64)
        leader.append(positions[-1], FRAME)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(other._slots, "put", come_second)
        other.claim(seconds=None, force=True)
    assert other.epoch == 2
    end = positions[-1] + 64
    for number in range(3):
        other.append(end + 64 * number, FRAME)
    assert [each.position for each in other.headers(0)] == [*positions, end, end + 64, end + 128]

    for before in (end, end + 64):
        other.trim(before)
        assert next(open_store(claim=False).headers(0)).position == before
    with pytest.raises(LogFencedError):
        leader.append(end, FRAME)
    assert not leader.renew()


def test_a_stream_that_was_made_again_takes_nothing_of_its_old_leader(
    open_store: Open, admin: NatsConnection, address: str
) -> None:
    old = open_store()
    old.append(0, FRAME)
    admin.call(f"STREAM.DELETE.{stream_of(address)}", {})
    new = open_store()
    new.append(0, b"b" * 64)

    with pytest.raises(LogStoreError, match="No server answers for the stream"):
        old.append(64, FRAME)
    with pytest.raises(LogFencedError, match="another log than before"):
        old.look()

    assert [frame for _, frame in new.frames(0)] == [b"b" * 64]


def test_a_lease_that_is_no_lease_costs_time_only(
    open_store: Open, admin: NatsConnection, address: str
) -> None:
    leader = open_store()
    admin.request(f"rmq_log.{stream_of(address)}.lease", b"\x00 no JSON")
    assert leader.renew()
    admin.request(f"rmq_log.{stream_of(address)}.lease", b"[" * 10_000)

    open_store().append(0, FRAME)


def test_an_old_leader_does_not_replace_the_lease_of_the_new_one(open_store: Open) -> None:
    """Reads may be answered by a server that was deposed; the lease is written by a majority."""
    old = open_store()
    new = open_store(force=True)

    assert not old._put_lease(is_hurried=True)
    assert new.lease().runs
    assert new.renew()


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "change",
    [
        {"storage": "memory"},
        {"discard": "old"},
        {"max_age": 10**12},
        {"retention": "workqueue"},
        {"max_msgs_per_subject": 5},
        {"deny_delete": False},
        {"deny_purge": True},
        {"allow_rollup_hdrs": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_stream_that_may_lose_what_it_confirmed_is_refused(
    open_store: Open, admin: NatsConnection, address: str, change: dict[str, Any]
) -> None:
    name = stream_of(address)
    kept = {"storage": "file", "discard": "new", "deny_delete": True}
    config = {"name": name, "subjects": [f"rmq_log.{name}.{'ab' * 16}.*"], **kept, **change}
    made = admin.call(f"STREAM.CREATE.{name}", config)
    assert "error" not in made

    with pytest.raises(LogStoreError, match=rf"{next(iter(change))} = .*nats stream edit"):
        open_store()


def test_a_stream_of_something_else_is_refused(
    open_store: Open, admin: NatsConnection, address: str
) -> None:
    admin.call(
        f"STREAM.CREATE.{stream_of(address)}", {"name": stream_of(address), "subjects": ["orders"]}
    )

    with pytest.raises(LogStoreError, match=r"no commit log: its subjects are orders\. Name a"):
        open_store()


def test_messages_of_something_else_are_told(
    open_store: Open, admin: NatsConnection, address: str
) -> None:
    open_store().close()
    subjects = admin.call(f"STREAM.INFO.{stream_of(address)}", {})["config"]["subjects"]
    admin.request(subjects[0].replace("*", "frames"), b"hello")

    with pytest.raises(LogStoreError, match=r"message 2 of the stream .* is none of a commit log"):
        open_store()


def test_fewer_replicas_than_asked_for_are_refused(open_store: Open, address: str) -> None:
    with pytest.raises(LogStoreError, match=r"3 replicas: .*non-clustered.*\?replicas=1"):
        open_store(address.partition("?")[0])
    open_store().close()
    with pytest.raises(LogStoreError, match="num_replicas = 1, and log_store asks for 3"):
        open_store(address.partition("?")[0])


def test_a_full_stream_is_told_and_trimmed(
    open_store: Open, admin: NatsConnection, address: str
) -> None:
    store, name = open_store(), stream_of(address)
    store.put_layout(Layout(0, 1, b"a" * 32))
    store.append(0, FRAME)
    config = admin.call(f"STREAM.INFO.{name}", {})["config"]
    admin.call(f"STREAM.UPDATE.{name}", {**config, "max_msgs": 6})
    for number in range(1, 4):
        store.append(64 * number, FRAME)
    with pytest.raises(LogStoreError, match=rf"{name} .* is full: maximum messages exceeded"):
        store.append(64 * 4, FRAME)

    store.trim(64 * 3)

    store.append(64 * 4, FRAME)
    assert open_store(claim=False).layouts() == [Layout(0, 1, b"a" * 32)]


def test_a_purged_stream_is_told(open_store: Open, admin: NatsConnection, address: str) -> None:
    store = open_store()
    store.append(0, FRAME)
    admin.call(f"STREAM.PURGE.{stream_of(address)}", {})

    with pytest.raises(LogStoreError, match=r"The message 2 of the stream .* is missing"):
        open_store(claim=False)


def test_a_deleted_stream_is_told(open_store: Open, admin: NatsConnection, address: str) -> None:
    store = open_store()
    admin.call(f"STREAM.DELETE.{stream_of(address)}", {})

    with pytest.raises(LogStoreError, match=r"The stream .* is gone"):
        store.last()
    with pytest.raises(LogStoreError, match=r"The stream .* is gone"):
        store.look()  # an empty stream in its place would be in the way of a restore


def test_a_stream_that_was_made_again_is_another_log(
    open_store: Open, admin: NatsConnection, address: str
) -> None:
    follower = open_store(claim=False)
    admin.call(f"STREAM.DELETE.{stream_of(address)}", {})
    open_store()

    with pytest.raises(LogFencedError, match="another log"):
        follower.look()
    with pytest.raises(LogStoreError, match="No server answers"):
        follower._slots.put(2, FRAME, stays=True)


@pytest.mark.parametrize(
    ("change", "says"), [({"max_msgs": 5}, "has max_msgs = 5"), ({"discard": "new"}, "discard")]
)
def test_a_lease_that_cannot_be_renewed_is_refused(
    open_store: Open, admin: NatsConnection, address: str, change: dict[str, Any], says: str
) -> None:
    open_store()
    lease = f"{stream_of(address)}_lease"
    config = admin.call(f"STREAM.INFO.{lease}", {})["config"]
    assert "error" not in admin.call(f"STREAM.UPDATE.{lease}", {**config, **change})

    with pytest.raises(LogStoreError, match=says):
        open_store()


def test_messages_that_are_too_short_are_refused(
    open_store: Open, admin: NatsConnection, address: str
) -> None:
    open_store()
    config = admin.call(f"STREAM.INFO.{stream_of(address)}", {})["config"]
    admin.call(f"STREAM.UPDATE.{stream_of(address)}", {**config, "max_msg_size": 300})

    with pytest.raises(LogStoreError, match="Raise max_msg_size"):
        open_store()


@pytest.mark.parametrize(
    "address",
    [
        "nats://127.0.0.1:4222",
        "nats:///log",
        "nats://127.0.0.1:4222/",
        "nats://127.0.0.1:65536/log",
        "nats://127.0.0.1:4222/a.b",
        "nats://127.0.0.1:4222/log?replicas=9",
        "nats://127.0.0.1:4222/log?password=hunter2",
        "nats://me:hunter2@127.0.0.1:4222/log",
        "nats://hunter2@127.0.0.1:4222/log",
        "nats://127.0.0.1:4222/log#hunter2",
        "nats:hunter2",
    ],
)
def test_an_address_that_is_none_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(RequestError, match="log_store") as refused:
        JetStreamLog(address, timeout_s=1.0, lease_s=LEASE_S, home_format=1)

    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["tls://a.example.com,b:65535/log", "nats://[::1]:4222/a-b_C9?replicas=5"]
)
def test_an_address_of_several_servers_is_taken(address: str) -> None:
    store = JetStreamLog(address, timeout_s=1.0, lease_s=LEASE_S, home_format=1)
    store.close()

    assert store.address == address


def test_a_server_that_is_not_there_is_named(open_store: Open) -> None:
    with pytest.raises(
        LogStoreError, match=r"127\.0\.0\.1:1/log.* cannot be reached: .*Connect call failed"
    ):
        open_store("nats://127.0.0.1:1/log", timeout_s=0.5)


def test_a_server_that_never_answers_is_told(open_store: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(LogStoreError, match="does not answer in time"):
            open_store(f"nats://127.0.0.1:{port}/log", timeout_s=0.5)


def test_requests_of_a_closed_store_are_refused(open_store: Open) -> None:
    store = open_store()
    store.close()

    with pytest.raises(LogStoreError, match="is closed"):
        store.append(0, FRAME)
    assert not [t for t in threading.enumerate() if t is store._connection._thread]


# ------------------------------------------------------------------------- rights and encryption


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Starts a server with more settings, and returns the address of a log in it."""
    started: list[NatsServer] = []

    def start(more: str) -> str:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(NatsServer(folder, more=more))
        started[-1].start()
        return f"nats://{started[-1].address}/log?replicas=1"

    yield start
    for server in started:
        server.stop()


USERS = """
authorization { users: [
  { user: "leader", password: "hunter2", permissions: {
    publish: ["rmq_log.log.>", "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.CREATE.*",
              "$JS.API.STREAM.MSG.GET.*", "$JS.API.STREAM.PURGE.log"],
    subscribe: ["_INBOX.>"] } }
  { user: "guest", password: "hunter3", permissions: { publish: ["none"] } }
] }
"""


def test_a_user_needs_the_rights_that_the_page_lists(
    open_store: Open, start_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = start_server(USERS)
    monkeypatch.setenv("NATS_USER", "leader")
    monkeypatch.setenv("NATS_PASSWORD", "hunter2")
    store = open_store(address)
    for number in range(3):
        store.append(64 * number, FRAME)
    store.trim(128)
    assert store.renew()

    for user, password in [("leader", "hunter1"), ("guest", "hunter3")]:
        monkeypatch.setenv("NATS_USER", user)
        monkeypatch.setenv("NATS_PASSWORD", password)
        with pytest.raises(LogStoreError, match=r"refuses the credentials.*NATS_USER") as refused:
            open_store(address, timeout_s=0.5)
        assert password not in str(refused.value)


def test_a_token_and_a_key_open_the_stream(
    open_store: Open,
    start_server: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    (tmp_path / "user.nk").write_bytes(seed)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    address = start_server(f'authorization {{ users: [ {{ nkey: "{public}" }} ] }}')
    with pytest.raises(LogStoreError, match="refuses the credentials"):
        open_store(address)
    monkeypatch.setenv("NATS_NKEY", str(tmp_path / "user.nk"))
    open_store(address).append(0, FRAME)
    monkeypatch.delenv("NATS_NKEY")
    monkeypatch.setenv("NATS_TOKEN", "hunter2")

    open_store(start_server('authorization { token: "hunter2" }')).append(0, FRAME)


def test_a_file_of_credentials_without_a_seed_is_told(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "creds").write_text("secret")
    monkeypatch.setenv("NATS_CREDS", str(tmp_path / "creds"))

    with pytest.raises(LogStoreError, match="NATS_CREDS has no JWT"):
        open_store()


@pytest.mark.parametrize("variable", ["NATS_CREDS", "NATS_NKEY", "NATS_CA"])
def test_a_secret_in_place_of_a_file_is_not_shown(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "SUAHUNTER2")

    with pytest.raises(LogStoreError, match=f"{variable} names cannot be read") as refused:
        open_store()

    assert "HUNTER2" not in str(refused.value)


def test_an_encrypted_server_is_checked(
    open_store: Open,
    start_server: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Certificate.self_made(tmp_path)
    address = start_server(f'tls {{ cert_file: "{made.path}", key_file: "{made.key_path}" }}')
    encrypted = address.replace("nats://", "tls://")
    with pytest.raises(LogStoreError, match="certificate"):
        open_store(encrypted, timeout_s=1.0)
    monkeypatch.setenv("NATS_CA", str(made.path))

    open_store(encrypted).append(0, FRAME)


def test_no_password_is_sent_to_a_server_without_tls(
    open_store: Open, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_USER", "me")
    monkeypatch.setenv("NATS_PASSWORD", "hunter2")

    with pytest.raises(LogStoreError, match="requires no TLS"):
        open_store(address.replace("nats://", "tls://"))
