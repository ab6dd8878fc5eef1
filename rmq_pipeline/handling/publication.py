"""A sink's publication by one window: what settles named, and the manifest that says so."""

import logging
from pathlib import Path

import pyarrow as pa

from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.handling import sink
from rmq_pipeline.handling.verbs import Verbs
from rmq_pipeline.lake.publication import (
    GRACE_MS,
    delete_staged,
    publish,
    publish_version,
    replaced_files,
)

logger = logging.getLogger(__name__)


class Publication:
    """The files of a group's sink that count; without a sink there are none."""

    def __init__(self, verbs: Verbs, *, group: str, folder: Path | None) -> None:
        self._verbs = verbs
        self._group = group
        self._folder = folder

    def finish_previous(self, *, epoch: int) -> int:
        """Publish what earlier windows settled and delete what they only staged; how many files.

        To be done once the window ``epoch`` is open: what an older one settles later is refused.
        """
        if self._folder is None:
            return 0
        self._folder.mkdir(parents=True, exist_ok=True)
        named = publish(self._verbs, self._group, sink=self._folder)
        replaced = replaced_files(self._verbs, self._group, grace_ms=GRACE_MS)
        kept = [path for path, over in replaced.items() if not over]
        return len(sink.delete_unnamed(self._folder, named, epoch=epoch, kept=kept))

    def add(self, settled: pa.Table, *, version: int) -> None:
        """Let readers see the files that a settle named, a version of the sink."""
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
        """Delete files of a settle that was refused, or leave it to the next window."""
        if self._folder is None or not staged.num_rows:
            return
        try:
            # Asked again: a refusal may answer the repetition of a settle that had its effect.
            named = self._verbs.sink_files(self._group)["path"].to_pylist()
            delete_staged(self._folder, staged, named=named)
        except RocketMQError as error:
            logger.warning("staged files kept group=%s why=%s", self._group, error)
