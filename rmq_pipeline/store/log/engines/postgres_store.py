"""The commit log in PostgreSQL: one row a frame, whose primary key is the log position.

A statement appends a frame if the epoch is still the newest one, and commits by itself. So a broker
that is stopped halfway holds no lock. Passwords come from PGPASSWORD, PGPASSFILE or a service file:
an address with a password is refused, because settings and command lines are shown.
"""

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import namedtuple_row
from typing_extensions import override

from rmq_pipeline.errors import (
    HomeFormatError,
    LogFencedError,
    LogStoreError,
    RequestError,
)
from rmq_pipeline.limits import MIB
from rmq_pipeline.log_address import LIBPQ_SECRETS, check_log_store
from rmq_pipeline.store.log.frame import crc32
from rmq_pipeline.store.log.leadership import Held, LeadableStore, holder
from rmq_pipeline.store.log.log_store import Layout, Lease, Stored
from rmq_pipeline.store.statements import of_postgres, postgres_schema

FORMAT: Final = 1
_APPEND: Final = b"rmq_append"
_TAKEN: Final = b"23505"  # unique_violation
#: undefined_table, undefined_column, datatype_mismatch.
_OTHER_TABLES: Final = frozenset({b"42P01", b"42703", b"42804"})
#: Number of headers that one query reads, and of bytes of frames.
_HEADERS: Final = 10_000
_READ_BYTES: Final = 32 * MIB
#: A bytea may have 1 GB, and the server copies it several times.
_FRAME_BYTES_MAX: Final = 256 * MIB
#: Bytes per second that a slow connection is given, beyond the time limit of every call.
_SLOWEST: Final = 4 * MIB
#: Bytes and number of frames that one statement deletes: a successor waits for it.
_TRIM_BYTES: Final = 8 * MIB
_TRIM_FRAMES: Final = 5_000


class _Connection(psycopg.Connection[Any]):
    """A connection that remembers warnings.

    A commit whose wait for the synchronous standby was cancelled is only local: the server says so
    by a warning, and reports success.
    """

    warning: str | None = None

    def note(self, said: psycopg.errors.Diagnostic) -> None:
        """Remember a warning."""
        if said.severity_nonlocalized == "WARNING":
            self.warning = said.message_primary or "a warning"

    def check_warning(self) -> None:
        """Raise what has been warned of."""
        if self.warning is not None:
            raise psycopg.OperationalError(self.warning)


def _checked(address: str) -> str:
    """Check an address as the settings do, and by libpq, which connects with it."""
    check_log_store(address)
    try:
        named = conninfo_to_dict(address)
    except psycopg.Error:  # its text may have the password
        named = {"password": None}
    if LIBPQ_SECRETS & named.keys():
        raise RequestError(
            "The setting log_store has an address that PostgreSQL does not understand, or a"
            " password.",
            remedy="Use postgresql://HOST:PORT/DATABASE.",
        )
    return address


class PostgresStore(LeadableStore):
    """A log in a PostgreSQL database, for one broker."""

    frame_bytes_max = _FRAME_BYTES_MAX

    def __init__(self, address: str, *, timeout_s: float, lease_s: float, home_format: int) -> None:
        """Prepare the store; ``claim`` connects.

        Args:
            address: URL without a password.
            timeout_s: longest wait for the server, in addition to the time of large frames.
            lease_s: time after the last renewal at which another broker may lead.
            home_format: format of this broker's home, which says how the frames are applied.
        """
        super().__init__(_checked(address), home_format=home_format)
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._connection: _Connection | None = None
        self._under_way: tuple[int, int, bytes] | None = None
        self._lease_lock = threading.Lock()
        self._lease_connection: _Connection | None = None

    # ------------------------------------------------------------------------------- leadership

    def look(self) -> None:
        """See LogStore."""
        self._connect()
        with self._answering():
            self._check_home_format(self._one("log_store").home_format)

    def lease(self) -> Lease:
        """See LogStore."""
        with self._answering():
            held = self._one("log_held_lease")
        return Lease(held.holder, held.runs)

    def reclaim(self) -> None:
        """See LogStore."""
        self.abandon()
        self._connect()
        with self._answering(), self._now.transaction():
            if self._one("log_lock_store").writer != self._writer:
                raise self._fenced()
            self._lead()

    @override
    def _try_to_lead(self, *, force: bool) -> Held | None:
        with self._answering(), self._now.transaction():
            self._check_home_format(self._one("log_lock_store").home_format)
            held = self._one("log_held_lease")
            if held.runs and held.writer != self._writer and not force:
                return Held(held.holder, lease_ms=held.lease_ms, mark=held.renewed_at)
            self._lead()
            self._run(
                "log_take_lease",
                writer=self._writer,
                holder=holder(),
                lease_ms=round(self._lease_s * 1000),
            )
        return None

    def _lead(self) -> None:
        """Take a new epoch, in a transaction that has the store's row."""
        numbers = {"writer": self._writer, "home_format": self._home_format}
        (self.epoch,) = self._one("log_lead", **numbers)

    def renew(self) -> bool:
        """See LogStore."""
        with self._lease_lock:
            try:
                found = self._on_lease("log_renew_lease", within_s=self._lease_s / 2)
                return found.fetchone() is not None
            except psycopg.Error as error:
                self._close_lease()
                raise self._failed(error) from error

    def close(self) -> None:
        """See LogStore."""
        with self._lease_lock:
            for _ in range(2):  # the connection of the last renewal may be gone
                try:
                    self._on_lease("log_release_lease")
                    break
                except psycopg.Error:
                    self._close_lease()
            self._close_lease()
        self.abandon()

    def _on_lease(
        self, statement: str, /, *, within_s: float | None = None, **parameters: Any
    ) -> "psycopg.Cursor[Any]":
        """Run a statement on the connection of the lease; the caller holds its lock."""
        if self._lease_connection is None:
            self._lease_connection = self._connected()
        limit_s = min(self._timeout_s, within_s or self._timeout_s)
        with _limited(self._lease_connection, limit_s):
            return self._lease_connection.execute(
                of_postgres()[statement], {"writer": self._writer, **parameters}
            )

    def _close_lease(self) -> None:
        connection, self._lease_connection = self._lease_connection, None
        if connection is not None:
            connection.close()

    # ---------------------------------------------------------------------------------- appends

    def begin(self, position: int, frame: bytes) -> None:
        """See LogStore."""
        crc = crc32(frame)
        numbers = (position, len(frame), crc, self.epoch)
        self._under_way = (position, crc, frame)
        try:
            connection = self._now.pgconn
            connection.send_query_prepared(
                _APPEND, [*(b"%d" % number for number in numbers), frame], [0, 0, 0, 0, 1]
            )
            connection.flush()
        except psycopg.Error as error:
            raise self._lost(error) from error

    def finish(self) -> None:
        """See LogStore."""
        assert self._under_way is not None, "a frame that begin has sent"
        position, crc, frame = self._under_way
        try:
            result = self._result(time.monotonic() + self._timeout_s + len(frame) / _SLOWEST)
            self._now.check_warning()  # then the frame may not be on the standby: in doubt
        except (psycopg.Error, OSError) as error:
            raise self._lost(error) from error
        self._under_way = None
        if result.status == pq.ExecStatus.COMMAND_OK:
            if result.command_tuples != 1:
                raise self._fenced()
            return
        if result.error_field(pq.DiagnosticField.SQLSTATE) == _TAKEN:
            if not self._has(position, crc=crc, length=len(frame)):
                raise self._fenced()
            return
        said = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
        raise self._lost(said)

    def _result(self, give_up_at: float) -> pq.abc.PGresult:
        """Wait for the result of the statement that was sent."""
        connection = self._now.pgconn
        poll = select.poll()
        found: pq.abc.PGresult | None = None
        while True:
            events = select.POLLIN | (select.POLLOUT if connection.flush() else 0)
            while not connection.is_busy():
                result = connection.get_result()
                if result is None:
                    assert found is not None, "every statement has a result"
                    return found
                found = result
            poll.register(connection.socket, events)
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise OSError("the server does not answer in time")
            connection.consume_input()

    def settle(self, position: int, frame: bytes) -> None:
        """See LogStore."""
        self.reclaim()
        last = self.last()
        end = last.end if last else 0
        if end == position:
            self.append(position, frame)
        elif not self._has(position, crc=crc32(frame), length=len(frame)):
            raise self._lost(f"it ends at {end} and has lost frames before {position}")

    def _has(self, position: int, *, crc: int, length: int) -> bool:
        """Return True if the store has this frame of this broker, False if it has none there.

        Raises:
            LogFencedError: it has another frame there.
        """
        with self._answering():
            row = self._run("log_at", position=position).fetchone()
        if row is None:
            return False
        if tuple(row) != (self._writer, length, crc):
            raise self._fenced()
        return True

    def abandon(self) -> None:
        """See LogStore."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ------------------------------------------------------------------------------------ reads

    def last(self) -> Stored | None:
        """See LogStore."""
        with self._answering():
            row = self._run("log_last").fetchone()
        return None if row is None else Stored(*row)

    def headers(self, start: int) -> Iterator[Stored]:
        """See LogStore."""
        while True:
            with self._answering():
                rows = self._run("log_headers", start=start, limit=_HEADERS).fetchall()
            for row in rows:
                yield Stored(*row)
            if len(rows) < _HEADERS:
                return
            start = rows[-1].position + 1

    def frames(self, start: int) -> Iterator[tuple[Stored, bytes]]:
        """See LogStore."""
        first, size, last = start, 0, -1
        for header in self.headers(start):
            if size and size + header.length > _READ_BYTES:
                yield from self._frames(first, last)
                first, size = header.position, 0
            size, last = size + header.length, header.position
        if size:
            yield from self._frames(first, last)

    def _frames(self, first: int, last: int) -> Iterator[tuple[Stored, bytes]]:
        reading = self._answering(size=_READ_BYTES + self.frame_bytes_max)
        with reading, self._now.cursor(binary=True) as cursor:
            rows = cursor.execute(of_postgres()["log_frames"], {"first": first, "last": last})
            found = rows.fetchall()
        for position, crc, frame in found:
            if crc32(frame) != crc:
                raise LogStoreError(
                    f"The frame at position {position} in {self.address} is damaged.",
                    remedy="Restore the database of log_store from its standby or its backup.",
                )
            yield Stored(position, len(frame), crc), frame

    def layouts(self) -> list[Layout]:
        """See LogStore."""
        with self._answering():
            return [Layout(*row) for row in self._run("log_layouts").fetchall()]

    def put_layout(self, layout: Layout) -> None:
        """See LogStore."""
        with self._answering():
            done = self._run("log_put_layout", **layout._asdict(), epoch=self.epoch)
        if done.rowcount != 1:
            raise self._fenced()

    def trim(self, before: int) -> None:
        """See LogStore."""
        start: int | None = 0
        limits = {"most_bytes": _TRIM_BYTES, "most_frames": _TRIM_FRAMES}
        try:
            with self._connected() as connection:  # renewals do not wait for it
                while start is not None:
                    with _limited(connection, self._timeout_s):
                        done = connection.execute(
                            of_postgres()["log_trim"],
                            {"start": start, "before": before, "writer": self._writer, **limits},
                        )
                        row: Any = done.fetchone()
                    if not row.leads:
                        raise self._fenced()
                    start = None if row.last is None else row.last + 1
        except psycopg.Error as error:
            raise self._failed(error) from error

    def file(self, name: str) -> bytes | None:
        """See LogStore."""
        with self._answering():
            row = self._run("log_file", name=name).fetchone()
        return None if row is None else bytes(row[0])

    def put_file(self, name: str, content: bytes) -> None:
        """See LogStore."""
        with self._lease_lock:
            try:
                done = self._on_lease("log_put_file", name=name, content=content)
                assert self._lease_connection is not None, "the statement has run on it"
                self._lease_connection.check_warning()
            except psycopg.Error as error:
                self._close_lease()
                raise self._failed(error) from error
            if done.rowcount != 1:
                raise self._fenced()

    # ------------------------------------------------------------------------------- connection

    @property
    def _now(self) -> _Connection:
        if self._connection is None:
            raise LogStoreError(f"The broker has no connection to {self.address}.")
        return self._connection

    def _connected(self) -> _Connection:
        timeout_ms = str(max(1, round(self._timeout_s * 1000)))
        connection = _Connection.connect(
            self.address,
            autocommit=True,
            row_factory=namedtuple_row,
            connect_timeout=max(2, round(self._timeout_s)),
            tcp_user_timeout=timeout_ms,
            application_name="rmq_pipeline commit log",
        )
        connection.add_notice_handler(connection.note)
        try:
            with _limited(connection, self._timeout_s):
                connection.execute(of_postgres()["log_session"], {"timeout": timeout_ms})
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> None:
        """Connect, and check that the database keeps what it confirms and has this log.

        Raises:
            LogStoreError: the server cannot be reached, or cannot be the store.
            HomeFormatError: another version made the tables.
        """
        self.abandon()
        try:
            self._connection = self._connected()
            with _limited(self._connection, self._timeout_s):
                self._check_server()
                with self._now.transaction():
                    self._make()
                self._now.check_warning()
                self._prepare()
        except psycopg.Error as error:
            raise self._lost(error) from error
        except BaseException:
            self.abandon()
            raise

    def _check_server(self) -> None:
        server = self._one("log_server")
        if server.is_standby:
            raise LogStoreError(
                f"{self.address} is a standby of PostgreSQL, which takes no writes.",
                remedy="Name the primary, or all hosts with ?target_session_attrs=read-write.",
            )
        for name, found in (
            ("synchronous_commit", server.synchronous_commit),
            ("fsync", server.fsync),
        ):
            if found == "off":
                raise LogStoreError(
                    f"{self.address} has {name} = off: it may lose what it has confirmed.",
                    remedy=f"Set {name} = on for this database or user, and start again.",
                )
        if server.standbys and server.synchronous_commit in {"local", "remote_write"}:
            raise LogStoreError(
                f"{self.address} has standbys and synchronous_commit ="
                f" {server.synchronous_commit}: they may lack what it has confirmed.",
                remedy="Set synchronous_commit = on for this database or user, and start again.",
            )

    def _make(self) -> None:
        """Make the tables if there are none, and read which log they hold."""
        self._run("log_lock_making")
        if not self._one("log_server").is_made:
            self._now.execute(postgres_schema())
            made = {"format": FORMAT, "id": secrets.token_hex(16), "seed": secrets.randbits(32)}
            self._run("log_begin_store", **made, home_format=self._home_format)
            self._run("log_begin_lease")
        try:
            found = self._one("log_store")
        except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable) as error:
            raise self._other_format(str(error).partition("\n")[0]) from None
        if found.format != FORMAT:
            raise self._other_format(f"format {found.format}")
        if self.id and found.id != self.id:
            raise LogFencedError(f"{self.address} has another log than before.")
        self.id, self.seed = found.id, found.seed

    def _prepare(self) -> None:
        """Prepare the append on the connection."""
        result = self._now.pgconn.prepare(_APPEND, of_postgres()["log_append"].encode())
        if result.status != pq.ExecStatus.COMMAND_OK:
            said = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
            state = result.error_field(pq.DiagnosticField.SQLSTATE)
            raise self._other_format(said) if state in _OTHER_TABLES else self._lost(said)

    def _other_format(self, what: str) -> HomeFormatError:
        return HomeFormatError(
            f"The tables of the schema rmq_log in {self.address} are of another version: {what}.",
            remedy="Use the version of rmq_pipeline that made them, or an empty database.",
        )

    def _run(self, statement: str, /, **parameters: Any) -> "psycopg.Cursor[Any]":
        return self._now.execute(of_postgres()[statement], parameters or None)

    def _one(self, statement: str, /, **parameters: Any) -> Any:
        row = self._run(statement, **parameters).fetchone()
        assert row is not None, "a statement that returns one row"
        return row

    @contextmanager
    def _answering(self, *, size: int = 0) -> Iterator[None]:
        """Translate the driver's errors, and drop the connection after one.

        Args:
            size: bytes that are read.
        """
        try:
            with _limited(self._now, self._timeout_s + size / _SLOWEST):
                yield
            self._now.check_warning()
        except psycopg.Error as error:
            raise self._lost(error) from error

    def _lost(self, error: object) -> LogStoreError:
        """Drop the connection of the appends, and return the error to raise."""
        self.abandon()
        return self._failed(error)

    def _failed(self, error: object) -> LogStoreError:
        said = " ".join(str(error).split())
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return LogStoreError(
                f"The user of log_store lacks a right in {self.address}: {said}.",
                remedy="Give it the right to create a schema, or those of the schema's owner.",
            )
        return LogStoreError(f"The commit log in {self.address} cannot be reached: {said}.")


@contextmanager
def _limited(connection: "psycopg.Connection[Any]", seconds: float) -> Iterator[None]:
    """Cut a connection if the block takes longer: a server that hangs answers nothing else.

    Raises:
        psycopg.OperationalError: the block took longer. The driver says that the server has closed
            the connection.
    """
    is_cut = False

    def cut() -> None:
        nonlocal is_cut
        is_cut = True
        with (
            suppress(psycopg.Error, OSError),
            socket.socket(fileno=os.dup(connection.fileno())) as s,
        ):
            s.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except psycopg.Error as error:
        if not is_cut:
            raise
        raise psycopg.OperationalError(f"no answer within {seconds:.3g} s") from error
    finally:
        timer.cancel()
