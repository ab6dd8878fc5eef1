"""The stores of a commit log, one of each kind of engine, for tests of what they have in common."""

import uuid
from typing import Any, Final, Protocol

import obstore

from rmq_pipeline.store.log.log_store import LogStore
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

    def damage(self, address: str) -> None:
        bucket, key = self._server.bucket(), self.key(address, f"entries/{1:020}")
        content = bytearray(obstore.get(bucket, key).bytes())
        content[-1] ^= 1
        obstore.put(bucket, key, bytes(content))
