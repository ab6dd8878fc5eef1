"""What a receive gave, in a form that reads well in an assertion."""

from collections import defaultdict

import pyarrow as pa


def by_group(received: pa.Table) -> dict[str, list[tuple[bytes, int]]]:
    """Body and attempt of each message, by message group, as delivered."""
    found = defaultdict(list)
    for row in received.to_pylist():
        found[row["message_group"]].append((row["body"], row["delivery_attempt"]))
    return dict(found)


def bodies(received: pa.Table) -> list[bytes]:
    return [bytes(b) for b in received["body"].to_pylist()]


def attempts(received: pa.Table) -> list[int]:
    return [int(n) for n in received["delivery_attempt"].to_pylist()]
