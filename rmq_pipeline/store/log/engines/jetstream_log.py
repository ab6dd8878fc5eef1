"""The commit log in a stream of NATS JetStream: a message an entry, at the sequence of its number.

An entry is published with the expected last sequence, so of two writers of a number one is refused.
A sequence is never used again, whatever is purged. A message has at most ``max_payload`` bytes: the
first bytes of longer entries are parts, see chain.py.

    STREAM         the chain: frames, which are purged, with the subject rmq_log.STREAM.ID.frames,
                   and others with .kept. No append gets into a log that was made again under the
                   same name, since that has another id
    STREAM_lease   one message, the last sign of life of the leader

Reads are answered by the stream's leader alone, and one that was deposed may answer late with what
it had. So no read decides anything: the next append is refused, and so is the next renewal.
"""

import base64
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from typing_extensions import override

from rmq_pipeline.errors import LogStoreError
from rmq_pipeline.limits import MIB
from rmq_pipeline.log_address import check_log_store
from rmq_pipeline.store.log.engines.chained_log import (
    ID_BYTES,
    ChainedLog,
    lease_of,
    lease_request_s,
)
from rmq_pipeline.store.log.engines.nats_connection import NOT_JETSTREAM, NatsConnection

_SUBJECT: Final = "rmq_log"
#: Servers that have each message, unless the address says another number.
_REPLICAS: Final = 3
#: Room in a message for its headers.
_HEADERS_BYTES: Final = 256
#: Tries to replace a lease that another write has replaced meanwhile.
_LEASE_TRIES: Final = 3
#: Codes of JetStream's errors.
_NO_STREAM: Final = 10059
_STREAM_EXISTS: Final = 10058
_NO_CLUSTER: Final = frozenset({10074, 10005})  # replicas > 1, no suitable peers
_WRONG_SEQUENCE: Final = frozenset({10071, 10164})  # the second: of an append that is under way
_NO_MESSAGE: Final = 10037
#: maximum messages, bytes or store exceeded; insufficient resources
_FULL: Final = frozenset({10077, 10047, 10023})
#: What a stream must have, so that nothing but ``trim`` takes an entry; absent values are None.
_NEEDED: Final[dict[str, tuple[Any, ...]]] = {
    "storage": ("file",),
    "retention": ("limits",),
    "discard": ("new",),
    "max_age": (0, None),
    "max_msgs_per_subject": (-1, 0, None),
    "deny_delete": (True,),
    "deny_purge": (False, None),
    "sealed": (False, None),
    "no_ack": (False, None),
    "allow_rollup_hdrs": (False, None),
    "allow_msg_counter": (False, None),
    "allow_msg_schedules": (False, None),
    "allow_msg_ttl": (False, None),
    "subject_transform": (None,),
    "persist_mode": ("default", "", None),
    "mirror": (None,),
    "sources": (None, []),
}
#: The same of the stream of the lease.
_NEEDED_OF_LEASE: Final[dict[str, tuple[Any, ...]]] = {
    **_NEEDED,
    "discard": ("old",),
    "max_msgs": (1,),
    "deny_delete": (False, None, True),
}
#: Fewest bytes of a message: a long frame takes too many of smaller ones.
_MESSAGE_BYTES_MIN: Final = 1024


class StreamSlots:
    """Slots whose entries are messages, numbered by their sequence; see ``chain.Slots``."""

    origin = 1

    def __init__(self, connection: NatsConnection, stream: str, *, limit_s: float) -> None:
        """Prepare the slots; ``make`` looks for the stream.

        Args:
            limit_s: longest time of a request.
        """
        self.address = connection.address
        self.seen_first = self.origin
        self.stream = stream
        #: Subjects of what is purged and of what stays; the caller knows them from the stream.
        self.frames = self.kept = ""
        #: Most bytes of a message that the stream takes; None: as many as the server.
        self.message_bytes: int | None = None
        self._connection = connection
        self._limit_s = limit_s

    @property
    def slot_bytes(self) -> int:
        """See Slots."""
        most = min(MIB, self._connection.max_payload, self.message_bytes or MIB)
        return most - _HEADERS_BYTES

    def name(self, number: int) -> str:
        """See Slots."""
        return f"The message {number} of the stream {self.stream}"

    def make(self, *, is_new: bool, **config: Any) -> dict[str, Any]:
        """Return the configuration of the stream.

        Args:
            is_new: make it if there is none. One that was there before can only be restored.
            config: of a new one.
        """
        found = self._call("STREAM.INFO", {})
        if _code(found) == _NO_STREAM and is_new:
            found = self._call("STREAM.CREATE", {"name": self.stream, **config})
            if _code(found) == _STREAM_EXISTS:  # another broker has made it meanwhile
                found = self._call("STREAM.INFO", {})
        if _code(found) in _NO_CLUSTER:
            raise LogStoreError(
                f"{self.address} cannot have a stream with {config['num_replicas']} replicas:"
                f" {found['error']['description']}.",
                remedy="Use a cluster of that many servers, or ?replicas=1 in log_store: then the"
                " log is lost with the disk of one server.",
            )
        with self._reading_answer():
            return dict(self._checked(found)["config"])

    def put(self, number: int, data: bytes, *, stays: bool) -> bool:
        """See Slots."""
        subject = self.kept if stays else self.frames
        said = self._published(subject, data, after=number - 1)
        if _code(said) in _WRONG_SEQUENCE:
            return False
        if (stored := self._sequence(said)) != number:
            raise LogStoreError(
                f"The stream {self.stream} in {self.address} has stored the message {number} as"
                f" {stored}.",
                remedy="Use servers of NATS 2.10 or later.",
            )
        return True

    def put_next(self, data: bytes, *, after: int | None) -> int:
        """See Slots."""
        del after  # the stream knows where it ends
        return self._sequence(self._published(self.kept, data, after=None))

    def _sequence(self, said: dict[str, Any]) -> int:
        """Return the sequence of a message that the stream says it has stored."""
        with self._reading_answer():
            stored = self._checked(said)
            if stored["stream"] != self.stream:
                raise ValueError(f"it names the stream {stored['stream']!r}")
            return int(stored["seq"])

    def _published(self, subject: str, data: bytes, *, after: int | None) -> dict[str, Any]:
        headers = None if after is None else {"Nats-Expected-Last-Sequence": str(after)}
        return self._connection.request(subject, data, headers=headers, limit_s=self._limit_s)

    def read(self, number: int, *, start: int = 0, length: int) -> bytes | None:
        """See Slots."""
        found = self._call("STREAM.MSG.GET", {"seq": number})
        if _code(found) == _NO_MESSAGE:
            return None
        with self._reading_answer():
            data = base64.b64decode(self._checked(found)["message"].get("data", ""))
        return data[start : start + length]

    def last(self, seen: int | None) -> int | None:
        """See Slots."""
        found = self._call("STREAM.INFO", {})
        with self._reading_answer():
            last = int(self._checked(found)["state"]["last_seq"])
        if seen is not None and last < seen:
            raise LogStoreError(
                f"The stream {self.stream} in {self.address} ends at the message {last}, and had"
                f" the message {seen}.",
                remedy="Wait until a majority of the servers runs. If it was restored to an earlier"
                " time, start all brokers of the log with empty homes.",
            )
        return last or None

    def first(self) -> int:
        """See Slots."""
        asked = {"seq": self.seen_first, "next_by_subj": self.frames}
        found = self._call("STREAM.MSG.GET", asked)
        if _code(found) != _NO_MESSAGE:
            with self._reading_answer():
                first = int(self._checked(found)["message"]["seq"])
            self.seen_first = max(self.seen_first, first)
        return self.seen_first

    def delete(self, stop: int, frames_in: Callable[[int, int], Iterator[int]]) -> None:
        """See Slots. The subject says which messages are frames."""
        del frames_in
        if stop > self.first():
            self._checked(self._call("STREAM.PURGE", {"seq": stop, "filter": self.frames}))

    def _call(self, what: str, body: dict[str, Any]) -> Any:
        return self._connection.call(f"{what}.{self.stream}", body, limit_s=self._limit_s)

    @contextmanager
    def _reading_answer(self) -> Iterator[None]:
        """Read an answer; one of another shape is not JetStream's."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LogStoreError(
                f"JetStream did not answer for the stream {self.stream}, but something else at"
                f" {self.address}: {type(error).__name__} {error}.",
                remedy=NOT_JETSTREAM,
            ) from error

    def _checked(self, answer: Any) -> Any:
        """Return an answer that is no error."""
        if not _code(answer):
            return answer
        said = answer["error"].get("description", "")
        if _code(answer) in _FULL:
            raise LogStoreError(
                f"The stream {self.stream} in {self.address} is full: {said}.",
                remedy="Raise max_bytes and max_msgs of the stream, or the limits of the account;"
                " without archive_root the log only grows.",
            )
        if _code(answer) == _NO_STREAM:
            raise LogStoreError(
                f"The stream {self.stream} in {self.address} is gone.",
                remedy="Restore it from a backup, or start with an empty home.",
            )
        raise LogStoreError(f"{self.address} refuses a request for {self.stream}: {said}.")


class JetStreamLog(ChainedLog):
    """A log in a stream, for one broker."""

    def __init__(self, address: str, *, timeout_s: float, lease_s: float, home_format: int) -> None:
        """Prepare the store; ``look`` connects.

        Args:
            address: ``nats://HOST:PORT,HOST:PORT/STREAM``, or ``tls://…``, without secrets.
            timeout_s: longest time of a request, in addition to the time of large frames.
            lease_s: time after the last renewal at which another broker may lead.
            home_format: format of this broker's home, which says how the frames are applied.
        """
        scheme, _, rest = check_log_store(address).partition("://")
        place, _, query = rest.partition("?")
        hosts, _, stream = place.partition("/")
        self._replicas = int(query.partition("=")[2] or _REPLICAS)
        servers = [f"{scheme}://{host}" for host in hosts.split(",")]
        self._connection = NatsConnection(address, servers, timeout_s=timeout_s)
        limit_s = lease_request_s(lease_s, timeout_s=timeout_s)

        def slots(name: str, limit_s: float) -> StreamSlots:
            return StreamSlots(self._connection, name, limit_s=limit_s)

        self._stream, self._hurried_stream = slots(stream, timeout_s), slots(stream, limit_s)
        lease = f"{stream}_lease"
        self._lease, self._hurried_lease = slots(lease, timeout_s), slots(lease, limit_s)
        self._lease.kept = self._hurried_lease.kept = f"{_SUBJECT}.{stream}.lease"
        #: Number of the last lease that this broker has read or written.
        self._lease_number = 0
        super().__init__(
            address,
            slots=self._stream,
            hurried=self._hurried_stream,
            lease_s=lease_s,
            home_format=home_format,
        )

    @override
    def _find_log(self) -> tuple[str, int]:
        name = self._stream.stream
        prefix = f"{_SUBJECT}.{name}."
        config = self._stream.make(
            is_new=not self.id,
            subjects=[f"{prefix}{secrets.token_hex(ID_BYTES)}.*"],
            storage="file",
            retention="limits",
            discard="new",
            deny_delete=True,
            num_replicas=self._replicas,
        )
        subjects = config.get("subjects") or []
        id_ = subjects[0].removeprefix(prefix).removesuffix(".*") if len(subjects) == 1 else ""
        if len(id_) != 2 * ID_BYTES or set(id_) - set("0123456789abcdef"):
            raise LogStoreError(
                f"The stream {name} in {self.address} has no commit log: its subjects are"
                f" {', '.join(subjects[:3]) or 'those of another stream'}.",
                remedy="Name a stream that does not exist: the broker makes it.",
            )
        if self.id and id_ != self.id:  # what is put goes nowhere, not into another log
            return id_, 0
        self._check(config, _NEEDED)
        self._stream.frames = self._hurried_stream.frames = f"{prefix}{id_}.frames"
        self._stream.kept = self._hurried_stream.kept = f"{prefix}{id_}.kept"
        self._stream.message_bytes = max(0, config.get("max_msg_size", 0)) or None
        if self._stream.slot_bytes < _MESSAGE_BYTES_MIN:
            raise LogStoreError(
                f"The stream {name} in {self.address} takes messages of"
                f" {self._stream.slot_bytes} bytes and their headers only.",
                remedy="Raise max_msg_size of the stream, and max_payload of the servers, to"
                " 1 MiB.",
            )
        leased = self._lease.make(
            is_new=True,
            subjects=[self._lease.kept],
            storage="file",
            max_msgs=1,
            num_replicas=self._replicas,
        )
        if leased.get("subjects") != [self._lease.kept]:
            raise LogStoreError(
                f"The stream {self._lease.stream} in {self.address} is not that of the lease.",
                remedy="Rename it, or choose another name for the log's stream.",
            )
        self._check(leased, _NEEDED_OF_LEASE)
        return id_, int(id_[:8], 16)

    def _check(self, config: dict[str, Any], needed: dict[str, tuple[Any, ...]]) -> None:
        """Check that a stream keeps what it confirms."""
        for name, allowed in needed.items():
            if (found := config.get(name)) not in allowed:
                raise LogStoreError(
                    f"The stream {config['name']} in {self.address} has {name} ="
                    f" {str(found).lower()}: it may lose what it has confirmed, or takes nothing.",
                    remedy=f"Set {name} = {str(allowed[0]).lower()} by `nats stream edit`, or name"
                    " a stream that does not exist: the broker makes it.",
                )
        if config["num_replicas"] < self._replicas:
            raise LogStoreError(
                f"The stream {config['name']} in {self.address} has num_replicas ="
                f" {config['num_replicas']}, and log_store asks for {self._replicas}.",
                remedy="Raise the number by `nats stream edit --replicas`, or add ?replicas="
                f"{config['num_replicas']} to log_store.",
            )

    @override
    def _read_lease(self) -> bytes | None:
        return self._last_of(self._lease)

    def _last_of(self, lease: StreamSlots) -> bytes | None:
        self._lease_number = lease.last(None) or 0
        return lease.read(self._lease_number, length=MIB) if self._lease_number else None

    @override
    def _write_lease(self, content: bytes, *, is_hurried: bool) -> bool:
        slots = self._hurried_lease if is_hurried else self._lease
        for _ in range(_LEASE_TRIES):
            if slots.put(self._lease_number + 1, content, stays=True):
                self._lease_number += 1
                return True
            if lease_of(self._last_of(slots), lease_ms=0)["epoch"] > self._chain.epoch:
                return False
        raise LogStoreError(f"The lease in {self.address} was refused for the moment.")

    @override
    def close(self) -> None:
        try:
            super().close()
        finally:
            self._connection.close()


def _code(answer: Any) -> int:
    """Return the code of an error; 0 if the answer is none."""
    error = answer.get("error")
    if not isinstance(error, dict):
        return 0 if error is None else 1
    return int(error.get("err_code") or error.get("code") or 1)
