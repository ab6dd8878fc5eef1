"""The stores of a commit log, one of each kind of engine, for tests of what they have in common."""

import base64
import signal
import uuid
from collections.abc import Callable
from typing import Any, Final, Protocol

import obstore

from rmq_pipeline.broker.work.home import FORMAT
from rmq_pipeline.store.log.engines.chain_entry import Entry, Kind
from rmq_pipeline.store.log.engines.jetstream_log import JetStreamLog, StreamSlots
from rmq_pipeline.store.log.engines.nats_connection import NatsConnection
from rmq_pipeline.store.log.engines.object_store_log import ObjectStoreLog
from rmq_pipeline.store.log.engines.postgres_store import PostgresStore
from rmq_pipeline.store.log.log_store import LogStore
from tests.nats_server import NatsServer
from tests.object_store import BUCKET, ObjectStore
from tests.postgres_server import PostgresServer

ENGINES: Final = ("postgres", "s3", "nats")


class LogStores(Protocol):
    """A server that has the logs of tests."""

    #: Host and port.
    server: str

    def new(self) -> str:
        """The address of a new empty log."""
        ...

    def store(self, address: str, **how: Any) -> LogStore:
        """The store at an address."""
        ...

    def damage(self, address: str) -> None:
        """Change the bytes of the frame at position 0, which is the only one."""
        ...

    def frames(self, address: str) -> list[tuple[int, int, int]]:
        """Position, length and epoch of the frames, in order."""
        ...

    def lose_last_frame(self, address: str) -> None:
        """Delete the last frame, as if it had never come."""
        ...

    def crash(self) -> None:
        """End the server at once."""
        ...

    def start(self) -> None:
        """Start it again with its data."""
        ...


class PostgresLogs:
    """Each log is a database."""

    def __init__(self, server: PostgresServer) -> None:
        self._server, self.server = server, server.address

    def new(self) -> str:
        return self._server.new_database()

    def store(self, address: str, **how: Any) -> LogStore:
        return PostgresStore(address, **how)

    def damage(self, address: str) -> None:
        self._server.execute("UPDATE rmq_log.frames SET frame = 'b'", url=address)

    def frames(self, address: str) -> list[tuple[int, int, int]]:
        return self._server.execute(
            "SELECT position, length, epoch FROM rmq_log.frames ORDER BY position", url=address
        )

    def lose_last_frame(self, address: str) -> None:
        self._server.execute(
            "DELETE FROM rmq_log.frames WHERE position = (SELECT max(position) FROM"
            " rmq_log.frames)",
            url=address,
        )

    def crash(self) -> None:
        self._server.stop(signal.SIGQUIT)

    def start(self) -> None:
        self._server.start()


class BucketLogs:
    """Each log is a prefix of the bucket."""

    def __init__(self, server: ObjectStore) -> None:
        self._server, self.server = server, server.endpoint.removeprefix("http://")

    def new(self) -> str:
        place = f"s3://{BUCKET}/logs/{uuid.uuid4().hex}"
        return f"{place}?scheme=http&endpoint_override={self.server}&region=us-east-1"

    def store(self, address: str, **how: Any) -> ObjectStoreLog:
        return ObjectStoreLog(address, **how)

    def key(self, address: str, name: str) -> str:
        """The key of an object of a log."""
        return f"{address.partition('?')[0].removeprefix(f's3://{BUCKET}/')}/{name}"

    def keys(self, address: str) -> list[str]:
        """Keys of all entries, in order."""
        prefix = self.key(address, "entries")
        listed = obstore.list(self._server.bucket(), prefix)
        return sorted(each["path"] for page in listed for each in page)

    def entries(self, address: str) -> list[Entry]:
        """Headers of all entries, in order."""
        store = ObjectStoreLog(address, timeout_s=5.0, lease_s=1.0, home_format=FORMAT)
        store.look()
        keys = self.keys(address)
        found = [store._chain.at(int(each.rpartition("/")[2])) for each in keys]
        store.close()
        return found

    def frames(self, address: str) -> list[tuple[int, int, int]]:
        return frames_of(self.entries(address))

    def lose_last_frame(self, address: str) -> None:
        assert self.entries(address)[-1].kind == Kind.FRAME
        obstore.delete(self._server.bucket(), self.keys(address)[-1])

    def crash(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.start()

    def damage(self, address: str) -> None:
        bucket, key = self._server.bucket(), self.key(address, f"entries/{1:020}")
        content = bytearray(obstore.get(bucket, key).bytes())
        content[-1] ^= 1
        obstore.put(bucket, key, bytes(content))


class StreamLogs:
    """Each log is a stream."""

    def __init__(self, server: NatsServer) -> None:
        self._server, self.server = server, server.address

    def new(self) -> str:
        return f"nats://{self.server}/log-{uuid.uuid4().hex}?replicas=1"

    def store(self, address: str, **how: Any) -> JetStreamLog:
        return JetStreamLog(address, **how)

    def entries(self, address: str) -> list[Entry]:
        """Headers of all entries, in order."""
        store = JetStreamLog(address, timeout_s=5.0, lease_s=1.0, home_format=FORMAT)
        store.look()
        tip = store._chain.tip
        assert tip is not None
        found = [store._chain.entry(number) for number in range(1, tip.number + 1)]
        store.close()
        return [each for each in found if each is not None]

    def frames(self, address: str) -> list[tuple[int, int, int]]:
        return frames_of(self.entries(address))

    def rewrite(self, address: str, change: Callable[[list[bytes]], list[bytes]]) -> None:
        """Replace the messages of the stream, which nobody but the servers' disks can."""
        stream = address.partition("?")[0].rpartition("/")[2]
        connection = NatsConnection(address, [f"nats://{self.server}"], timeout_s=5.0)
        info = connection.call(f"STREAM.INFO.{stream}", {})
        first, last = info["state"]["first_seq"], info["state"]["last_seq"]
        asked = [
            connection.call(f"STREAM.MSG.GET.{stream}", {"seq": number})
            for number in range(first, last + 1)
        ]
        messages = [base64.b64decode(each["message"]["data"]) for each in asked]
        connection.call(f"STREAM.DELETE.{stream}", {})
        connection.call(f"STREAM.CREATE.{stream}", {**info["config"], "first_seq": first})
        slots = StreamSlots(connection, stream, limit_s=5.0)
        for number, message in enumerate(change(messages), first):
            slots.kept = asked[number - first]["message"]["subject"]
            assert slots.put(number, message, stays=True)
        connection.close()

    def lose_last_frame(self, address: str) -> None:
        assert self.entries(address)[-1].kind == Kind.FRAME
        self.rewrite(address, lambda messages: messages[:-1])

    def damage(self, address: str) -> None:
        def flip(messages: list[bytes]) -> list[bytes]:
            messages[1] = messages[1][:-1] + bytes([messages[1][-1] ^ 1])
            return messages

        self.rewrite(address, flip)

    def crash(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.start()


def frames_of(entries: list[Entry]) -> list[tuple[int, int, int]]:
    """Position, length and epoch of the frames among entries."""
    return [(e.position, e.length, e.epoch) for e in entries if e.kind == Kind.FRAME]
