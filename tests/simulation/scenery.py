"""What histories are about: topics, who reads them and how, and what may be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from rmq_pipeline.settings import Settings
from tests.simulation.crashing import Trouble
from tests.simulation.model.consumer import Consumer
from tests.simulation.model.line import Line
from tests.simulation.model.topics import CHECK_INTERVAL_MS, CHECKS, IMMUNITY_MS

#: Crashes here are copies of files: a disk would add nothing but its time.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
SETTINGS = Settings(
    reserve_bytes=0,
    log_file_bytes=1024 * 1024,
    seal_after_ms=2_000,
    compact_min_inputs=2,
    replaced_grace_ms=3_000,
    system_retention_ms=5_000,
    delay_levels_ms=(1_000, 3_000),
    transaction_immunity_ms=IMMUNITY_MS,
    transaction_check_interval_ms=CHECK_INTERVAL_MS,
    transaction_check_max=CHECKS,
)
TOPICS = {
    "ordered": "fifo",
    "loose": "normal",
    "later": "delay",
    "urgent": "priority",
    "deals": "transaction",
    "anything": "mixed",
    "chats": "lite",
}
#: Topics that may suppress repetitions.
SUPPRESSING = ("ordered", "loose", "later", "anything", "deals", "chats")
#: Retention of a topic's messages, if it is not permanent.
KEPT_MS = 2_000
#: Queues of a topic at first, and when it has grown.
QUEUES, MOST_QUEUES = 2, 5
KEYS = ("a", "b", "c", "d")
#: Clients of lite topics; the first has subscribed to all there are.
CLIENTS = ("everyone", "one", "other")
#: Per second, and no limit.
RATES = (0, 2, 5)
TAGS = {"filter": "a || b"}
SQL = {"filter": "n > 1 AND TAGS <> 'b' OR n = 0", "filter_type": "sql92"}
POLICIES = ("dead_letter", "park", "dead_letter_group")
#: The receipt of a delivery, or the id of a transaction, that was never returned.
LOST = "lost"


def tag(number: int) -> str:
    return "abc"[number % 3]


def everything(number: int) -> bool:
    return number >= 0


def tagged(number: int) -> bool:
    return tag(number) in "ab"


def conditioned(number: int) -> bool:
    n = number % 5
    return (n > 1 and tag(number) != "b") or n == 0


def consumer(name: str, on_failure: str) -> Consumer:
    """A consumer group of this name, which says what it reads and how."""
    topic, _, how = name.removeprefix("of-").partition("-")
    by_queue, how = how.startswith("line"), how.removeprefix("line").lstrip("-")
    ordered = TOPICS[topic] in ("fifo", "mixed", "lite") and not by_queue
    filters = {"tagged": (TAGS, tagged), "conditioned": (SQL, conditioned)}
    wanted, wants = filters.get(how, ({}, everything))
    if by_queue:
        policy = "park" if on_failure == "park" else "dead_letter"
        return Line(name, topic, ordered, policy, wanted, wants, by_queue=True)
    made = Consumer(name, topic, ordered, on_failure, wanted, wants)
    if TOPICS[topic] == "lite":
        made.clients = {CLIENTS[0]: set(KEYS), CLIENTS[1]: set(), CLIENTS[2]: set()}
    return made


def order_of(one: Consumer) -> str:
    """As the broker is told."""
    if one.by_queue:
        return "queue"
    return "message_group" if one.ordered and not one.clients else "none"


CONSUMERS = (
    *("of-ordered", "of-ordered-tagged", "of-loose", "of-loose-conditioned"),
    *("of-later", "of-urgent", "of-deals", "of-anything", "of-chats"),
    *("of-anything-line", "of-ordered-line-tagged"),
)


def some(strategy: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=1, max_size=most)


#: Which of those there are; a list of these is gone through again and again.
CHOICES = some(st.booleans())
#: Taken modulo how many there are.
ANY = st.integers(0, 5)
#: Mostly none.
TROUBLE = st.one_of(
    *[st.none()] * 7,
    st.builds(
        Trouble,
        st.sampled_from(("staged", "before_write", "half_written", "written")),
        st.booleans(),
    ),
)
#: Message group, delay and priority of a message; its topic says which of these count; and
#: which of its names it shares with others.
ROWS = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from((1, 50, 1_000, 3_000)),
        st.integers(0, 3),
        st.sampled_from((None, None, None, 0, 1, 2)),
    ),
    min_size=2,
    max_size=8,
)
Rows = list[tuple[str, int, int, int | None]]
