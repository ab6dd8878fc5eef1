"""Windows: leases under which one run at a time does a kind of background work."""

from dataclasses import dataclass

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.release import release_running
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import RequestError
from rmq_pipeline.store.events import Kind

CONSUMER: str = "consumer/"


def _check(name: str, duration_ms: int) -> None:
    kind, _, of = str(name).partition("/")
    if kind not in ("upkeep", "consumer") or not of:
        raise RequestError(f"Window {name!r} is neither upkeep/<job> nor consumer/<group>.")
    if not 1 <= duration_ms <= limits.WINDOW_MAX_MS:
        raise RequestError(f"The lease of a window must be 1 ms to 12 h, not {duration_ms} ms.")


@dataclass(frozen=True, slots=True)
class OpenWindow(Request):
    """Request that opens a window."""

    name: str
    owner: str
    duration_ms: int
    takeover: bool

    def decide(self, state: State, now_ms: int) -> Decision:
        """Open a new epoch, unless another owner's lease runs.

        Opening a consumer's window releases the deliveries of older epochs at once. Their attempts
        do not count, because the run that held them is gone, and the messages are not at fault.
        """
        _check(self.name, self.duration_ms)
        group_id = 0
        if self.name.startswith(CONSUMER):
            group_id = state.group(self.name.removeprefix(CONSUMER)).group_id
        current = state.windows.get(self.name)
        live = current is not None and current.expires_at_ms > now_ms
        if current is not None and live and not self.takeover:
            if current.owner == self.owner:  # repeated after a lost answer
                return Decision({"epoch": current.epoch, "expires_at_ms": current.expires_at_ms})
            return Decision(
                {
                    "yielded_to": current.owner,
                    "epoch": current.epoch,
                    "expires_at_ms": current.expires_at_ms,
                }
            )
        epoch = current.epoch + 1 if current is not None else 1
        expires = now_ms + self.duration_ms
        # The last run did not close its window: it was killed, or a message ended its process.
        unclosed = current is not None and current.expires_at_ms > 0
        decision = Decision(
            {"epoch": epoch, "expires_at_ms": expires, "follows_unclosed": unclosed}
        )
        decision.events.append(
            _event(
                Kind.WINDOW,
                self.name,
                now_ms=now_ms,
                epoch=epoch,
                expires_at_ms=expires,
                owner=self.owner,
            )
        )
        if group_id:
            decision.events.extend(_end_older(state, group_id, epoch=epoch, now_ms=now_ms))
        return decision


def _event(
    kind: Kind, name: str, *, now_ms: int, epoch: int, expires_at_ms: int, owner: str | None
) -> EventRows:
    return single(
        kind, now_ms, epoch=epoch, visible_at_ms=expires_at_ms, client_id=owner, detail=name
    )


def _end_older(state: State, group_id: int, *, epoch: int, now_ms: int) -> list[EventRows]:
    events = []
    for key, consumption in state.consumptions.items():
        leases = consumption.leases
        if key[0] != group_id or not len(leases):
            continue
        old = (leases.epoch > 0) & (leases.epoch < epoch)
        released = release_running(consumption, old, now_ms=now_ms)
        events.extend(QueueKey._make(key).events(released, now_ms))
    return events


@dataclass(frozen=True, slots=True)
class RenewWindow(Request):
    """Request that extends a window."""

    name: str
    epoch: int
    duration_ms: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Refuse if a newer epoch was opened, or this one was closed."""
        _check(self.name, self.duration_ms)
        state.fence((self.name, self.epoch))
        expires = now_ms + self.duration_ms
        event = _event(
            Kind.WINDOW,
            self.name,
            now_ms=now_ms,
            epoch=self.epoch,
            expires_at_ms=expires,
            owner=None,
        )
        return Decision({"epoch": self.epoch, "expires_at_ms": expires}, events=[event])


@dataclass(frozen=True, slots=True)
class CloseWindow(Request):
    """Request that closes a window. Has no effect on a closed window or one with a newer epoch."""

    name: str
    epoch: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event, unless the window is closed already."""
        current = state.windows.get(self.name)
        if current is None or current.epoch != self.epoch or current.expires_at_ms == 0:
            return Decision()
        event = _event(
            Kind.WINDOW_CLOSED,
            self.name,
            now_ms=now_ms,
            epoch=self.epoch,
            expires_at_ms=0,
            owner=None,
        )
        return Decision(events=[event])
