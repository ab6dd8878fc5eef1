"""Commit logs that are in a store, too: the log of the broker that leads, and that of a standby."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from typing_extensions import override

from rmq_pipeline.errors import CorruptLogError, LogFencedError, StandbyError, StorageError
from rmq_pipeline.store.log import catching_up, recovery
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.frame import (
    FRAME_BYTES_MAX,
    VERSION,
    crc32,
    fingerprint,
    unpack_frame_header,
)
from rmq_pipeline.store.log.frame_builder import FrameBuilder
from rmq_pipeline.store.log.log_store import Layout, LogStore, Stored
from rmq_pipeline.store.log.replication import Replication


class SharedLog(CommitLog):
    """A log whose files can be compared with its store and completed from it."""

    def __init__(
        self,
        *args: Any,
        store: LogStore,
        answered_alone: bool,
        begins_at: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Prepare the log; ``open`` passes these arguments on.

        Args:
            answered_alone: see ``catching_up.meet``.
            begins_at: position of the first frame of a log without files; None: 0.
        """
        super().__init__(*args, **kwargs)
        self._begins_at = begins_at
        self._store = store
        self._answered_alone = answered_alone

    @property
    @override
    def frame_bytes_max(self) -> int:
        return min(FRAME_BYTES_MAX, self._store.frame_bytes_max)

    @override
    def _new_seed(self) -> int:
        return self._store.seed

    def _recover_files(self, dispatched_position: int) -> None:
        """Recover the files; a log without files begins where the home's copy of the state says."""
        if self._begins_at is not None:
            self.end = self._begins_at
            self._create_first(self._new_seed()).finish()
            dispatched_position = self._begins_at  # the frames up to there come from the store
        super()._recover(dispatched_position)
        self._check_seed()

    def _check_reaches(self, dispatched_position: int) -> None:
        if self.end < dispatched_position:
            raise CorruptLogError(
                f"The copy of the state is at position {dispatched_position}, and the store"
                f" {self._store.address} ends at {self.end}.",
                remedy="Restore the database of log_store from its standby or its backup.",
            )

    def _check_seed(self) -> None:
        if (seed := self._files[0].seed) != self._store.seed:
            raise CorruptLogError(
                f"{self._folder} has another log than {self._store.address}: their seeds are"
                f" {seed} and {self._store.seed}.",
                remedy="Use the store of this home, or an empty home for this store.",
            )

    def _build_from(self, position: int) -> None:
        self.building = FrameBuilder(self.schemas, seed=self._store.seed, start=position)

    def confirmed(self) -> int:
        """Return the position up to which the store surely had the log: the last header says so."""
        for file in reversed(self._files):
            if file.base < self.end:
                header = recovery.ending_at(file, self.end)
                return 0 if header is None else min(header.synced, header.position)
        return self.end

    def stored_at(self, position: int) -> Stored | None:
        """Return position, length and CRC of the frame at a position; None if none begins there."""
        try:
            file = self.file_of(position)
        except LookupError:
            return None
        header = file.frame_at(position)
        if header is None:
            return None
        return Stored(position, header.length, crc32(file.copy(position, position + header.length)))

    def bytes_at(self, frame: Stored) -> bytes:
        """Return the bytes of a frame."""
        return self.file_of(frame.position).copy(frame.position, frame.end)

    def layout_at(self, position: int) -> Layout:
        """Return the layout of the frame at a position, or of the next frame at the end."""
        if position >= self.end:
            return Layout(position, VERSION, fingerprint(self.schemas))
        file = self.file_of(position)
        return Layout(position, file.version, file.fingerprint)

    def pulling(self) -> AbstractContextManager[None]:
        """Mark what ``take_over`` writes as incomplete until the block ends."""
        return recovery.pulling(self._folder, start=self.end)

    def take_over(
        self, position: int, frame: bytes, *, layout: Layout, dsync: bool = False
    ) -> None:
        """Write a frame of the store at the end.

        Args:
            dsync: the frame is on disk when this returns; otherwise ``sync`` puts it there.

        Raises:
            CorruptLogError: it is not the frame of this log at this position.
            HomeFormatError: it has columns that this version does not know.
            StoreFullError: the disk is full.
        """
        header = unpack_frame_header(memoryview(frame), 0, position=position, seed=self._store.seed)
        if header is None or header.length != len(frame) or position != self.end:
            raise CorruptLogError(f"The store has no frame of this log at position {position}.")
        self._build_from(position)
        last = self._files[-1]
        like_last = (last.version, last.fingerprint) == (layout.version, layout.fingerprint)
        if not like_last or position + len(frame) > last.capacity_end:
            self._roll(len(frame), use_reserve=True, layout=layout)
        self._files[-1].write_whole(
            [frame], position=position, length=len(frame), dsync=dsync, halfway=None
        )
        self.end += len(frame)

    def cut(self, position: int) -> None:
        """Drop the frames of the last file from a position on.

        Raises:
            CorruptLogError: the position is in an older file.
        """
        if position < self._files[-1].base:
            raise CorruptLogError(f"Position {position} is not in the last file of the log.")
        # The mark first: with an older end it would claim that answered frames are missing.
        self._mark.write(position)
        self._mark.sync()
        self._files[-1].zero(position, self.end)
        self.end = self.synced = position


class LeadingLog(SharedLog):
    """The log of the broker that leads: each frame goes to the files and to the store."""

    def __init__(self, *args: Any, replication: Replication, **kwargs: Any) -> None:
        """Prepare the log.

        Args:
            replication: to the store, which this broker leads.
        """
        super().__init__(*args, store=replication.store, **kwargs)
        self._replication = replication
        self.gather_s = replication.gather_s

    @override
    def _recover(self, dispatched_position: int) -> None:
        """Recover the files, and make them and the store the same.

        Raises:
            LogStoreError: the store does not answer.
            LogFencedError: another broker leads.
        """
        self._recover_files(dispatched_position)
        failed_from = self._replication.begin_meeting()
        try:
            end = catching_up.meet(
                self,
                self._store,
                failed_from=failed_from,
                answered_alone=self._answered_alone,
                dispatched=dispatched_position,
            )
        except LogFencedError as error:
            self._replication.fence(error)
            raise
        self._check_reaches(dispatched_position)
        self._build_from(end)
        self._replication.go_on(end)

    @override
    def write(self, taken: FrameBuilder) -> None:
        super().write(taken)
        if not taken.length:
            self._replication.check()

    @override
    def _put(self, taken: FrameBuilder) -> None:
        """Write a frame to the store and to the file; both get the same bytes."""
        data = b"".join(taken.buffers(synced=min(self.synced, self._replication.confirmed)))
        try:
            self._replication.write(
                taken.start,
                data,
                local=lambda: self._put_locally([data], position=taken.start, length=len(data)),
            )
        except (LogFencedError, StorageError) as error:
            self._broken = error.message
            raise


class StoredFrame(NamedTuple):
    """A frame of the store with all that a home needs to take it over."""

    stored: Stored
    data: bytes
    layout: Layout


class FollowingLog(SharedLog):
    """The log of a standby: it takes over the frames of the broker that leads, and no others."""

    @override
    def _recover(self, dispatched_position: int) -> None:
        """Recover the files, and take over what they lack.

        Raises:
            DivergedLogError: the files have frames that were answered and the store lacks.
            LogStoreError: the store does not answer.
        """
        self._recover_files(dispatched_position)
        end = catching_up.follow(
            self,
            self._store,
            answered_alone=self._answered_alone,
            dispatched=dispatched_position,
        )
        self._check_reaches(dispatched_position)
        self._build_from(end)

    def check_open(self) -> None:
        """Check that the log is open.

        Raises:
            StorageError: it is closed, or has failed.
        """
        self._check()

    def append(self, frames: Sequence[StoredFrame]) -> None:
        """Write the next frames of the store; ``publish`` lets dispatch read them.

        A frame is on disk before the next one is written, because that one's header says so.

        Raises:
            CorruptLogError, HomeFormatError, StoreFullError: see ``take_over``.
            StorageError: the disk failed.
        """
        try:
            for stored, data, layout in frames:
                self.take_over(stored.position, data, layout=layout, dsync=True)
        except OSError as error:
            raise self._break("Writing to the commit log", error) from error
        self._build_from(self.end)

    def publish(self) -> None:
        """Let dispatch read what ``append`` has written, once the state has it."""
        self.synced = self.end

    @override
    def make_room(self, *, frame_bytes: int, use_reserve: bool) -> None:
        """Refuse every frame of this broker's own.

        Raises:
            StandbyError: always.
        """
        raise StandbyError
