"""A sink's publication by one window: what settles named, and the manifest that says so."""

import logging
from pathlib import Path

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.spark import sink
from rmq_pipeline.spark.verbs import Verbs

logger = logging.getLogger(__name__)


class Publication:
    """The files of a group's sink that count; without a sink there are none."""

    def __init__(self, verbs: Verbs, *, group: str, folder: Path | None) -> None:
        self._verbs = verbs
        self._group = group
        self._folder = folder
        self._files = schema.SINK_FILE.empty_table()

    def finish_previous(self, *, epoch: int) -> int:
        """Publish what earlier windows settled and delete what they only staged; how many files.

        To be done once the window ``epoch`` is open: what an older one settles later is refused.
        """
        if self._folder is None:
            return 0
        self._files = self._named()
        sink.publish_manifest(self._folder, self._files)
        return len(sink.delete_unnamed(self._folder, self._files, epoch=epoch))

    def add(self, settled: pa.Table) -> None:
        """Let readers see the files that a settle named."""
        if self._folder is not None and settled.num_rows:
            self._files = pa.concat_tables([self._files, settled])
            sink.publish_manifest(self._folder, self._files)

    def discard(self, staged: pa.Table) -> None:
        """Delete files of a settle that was refused, or leave it to the next window."""
        if self._folder is None or not staged.num_rows:
            return
        try:
            # Asked again: a refusal may answer the repetition of a settle that had its effect.
            sink.delete_staged(self._folder, staged, files=self._named())
        except RocketMQError as error:
            logger.warning("staged files kept group=%s why=%s", self._group, error)

    def _named(self) -> pa.Table:
        named = self._verbs.sink_files(self._group)
        return named.select(schema.SINK_FILE.names).cast(schema.SINK_FILE)
