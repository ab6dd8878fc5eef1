"""The stores of a commit log, one of each kind of engine, for tests of what they have in common."""

import signal
import uuid
from typing import Any, Final, Protocol

import obstore

from rmq_pipeline.broker.work.home import FORMAT
from rmq_pipeline.store.log.log_store import LogStore
from rmq_pipeline.store.log.chain import Entry, Kind
from rmq_pipeline.store.log.object_store_log import ObjectStoreLog
from rmq_pipeline.store.log.postgres_store import PostgresStore
from tests.object_store import BUCKET, ObjectStore
from tests.postgres_server import PostgresServer

ENGINES: Final = ("postgres", "s3")


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

    def store(self, address: str, **how: Any) -> LogStore:
        return ObjectStoreLog(address, **how)

    def key(self, address: str, name: str) -> str:
        """The key of an object of a log."""
        return f"{address.partition('?')[0].removeprefix(f's3://{BUCKET}/')}/{name}"

    def entries(self, address: str) -> list[tuple[str, Entry]]:
        """Keys and headers of all entries, in order."""
        prefix = self.key(address, "entries")
        names = sorted(
            each["path"] for page in obstore.list(self._server.bucket(), prefix) for each in page
        )
        store = ObjectStoreLog(address, timeout_s=5.0, lease_s=1.0, home_format=FORMAT)
        store.look()
        found = [(name, store._chain.at(int(name.rpartition("/")[2]))) for name in names]
        store.close()
        return found

    def frames(self, address: str) -> list[tuple[int, int, int]]:
        return [
            (each.position, each.length, each.epoch)
            for _, each in self.entries(address)
            if each.kind == Kind.FRAME
        ]

    def lose_last_frame(self, address: str) -> None:
        name, last = self.entries(address)[-1]
        assert last.kind == Kind.FRAME
        obstore.delete(self._server.bucket(), name)

    def crash(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.start()

    def damage(self, address: str) -> None:
        bucket, key = self._server.bucket(), self.key(address, f"entries/{1:020}")
        content = bytearray(obstore.get(bucket, key).bytes())
        content[-1] ^= 1
        obstore.put(bucket, key, bytes(content))
