"""Replacing files of a sink in one step, for compaction and for the replay of a range.

The caller's thread checks a replacement against DuckDB's tables. The writer then only checks that
nothing has changed since. Only replacements make files stop counting. So a replacement of named
files requires no other replacement since. A replacement of whole partitions requires no settle with
files since, either.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.broker.decide.sinks import ReplaceSinkFiles, replaced_answer
from rmq_pipeline.broker.state.group_facts import SinkVersion
from rmq_pipeline.broker.work import arguments
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import BusyError, RequestError, SinkChangedError, TableSchemaError
from rmq_pipeline.lake import manifest
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.stored_state import SinkTables
from rmq_pipeline.tables import columns_of, sound

#: Tries for a replacement of whole partitions while the group keeps settling.
_TRIES: Final = 100


def replace_sink_files(
    engine: Engine,
    group: str,
    *,
    replacement_id: str,
    add: pa.Table,
    remove: Sequence[str],
    partitions: Sequence[str],
    window: tuple[str, int] | None,
    reason: str,
) -> dict[str, Any]:
    """Check a replacement and carry it out.

    Raises:
        SinkChangedError: a file to remove does not count, a file to add is known, or other files of
            the partitions count.
        FencedError: a newer epoch has opened the window.
        BusyError: the group settles faster than its partitions can be checked.
    """
    _check_id(replacement_id)
    reason = arguments.text(reason, "reason")
    fence = arguments.held(window)
    added = described_files(add)
    removed = list(arguments.texts(remove, "remove"))
    partitions = arguments.texts(partitions, "partitions")
    _check_paths([file["path"] for file in added], removed)
    group_id = engine.state.group(group).group_id
    for _ in range(_TRIES):
        engine.dispatched(engine.state.changed(Kind.SINK_FILE, group_id))
        seen = engine.database.sink(group_id, replacement_id=replacement_id)
        if seen.answer is not None:
            version, old, gone = seen.answer
            return replaced_answer(version, added=old, removed=gone)
        _check(seen, added, removed=removed, partitions=partitions)
        request = ReplaceSinkFiles(
            group,
            replacement_id,
            reason,
            added,
            removed,
            SinkVersion(seen.version, seen.replaced),
            fence,
            whole=bool(partitions),
        )
        answer: dict[str, Any] | None = engine.submit(request)
        if answer is not None:
            return answer
    raise BusyError(f"Group {group} has settled files into its sink during each try.")


def described_files(files: pa.Table | None) -> list[dict[str, Any]]:
    """Return sink files as their events describe them.

    Raises:
        TableSchemaError: the table does not match schema.SINK_FILE.
        RequestError: a path leads out of the sink.
    """
    if files is None or not sound(files, "sink files").num_rows:
        return []
    columns = columns_of(files, schema.SINK_FILE)
    if columns["path"].null_count:
        raise TableSchemaError("Column path of the sink files has a null.")
    rows: list[dict[str, Any]] = pa.table(columns).to_pylist()
    for at, row in enumerate(rows):
        if fault := manifest.fault_of(row["path"]):
            raise RequestError(
                f"Row {at} of the sink files: {row['path'][:200]!r} is not a file below the sink:"
                f" {fault}. Give the path relative to the sink's folder."
            )
    return rows


def _check(
    seen: SinkTables,
    added: Sequence[dict[str, Any]],
    *,
    removed: Sequence[str],
    partitions: Sequence[str],
) -> None:
    counting = dict(
        zip(seen.files["path"].to_pylist(), seen.files["partition"].to_pylist(), strict=True)
    )
    gone = [path for path in removed if path not in counting]
    if gone:
        raise SinkChangedError(
            f"{len(gone)} of {len(removed)} files to be removed are not current, the first is"
            f" {gone[0]}."
        )
    old = set(seen.removed["path"].to_pylist())
    known = [file["path"] for file in added if file["path"] in counting or file["path"] in old]
    if known:
        raise SinkChangedError(
            f"{len(known)} files to be added are known already, the first is {known[0]}."
        )
    named, whole = set(removed), set(partitions)
    left = [path for path, part in counting.items() if part in whole and path not in named]
    if left:
        raise SinkChangedError(
            f"{len(left)} other files of these partitions are current, the first is {left[0]}."
        )


def _check_id(replacement_id: object) -> None:
    if not isinstance(replacement_id, str) or not replacement_id.isprintable():
        raise RequestError(f"A replacement_id must be a printable text, not {replacement_id!r}.")
    if not 1 <= len(replacement_id) <= limits.REPLACEMENT_ID_LENGTH:
        longest = limits.REPLACEMENT_ID_LENGTH
        raise RequestError(f"A replacement_id must have 1 to {longest} characters.")


def _check_paths(added: Sequence[str], removed: Sequence[str]) -> None:
    if not added and not removed:
        raise RequestError("A replacement adds or removes at least one file.")
    for files, what in ((added, "added"), (removed, "removed")):
        if len(files) > limits.REPLACED_FILES:
            raise RequestError(f"More than {limits.REPLACED_FILES} files {what} at once.")
        if not all(files):
            raise RequestError(f"The path of a file {what} is empty.")
        path, times = Counter(files).most_common(1)[0] if files else ("", 1)
        if times > 1:
            raise RequestError(f"{path} is {what} {times} times.")
