"""The two manifests of the library beside each other: a topic's JSON file, a sink's Delta log.

A topic's manifest is written as a whole whenever a segment is registered. A sink's manifest gets
one commit a version. Both are measured at the same numbers of files: one more file is added, and
then the current files are read. Times are of the processor; syncs go to the disk of --folder.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import durable_files, schema
from rmq_pipeline.archive import manifest as topic_manifest
from rmq_pipeline.archive.segment import Segment, topic_folder
from rmq_pipeline.archive.segment_file import place
from rmq_pipeline.lake import manifest as sink_manifest
from rmq_pipeline.storage.place import at

QUEUES: Final = 8
ROWS: Final = 1_000


def _cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


def _segment(number: int) -> Segment:
    base = number // QUEUES * ROWS
    return Segment("t", 1, number % QUEUES, base, base + ROWS)


def of_a_topic(folder: Path, *, files: int, turns: int) -> tuple[float, float]:
    """Return ms to list one more segment, and to read the manifest."""
    root = at(folder)
    segments = [_segment(number) for number in range(files + turns)]
    for segment in segments[files - 1 :]:
        path = folder / place(root, segment)
        path.parent.mkdir(parents=True, exist_ok=True)
        offsets = pa.array(range(segment.base, segment.end), pa.int64())
        times = pa.array([0] * ROWS, pa.int64())
        columns = {"queue_offset": offsets, "stored_at_ms": times, "born_at_ms": times}
        pq.write_table(pa.table(columns), path)
    home = topic_folder("t", 1)
    entry = topic_manifest.entry_of(root, segments[files - 1])
    known: list[dict[str, Any]] = [
        {**entry, "name": each.name, "path": place(root, each).removeprefix(f"{home}/")}
        for each in segments[:files]
    ]
    content = {"format": topic_manifest.FORMAT, "topic": "t", "topic_id": 1, "files": known}
    root.replace(f"{home}/{topic_manifest.NAME}", durable_files.dump_json(content))
    written, read = [], []
    for turn in range(1, turns + 1):
        now = segments[: files + turn]
        add = partial(topic_manifest.write, root, now, topic="t", topic_id=1)
        written.append(_cpu_ms(add))
        read.append(_cpu_ms(lambda: topic_manifest.read(root, home)))
    return statistics.median(written), statistics.median(read)


def of_a_sink(folder: Path, *, files: int, turns: int) -> tuple[float, float]:
    """Return ms to record a version with one more file, and to read the manifest."""

    def staged(first: int, count: int) -> pa.Table:
        numbers = range(first, first + count)
        ranges = [[{"queue_id": 0, "base": n * ROWS, "end": (n + 1) * ROWS}] for n in numbers]
        paths = [f"hour=2026-11-28-10/{number:032}.parquet" for number in numbers]
        rows = {"path": paths, "rows": [ROWS] * count, "bytes": [60_000] * count}
        rest = {"partition": ["hour=2026-11-28-10"] * count, "offsets": ranges}
        return pa.table({**rows, **rest}).cast(schema.SINK_FILE)

    columns = pa.schema([("queue_offset", pa.int64())])
    listed = staged(0, files).replace_schema_metadata({"version": "1"})
    sink_manifest.publish(folder, listed, known=sink_manifest.NOTHING, columns=columns)
    written, read = [], []
    for turn in range(turns):
        added = staged(files + turn, 1)
        add = partial(sink_manifest.record, folder, 2 + turn, add=added, columns=columns)
        written.append(_cpu_ms(add))
        read.append(_cpu_ms(lambda: sink_manifest.read(folder)))
    assert sink_manifest.read(folder).files.num_rows == files + turns
    return statistics.median(written), statistics.median(read)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--files", type=int, nargs="*", default=[100, 1_000, 10_000])
    parser.add_argument("--folder", type=Path, help="where the files are made")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = []
    for files in chosen.files:
        for name, measure in (("topic", of_a_topic), ("sink", of_a_sink)):
            with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
                written, read = measure(Path(folder), files=files, turns=chosen.turns)
            found.append({"of": name, "files": files, "add_ms": written, "read_ms": read})
    if chosen.json:
        print(json.dumps(found))
        return
    for each in found:
        print(
            f"{each['of']:6} {each['files']:7} files: add one {each['add_ms']:7.1f} ms,"
            f" read {each['read_ms']:7.1f} ms"
        )


if __name__ == "__main__":
    main()
