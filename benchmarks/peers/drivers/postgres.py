"""PostgreSQL as a queue, in the way of pgmq: lease by SKIP LOCKED, ack by DELETE."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import psycopg
from typing_extensions import override

from benchmarks.peers.driver import (
    LEASE_S,
    NOTHING,
    POLL_S,
    RETRY_MS,
    Connection,
    Driver,
    Kind,
    Offer,
    Received,
)
from tests.postgres_server import PostgresServer

#: More than the defaults, which are made for small machines; nothing that weakens durability.
_SETTINGS: dict[str, Any] = {
    "autovacuum_naptime": "5s",
    "max_wal_size": "4GB",
    "shared_buffers": "1GB",
}


class Postgres(Driver):
    """A table per topic and group."""

    name = "PostgreSQL, SKIP LOCKED"
    durability = "fsync on, synchronous_commit on; lease and ack too"
    offers: ClassVar[frozenset[Offer]] = frozenset(Offer)

    def __init__(self) -> None:
        self._tables: dict[str, list[str]] = {}
        self._keyed: set[str] = set()

    def start(self, folder: Path) -> None:
        """Make a database and start its server."""
        self._server = PostgresServer(folder, **_SETTINGS)
        query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'"
        self._pid = psutil.Process(self._server.execute(query)[0][0]).ppid()
        self.version = self._server.execute("SHOW server_version")[0][0].split()[0]

    def pids(self) -> Sequence[int]:
        """Return the postmaster."""
        return [self._pid]

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Create the tables."""
        self._tables[topic] = [f"{topic}_{group}" for group in groups]
        if kind is Kind.KEYED:
            self._keyed.add(topic)
        for table in self._tables[topic]:
            self._server.execute(
                f"CREATE TABLE {table} (id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,"
                " key int, visible_at timestamptz NOT NULL, read_count int NOT NULL DEFAULT 0,"
                " body bytea NOT NULL)"
            )
            self._server.execute(f"CREATE INDEX ON {table} (visible_at)")
            if kind is Kind.KEYED:
                self._server.execute(f"CREATE INDEX ON {table} (key, id)")

    def drop(self, topic: str) -> None:
        """Drop the tables."""
        for table in self._tables.pop(topic):
            self._server.execute(f"DROP TABLE {table}")

    def connect(self) -> Connection:
        """Return a connection with a session of its own."""
        return _PostgresConnection(self._server.url(), tables=self._tables, keyed=self._keyed)

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()


class _PostgresConnection(Connection):
    def __init__(self, url: str, *, tables: dict[str, list[str]], keyed: set[str]) -> None:
        self._connection = psycopg.connect(url, autocommit=True, prepare_threshold=1)
        self._cursor = self._connection.cursor(binary=True)
        self._tables, self._keyed = tables, keyed

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        columns: list[Any] = [list(bodies)]
        selected = "SELECT body, {key}, {due} FROM unnest(%b::bytea[]{more}) AS m(body{names})"
        more = names = ""
        if keys:
            more, names, columns = more + ", %b::int[]", names + ", key", [*columns, list(keys)]
        if due_ms:
            more, names = more + ", %b::bigint[]", names + ", due"
            columns.append(list(due_ms))
        messages = selected.format(
            key="key" if keys else "NULL::int",
            due="to_timestamp(due / 1000.0)" if due_ms else "clock_timestamp()",
            more=more,
            names=names,
        )
        first, *others = self._tables[topic]
        into = "INSERT INTO {} (body, key, visible_at) SELECT * FROM messages"
        also = "".join(f", {each}_sent AS ({into.format(each)})" for each in others)
        statement = f"WITH messages AS ({messages}){also} {into.format(first)}"
        self._cursor.execute(statement.encode(), columns)

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        table = f"{topic}_{group}"
        # Only messages with no leased or delayed one before them in their key.
        first = (
            f" AND NOT EXISTS (SELECT 1 FROM {table} AS earlier WHERE earlier.key = m.key"
            " AND earlier.id < m.id AND earlier.visible_at > clock_timestamp())"
            if topic in self._keyed
            else ""
        )
        statement = (
            f"WITH found AS (SELECT id FROM {table} AS m WHERE visible_at <= clock_timestamp()"
            f"{first} ORDER BY id LIMIT %b FOR UPDATE SKIP LOCKED)"
            f" UPDATE {table} AS m SET visible_at = clock_timestamp() + interval '{LEASE_S} s',"
            " read_count = read_count + 1 FROM found WHERE m.id = found.id"
            " RETURNING m.id, m.body"
        ).encode()
        until = time.perf_counter() + wait_s
        while True:
            rows = sorted(self._cursor.execute(statement, [limit]).fetchall())
            if rows:
                ids = [row[0] for row in rows]
                return Received([row[1] for row in rows], (table, ids))
            if time.perf_counter() >= until:
                return NOTHING
            time.sleep(POLL_S)

    @override
    def ack_and_receive(
        self,
        done: Received,
        failed: Sequence[int],
        *,
        topic: str,
        group: str,
        limit: int,
        wait_s: float,
    ) -> Received:
        if not done.bodies:
            return self.receive(topic, group, limit=limit, wait_s=wait_s)
        # One transaction, so one sync; its statements travel together.
        with self._connection.pipeline(), self._connection.transaction():
            self.ack(done, failed)
            received = self.receive(topic, group, limit=limit, wait_s=0)
        return (
            received if received.bodies else self.receive(topic, group, limit=limit, wait_s=wait_s)
        )

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        table, ids = received.handle
        if failed:
            again = [ids[at] for at in failed]
            self._cursor.execute(
                f"UPDATE {table} SET visible_at = clock_timestamp() + interval '{RETRY_MS} ms'"
                " WHERE id = ANY(%b::bigint[])".encode(),
                [again],
            )
            ids = sorted(set(ids) - set(again))
        self._cursor.execute(f"DELETE FROM {table} WHERE id = ANY(%b::bigint[])".encode(), [ids])

    def close(self) -> None:
        self._connection.close()
