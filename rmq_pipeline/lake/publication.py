"""A sink's publication: the broker says what counts, the manifest lets readers see it."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from rmq_pipeline.errors import SinkChangedError
from rmq_pipeline.lake import manifest

logger = logging.getLogger(__name__)

#: Replaced files are kept this long for those who read by an older manifest.
GRACE_MS: Final = 10 * 60_000


class SinkVerbs(Protocol):
    """What is asked of the broker; flight.client.Client has it."""

    def sink_files(self, group: str, *, removed: bool = False) -> pa.Table:
        """The files that count, in the order they came to; or those that did."""
        ...

    def replace_sink_files(
        self,
        group: str,
        *,
        replacement_id: str,
        add: pa.Table,
        remove: Sequence[str],
        partitions: Sequence[str],
        window: tuple[str, int] | None,
        reason: str,
    ) -> dict[str, Any]:
        """Let files count instead of others."""
        ...


def publish(verbs: SinkVerbs, group: str, *, sink: Path) -> pa.Table:
    """Let readers see all that counts now, and no less than before; what the broker lists."""
    # Read first: what the broker lists afterwards is not older.
    known = manifest.read(sink)
    listed = verbs.sink_files(group)
    manifest.publish(sink, listed, known=known)
    return listed


def publish_version(
    verbs: SinkVerbs, group: str, *, sink: Path, version: int, add: pa.Table, remove: Sequence[str]
) -> None:
    """Let readers see one more version, and what somebody else has not published before it."""
    if not manifest.record(sink, version, add=add, remove=remove):
        publish(verbs, group, sink=sink)


def replace(
    verbs: SinkVerbs,
    group: str,
    *,
    sink: Path,
    replacement_id: str,
    add: pa.Table,
    remove: Sequence[str],
    partitions: Sequence[str] = (),
    window: tuple[str, int] | None = None,
    reason: str = "",
) -> dict[str, Any]:
    """Let staged files count instead of others, for the broker and for readers.

    Staged files that do not count in the end are deleted: those of a replacement that is refused,
    and those of one that was made before.

    Args:
        add: schema.SINK_FILE, staged under names that no window's files have (``stage``'s names
            begin with ``part-``, and are swept by the next window).

        window: name and epoch of the window whose work it is.

    Returns:
        As ``replace_sink_files``: {"version", "added", "removed"}.

    Raises:
        SinkChangedError: nothing was changed.
    """
    try:
        answer = verbs.replace_sink_files(
            group,
            replacement_id=replacement_id,
            add=add,
            remove=remove,
            partitions=partitions,
            window=window,
            reason=reason,
        )
    except SinkChangedError:
        known = [verbs.sink_files(group, removed=removed) for removed in (False, True)]
        named = [path for files in known for path in files["path"].to_pylist()]
        delete_staged(sink, add, named=named)
        raise
    if answer["added"] == add["path"].to_pylist():
        publish_version(
            verbs, group, sink=sink, version=answer["version"], add=add, remove=answer["removed"]
        )
    else:
        delete_staged(sink, add, named=answer["added"])
        publish(verbs, group, sink=sink)
    return answer


def delete_staged(sink: Path, staged: pa.Table, *, named: Sequence[str]) -> None:
    """Delete staged files, but those that are named after all."""
    kept = set(named)
    for path in staged["path"].to_pylist():
        if path not in kept:
            (sink / path).unlink(missing_ok=True)


def sweep(sink: Path, *, prefix: str, epoch: int, kept: Collection[str]) -> list[str]:
    """Delete what dead windows staged and nobody named.

    Args:
        sink: the sink's folder.
        prefix: of their files' names, which go on with their epoch: ``part-000007-…``.
        epoch: files of this epoch and later ones are left alone.
        kept: paths that stay.

    Returns:
        The paths deleted, relative to the sink.
    """
    kept = set(kept)
    unnamed = [
        path
        for path in sink.glob(f"hour=*/{prefix}-*.parquet")
        if str(path.relative_to(sink)) not in kept and _epoch_of(path) < epoch
    ]
    for path in unnamed:
        path.unlink(missing_ok=True)
    return [str(path.relative_to(sink)) for path in unnamed]


def _epoch_of(path: Path) -> int:
    epoch = path.name.split("-")[1]
    return int(epoch) if epoch.isdigit() else 0


def replaced_files(verbs: SinkVerbs, group: str, *, grace_ms: int) -> dict[str, bool]:
    """The files that were replaced, as far as the broker knows; whether their grace is over."""
    removed = verbs.sink_files(group, removed=True)
    now_ms = listed_at_ms(removed)
    over = [at_ms + grace_ms <= now_ms for at_ms in removed["removed_at_ms"].to_pylist()]
    return dict(zip(removed["path"].to_pylist(), over, strict=True))


def listed_at_ms(listed: pa.Table) -> int:
    """When the broker answered ``sink_files``, by its clock."""
    return int(listed.schema.metadata[b"at_ms"])


def delete_replaced(
    verbs: SinkVerbs, group: str, *, sink: Path, grace_ms: int = GRACE_MS
) -> list[str]:
    """Delete files whose replacement is older than the grace, once readers see it.

    Returns:
        The paths that were deleted.
    """
    counting = set(publish(verbs, group, sink=sink)["path"].to_pylist())
    deleted = []
    for path, over in replaced_files(verbs, group, grace_ms=grace_ms).items():
        if over and path not in counting and (sink / path).exists():
            (sink / path).unlink(missing_ok=True)
            deleted.append(path)
    if deleted:
        logger.info("replaced files deleted group=%s files=%d", group, len(deleted))
    return deleted
