"""Upkeep windows: a run does one kind of the broker's background work for about a minute."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rmq_pipeline import limits
from rmq_pipeline.errors import FencedError, RocketMQError
from rmq_pipeline.flight.client import Client

Report = dict[str, Any]
#: Name and epoch of an open window.
Fence = tuple[str, int]

#: Maximum time that a verb waits in the broker; then the window checks its end.
SLICE_MS: Final = 4_000
#: Time from the request of a run until it is up.
AHEAD_MS: Final = 8_000
#: Three slices.
LEASE_MS: Final = 12_000
#: One slice of sealing writes this much of the log, which may take long on a slow disk.
SEAL_BYTES: Final = 64 * limits.MIB
SEAL_LEASE_MS: Final = 120_000
#: One slice of merging may be a Spark job.
COMPACT_LEASE_MS: Final = 600_000
#: A pipeline's checker may take long to look up what has happened.
CHECK_LEASE_MS: Final = 60_000
#: Lease of a window during a call of user code. The sensor recognizes the call by this lease, which
#: is shorter than the full one, and starts no successor: it would only repeat the call.
IN_A_CALL_LEASE_MS: Final = 40_000
#: Renewal interval of that lease. Without a renewal for twice this time, the run is dead.
IN_A_CALL_RENEW_MS: Final = 10_000
#: A window also counts as in a call if its lease was not renewed in full for this long.
IN_A_CALL_AFTER_MS: Final = 2 * SLICE_MS
#: Interval at which a waiting run checks whether the call is over.
_LOOK_S: Final = 0.25
WINDOW_S: Final = 60.0
#: Maximum time that a busy window waits for its successor, and that a successor waits for the end
#: of a call.
OVERTIME_S: Final = 30.0
log = logging.getLogger(__name__)

#: Interval of renewals.
RENEW_S = IN_A_CALL_RENEW_MS / 1000


class Verb(Protocol):
    """An upkeep verb of the broker."""

    def __call__(self, client: Client, *, wait_ms: int, window: Fence) -> Report:
        """Wait for due work, do it, and report."""
        ...


@dataclass(frozen=True)
class UpkeepJob:
    """A kind of background work: an upkeep verb of the broker."""

    name: str
    description: str
    call: Verb
    #: Keys of its report that count work done.
    counts: tuple[str, ...]
    #: True if the verb can wait for work; busy windows then follow each other without a gap.
    waits: bool = True
    #: Work due within this time justifies a window now, because a run takes that long to start.
    ahead_ms: int = 0
    #: Renewed after every slice; after a kill, work waits at most this long.
    lease_ms: int = LEASE_MS

    @property
    def window(self) -> str:
        """Name of its windows at the broker."""
        return f"upkeep/{self.name}"

    def work_of(self, report: Report) -> int:
        """Return the amount of work in a report."""
        return sum(int(report.get(key) or 0) for key in self.counts)


def _deliver_scheduled(client: Client, *, wait_ms: int, window: Fence) -> Report:
    return client.deliver_scheduled(wait_ms=wait_ms, window=window)


def _revive(client: Client, *, wait_ms: int, window: Fence) -> Report:
    return client.revive(wait_ms=wait_ms, window=window)


def _check_transactions(client: Client, *, wait_ms: int, window: Fence) -> Report:
    return client.check_transactions(wait_ms=wait_ms, window=window)


def _seal(client: Client, *, wait_ms: int, window: Fence) -> Report:  # noqa: ARG001
    # The verb never waits.
    return client.seal(limit_bytes=SEAL_BYTES, window=window)


def _compact(client: Client, *, wait_ms: int, window: Fence) -> Report:  # noqa: ARG001
    # Merges in the broker's process; the run of the asset merges files itself.
    return client.compact(limit_bytes=SEAL_BYTES, window=window)


def _expire(client: Client, *, wait_ms: int, window: Fence) -> Report:  # noqa: ARG001
    return client.expire(window=window)


JOBS: Final[Mapping[str, UpkeepJob]] = {
    job.name: job
    for job in (
        UpkeepJob(
            "deliver_scheduled",
            "Moves scheduled messages to their topics when their time has come.",
            _deliver_scheduled,
            ("delivered", "dropped"),
            ahead_ms=AHEAD_MS,
        ),
        UpkeepJob(
            "revive",
            "Records leases that have ended, wakes receives that wait for the messages, and "
            "dead-letters exhausted messages.",
            _revive,
            ("revived", "dead_lettered"),
        ),
        UpkeepJob(
            "check_transactions",
            "Has producers check open half messages, and ends these after the last check.",
            _check_transactions,
            ("checked", "given_up", "dropped"),
            lease_ms=CHECK_LEASE_MS,
        ),
        UpkeepJob(
            "seal",
            "Writes the log's older messages and events to Parquet and drops log files.",
            _seal,
            ("segments", "event_rows", "dropped_files"),
            waits=False,
            lease_ms=SEAL_LEASE_MS,
        ),
        UpkeepJob(
            "compact",
            "Merges small Parquet segments into large ones.",
            _compact,
            ("compactions", "inputs", "rows", "bytes_before", "bytes"),
            waits=False,
            lease_ms=COMPACT_LEASE_MS,
        ),
        UpkeepJob(
            "expire",
            "Deletes messages past the retention of their topics, and files past their grace.",
            _expire,
            ("segments", "rows", "bytes", "deleted_files"),
            waits=False,
            lease_ms=SEAL_LEASE_MS,
        ),
    )
}


@dataclass(frozen=True)
class Slice:
    """One call of the verb: its end in seconds since the window began, and its report."""

    at_s: float
    report: Report
    work: int


@dataclass
class WindowResult:
    """Result of a window."""

    epoch: int = 0
    #: Owner of the window that was already open; then nothing was done.
    yielded_to: str = ""
    #: True if a newer window has taken over.
    handed_over: bool = False
    seconds: float = 0.0
    slices: list[Slice] = field(default_factory=list)

    @property
    def work(self) -> int:
        """Amount of work done."""
        return sum(one.work for one in self.slices)

    def total(self, key: str) -> int:
        """Return the sum of one of the reports' counts."""
        return sum(int(one.report.get(key) or 0) for one in self.slices)

    def per_level(self) -> dict[str, int]:
        """Return the messages delivered by delay level."""
        totals: dict[str, int] = {}
        for one in self.slices:
            for level, count in one.report.get("per_level", {}).items():
                totals[str(level)] = totals.get(str(level), 0) + count
        return totals

    def lateness_ms(self) -> dict[str, float]:
        """Return lateness of scheduled deliveries: median p50, largest p99 and max of slices."""
        found = [
            one.report["lateness_ms"]
            for one in self.slices
            if one.work and one.report.get("lateness_ms")
        ]
        if not found:
            return {}
        medians = sorted(float(lateness["p50"] or 0) for lateness in found)
        return {
            "p50": medians[len(medians) // 2],
            "p99": max(float(lateness["p99"] or 0) for lateness in found),
            "max": max(float(lateness["max"] or 0) for lateness in found),
        }


def run_upkeep_window(
    client: Client,
    job: UpkeepJob,
    *,
    owner: str,
    seconds: float = WINDOW_S,
    overtime: float = OVERTIME_S,
    hand_over_from: int = 0,
    observe: Callable[[Slice], None] = lambda _: None,
) -> WindowResult:
    """Do the job's work in slices until the window's time is over.

    A busy window waits a little longer, until the next window has taken over. The next window waits
    for the end of a call of user code. After a takeover the result of the call would be refused.

    Args:
        client: client of the broker.
        job: the kind of work.
        owner: shown to other runs that find the window open.
        seconds: length of the window.
        overtime: how much longer a busy window waits for its successor.
        hand_over_from: epoch of a window to take over from. The run yields to any other open
            window. It also yields if the call of this window does not end within OVERTIME_S.
        observe: called with every slice.
    """
    opened = _open(client, job, owner=owner, hand_over_from=hand_over_from)
    if "yielded_to" in opened:
        return WindowResult(epoch=opened["epoch"], yielded_to=opened["yielded_to"] or "another")
    result = WindowResult(epoch=opened["epoch"])
    began = time.monotonic()
    try:
        while _goes_on(job, result, seconds=seconds, overtime=overtime):
            end_s = seconds if result.seconds < seconds else seconds + overtime
            wait_ms = min(SLICE_MS, 1 + int(1000 * (end_s - result.seconds)))
            report = job.call(client, wait_ms=wait_ms, window=(job.window, result.epoch))
            result.seconds = time.monotonic() - began
            result.slices.append(Slice(result.seconds, report, job.work_of(report)))
            observe(result.slices[-1])
            # Renew last: the work counts, even if another window has taken over meanwhile.
            client.renew_window(job.window, epoch=result.epoch, duration_ms=job.lease_ms)
    except FencedError:
        result.handed_over = True
    finally:
        # An interrupted run must not keep the window; a newer epoch is not affected.
        with contextlib.suppress(RocketMQError):
            client.close_window(job.window, epoch=result.epoch)
    return result


def is_in_a_call(window: Mapping[str, Any], job: UpkeepJob, *, now_ms: int) -> bool:
    """Return True if an open window of this kind of work is inside a long call.

    Args:
        window: the window, as in ``Client.due``.
        job: the kind of work.
        now_ms: the broker's time.
    """
    renewed_at_ms = int(window["expires_at_ms"]) - job.lease_ms
    return now_ms - renewed_at_ms > IN_A_CALL_AFTER_MS


def _open(client: Client, job: UpkeepJob, *, owner: str, hand_over_from: int) -> Report:
    may_take_over = bool(hand_over_from) and _call_ends(client, job, epoch=hand_over_from)
    opened = client.open_window(job.window, owner=owner, duration_ms=job.lease_ms)
    # Its own name: the answer to an earlier attempt was lost.
    mine = opened.get("yielded_to") == owner
    if mine or ("yielded_to" in opened and may_take_over and opened["epoch"] == hand_over_from):
        return client.open_window(job.window, owner=owner, duration_ms=job.lease_ms, takeover=True)
    return opened


def _call_ends(client: Client, job: UpkeepJob, *, epoch: int) -> bool:
    """Wait until the window is in no call, is closed or has no live run; False on timeout."""
    began_ms, renewed_at_ms, lease = None, 0, None
    while True:
        due = client.due()
        now_ms, window = int(due["now_ms"]), due["jobs"][job.name]["window"]
        if not window or window["epoch"] != epoch or not is_in_a_call(window, job, now_ms=now_ms):
            return True
        if lease != window["expires_at_ms"]:
            lease, renewed_at_ms = window["expires_at_ms"], now_ms
        if now_ms - renewed_at_ms >= 2 * IN_A_CALL_RENEW_MS:
            return True
        began_ms = now_ms if began_ms is None else began_ms
        if now_ms - began_ms >= 1000 * OVERTIME_S:
            return False
        threading.Event().wait(_LOOK_S)


def _goes_on(job: UpkeepJob, result: WindowResult, *, seconds: float, overtime: float) -> bool:
    if not result.slices:
        return True
    if not job.waits:
        return result.slices[-1].work > 0 and result.seconds < seconds
    if result.seconds < seconds:
        return True
    # Busy: the next run is starting, and will take over.
    return result.seconds < seconds + overtime and result.work > 0


@contextmanager
def renewed(client: Client, window: Fence) -> Iterator[None]:
    """Renew the window's lease; its length tells other windows that a call is running.

    Args:
        client: client of the broker; also used from the renewing thread.
        window: name and epoch.

    Raises:
        FencedError: another window has already taken over. If one takes over later, the next verb
            with this fence raises.
    """
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            try:
                _renew_in_a_call(client, window)
            except FencedError:
                return
            except Exception as error:  # noqa: BLE001 - the next renewal may succeed
                log.warning("window not renewed name=%s error=%s", window[0], error)

    _renew_in_a_call(client, window)
    thread = threading.Thread(target=renew, name=f"hold {window[0]}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _renew_in_a_call(client: Client, window: Fence) -> None:
    name, epoch = window
    client.renew_window(name, epoch=epoch, duration_ms=IN_A_CALL_LEASE_MS)
