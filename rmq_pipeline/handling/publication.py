"""Publication of a sink by one window: from the files named in settles to the manifest."""

import logging
from pathlib import Path

import pyarrow as pa

from rmq_pipeline import durable_files
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.handling import sink
from rmq_pipeline.lake.publication import (
    GRACE_MS,
    delete_staged,
    publish,
    publish_version,
    replaced_files,
)
from rmq_pipeline.verbs import Verbs

logger = logging.getLogger(__name__)


class Publication:
    """The published files of a group's sink; does nothing without a sink."""

    def __init__(self, verbs: Verbs, *, group: str, folder: Path | None) -> None:
        self._verbs = verbs
        self._group = group
        self._folder = folder

    def finish_previous(self, *, epoch: int) -> int:
        """Publish what earlier windows settled; delete their other files and return the number.

        Call it after window ``epoch`` is open: the broker then refuses settles of older windows.
        """
        if self._folder is None:
            return 0
        durable_files.make_folder(self._folder)
        named = publish(self._verbs, self._group, sink=self._folder)
        replaced = replaced_files(self._verbs, self._group, grace_ms=GRACE_MS)
        kept = [path for path, over in replaced.items() if not over]
        return len(sink.delete_unnamed(self._folder, named, epoch=epoch, kept=kept))

    def add(self, settled: pa.Table, *, version: int) -> None:
        """Publish the files that a settle named, as a version of the sink."""
        if self._folder is not None and settled.num_rows:
            publish_version(
                self._verbs,
                self._group,
                sink=self._folder,
                version=version,
                add=settled,
                remove=[],
            )

    def discard(self, staged: pa.Table) -> None:
        """Delete the staged files of a refused settle; on an error the next window deletes them."""
        if self._folder is None or not staged.num_rows:
            return
        try:
            # Ask the broker: the refused call may repeat a settle that had succeeded.
            named = self._verbs.sink_files(self._group)["path"].to_pylist()
            delete_staged(self._folder, staged, named=named)
        except RocketMQError as error:
            logger.warning("staged files kept group=%s why=%s", self._group, error)
