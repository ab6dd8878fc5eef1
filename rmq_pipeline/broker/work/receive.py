"""The part of a receive outside the writer: loading, waiting, reading."""

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.deliver import BacklogWanted, Delivery, PageWanted, Receive
from rmq_pipeline.broker.decide.queue_index import FillBacklog, FillIndex
from rmq_pipeline.broker.state.consumption import KNOWN_PER_GROUP
from rmq_pipeline.broker.state.filter_cache import CachedSqlFilter, ReceiveFilter, TagHashFilter
from rmq_pipeline.broker.state.queue_index import IndexRows
from rmq_pipeline.broker.work import caller
from rmq_pipeline.broker.work.dead_letter import AT_ONCE, dead_letter_exhausted
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.filtering import judge, wanted_of
from rmq_pipeline.broker.work.line import FOLLOWERS, FOLLOWERS_OF_FULL, Place, Waiter
from rmq_pipeline.broker.work.placement import undispatched
from rmq_pipeline.broker.work.unreadable import readable, release_delivery
from rmq_pipeline.errors import StorageError
from rmq_pipeline.message import Int64s


def receive(engine: Engine, request: Receive, *, wait_ms: int) -> pa.Table:
    """Lease messages and read them; wait up to ``wait_ms`` for the first."""
    deadline = engine.clock.now_ms() + wait_ms
    waiter = engine.lines.enter(_place(engine, request)) if wait_ms else None
    followers = FOLLOWERS
    try:
        while True:
            followers = FOLLOWERS  # after an error, the next one gets what this one leaves
            # Repeated each time: the topic may have been deleted and recreated meanwhile.
            if waiter is not None and waiter.place != (place := _place(engine, request)):
                waiter.end(FOLLOWERS)
                waiter = engine.lines.enter(place)
            if engine.arrivals.closed:  # The broker stops: the caller may not get its answer.
                return schema.RECEIVED.empty_table()
            begin(request)
            delivery: Delivery = engine.submit(request)
            try:
                loaded = load_missing(engine, delivery, row_filter=request.row_filter)
                if len(delivery):
                    found = readable(engine, delivery, request=request)
                    followers = followers_of(delivery, request, loaded=loaded)
                    return found
            except BaseException:  # the messages reach no caller
                release_delivery(engine, delivery)
                raise
            if loaded or delivery.scanned_out:
                continue
            # The next in line learns when a leased message becomes visible again: no wakeup reports
            # that.
            followers = int(delivery.next_visible_ms is not None)
            if waiter is None or engine.clock.now_ms() >= deadline or engine.arrivals.closed:
                return schema.RECEIVED.empty_table()
            if delivery.locked:  # locked for this client; another client may still read the queue
                waiter.pass_on()
            wake = deadline
            if delivery.next_visible_ms is not None:
                wake = min(wake, delivery.next_visible_ms)
            if not _stays(engine, waiter, at_ms=wake):
                followers = FOLLOWERS  # it may have been woken before its caller was gone
                return schema.RECEIVED.empty_table()
            # An earlier call of the same attempt may wait too, for a client that has dropped it.
            # Neither call may take the messages of the other.
            request = replace(request, repeats=False)
    finally:
        if waiter is not None:
            waiter.end(followers)


def followers_of(delivery: Delivery, request: Receive, *, loaded: bool) -> int:
    """Return how many waiting receives to wake after a receive that got messages."""
    is_full = len(delivery) >= request.limit or loaded or delivery.scanned_out
    return FOLLOWERS_OF_FULL if is_full else FOLLOWERS


def _stays(engine: Engine, waiter: Waiter, *, at_ms: int) -> bool:
    """Wait until woken, or until ``at_ms``; return False if the caller has gone."""
    while not waiter.wait(caller.look_at_ms(engine.clock, at_ms)):
        if engine.clock.now_ms() >= at_ms or caller.waits_no_more():
            break
    return not caller.waits_no_more()


def _place(engine: Engine, request: Receive) -> Place:
    """Return the line to wait in, shared by receives that can get the same messages."""
    topic = engine.state.topic(request.topic).topic
    match request.row_filter:
        case TagHashFilter(hashes):
            wanted: Hashable = hashes.tobytes()
        case CachedSqlFilter() as row_filter:
            wanted = row_filter.sql.expression
        case _:
            wanted = None
    client_id = request.client_id if topic.type == "lite" else ""
    group_id = engine.state.group(request.group).group_id
    return Place(topic.topic_id, group_id, (wanted, request.queue_ids, client_id))


def begin(request: Receive) -> None:
    """Prepare the filter; call it before each submit of the request."""
    if isinstance(request.row_filter, CachedSqlFilter):
        request.row_filter.begin()


def load_missing(engine: Engine, delivery: Delivery, *, row_filter: ReceiveFilter | None) -> bool:
    """Load what the receive lacked, and dead-letter what it marked.

    Return True if another try may find more.
    """
    for page in delivery.pages:
        _load_page(engine, page)
    for wanted in delivery.backlogs:
        _load_backlog(engine, wanted)
    if delivery.unjudged and isinstance(row_filter, CachedSqlFilter):
        judge(
            engine,
            row_filter,
            topic_id=delivery.topic_id,
            unjudged=delivery.unjudged,
            turn=delivery.delivery,
        )
    dead_lettered = (
        dead_letter_exhausted(engine, None, limit=AT_ONCE).n if delivery.exhausted else 0
    )
    return bool(delivery.pages or delivery.backlogs or delivery.unjudged or dead_lettered)


def _load_page(engine: Engine, page: PageWanted) -> None:
    found = engine.database.index(page.topic_id, page.queue_id, start=page.start, stop=page.stop)
    rows = IndexRows(
        found.base, found.position, found.row, found.message_group_hash, found.tag_hash
    )
    if len(rows):
        engine.submit(FillIndex(page.topic_id, page.queue_id, rows))
    topic = engine.state.topics.get(page.topic_id)
    if topic is None:  # deleted meanwhile
        return
    # Expired offsets are not needed. Any other missing row would make the receive ask for it
    # forever.
    wanted = max(page.start, topic.queues[page.queue_id].min_offset)
    there = rows.base if len(rows) else page.stop
    if wanted < there:
        raise StorageError(
            f"The database lacks offsets {wanted} to {there} of queue {page.queue_id} of topic "
            f"{topic.topic.name}.",
            remedy="Restore the home from a copy, or reset the group's offset beyond them.",
        )


def _load_backlog(engine: Engine, wanted: BacklogWanted) -> None:
    rest = undispatched(engine, wanted.key, stop=wanted.stop)
    groups, offsets = engine.database.backlog(
        wanted.key.topic_id,
        wanted.key.queue_id,
        hashes=np.array(wanted.groups, dtype=np.int64),
        starts=np.array(wanted.starts, dtype=np.int64),
        stop=rest.base,
        limit=KNOWN_PER_GROUP,
    )
    if len(rest):
        groups, offsets = _with_rest(wanted, rest, groups=groups, offsets=offsets)
    found: dict[int, list[int]] = {group: [] for group in wanted.groups}
    for group, offset in zip(groups.tolist(), offsets.tolist(), strict=True):
        found[group].append(offset)
    full = [found[g][-1] + 1 if len(found[g]) >= KNOWN_PER_GROUP else None for g in wanted.groups]
    if wanted.row_filter is not None:
        chosen = wanted_of(engine, wanted.row_filter, key=wanted.key, offset=offsets)
        keep = set(offsets[chosen].tolist())
        found = {group: [o for o in some if o in keep] for group, some in found.items()}
    engine.submit(FillBacklog(wanted, [found[group] for group in wanted.groups], full))


def _with_rest(
    wanted: BacklogWanted, rest: IndexRows, *, groups: Int64s, offsets: Int64s
) -> tuple[Int64s, Int64s]:
    """Join DuckDB's rows of message groups with undispatched ones.

    The result has at most KNOWN_PER_GROUP rows of each group.
    """
    order = np.argsort(wanted.groups)
    known = np.array(wanted.groups, dtype=np.int64)[order]
    starts = np.array(wanted.starts, dtype=np.int64)[order]
    at = np.minimum(np.searchsorted(known, rest.message_group_hash), len(known) - 1)
    behind = np.arange(rest.base, rest.base + len(rest), dtype=np.int64)
    chosen = (known[at] == rest.message_group_hash) & (behind >= starts[at])
    groups = np.concatenate([groups, rest.message_group_hash[chosen]])
    offsets = np.concatenate([offsets, behind[chosen]])
    order = np.argsort(groups, kind="stable")
    _, firsts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(firsts, counts)
    kept = np.sort(order[rank < KNOWN_PER_GROUP])
    return groups[kept], offsets[kept]
