"""A frame under construction: staged sections as buffers that one system call can write."""

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.frame import HEADER_BYTES, FrameHeader, SectionHeader
from rmq_pipeline.store.log.log_file import Bytes
from rmq_pipeline.store.log.payload import Payload, bytes_of

#: IOV_MAX: the maximum number of buffers in one system call.
_BUFFERS_MAX: Final = 1024
_PADDING: Final = bytes(HEADER_BYTES)


class FrameBuilder:
    """Collects the sections of the frame that starts at a position."""

    def __init__(self, schemas: Mapping[int, pa.Schema], *, seed: int, start: int) -> None:
        self.start: Final = start
        self._schemas = schemas
        self._seed = seed
        self.clear()

    def following(self) -> "FrameBuilder":
        """Return an empty builder for the next frame."""
        return FrameBuilder(self._schemas, seed=self._seed, start=self.start + self.length)

    def clear(self) -> None:
        """Discard the sections."""
        #: The length of the frame so far; 0 when nothing is staged.
        self.length: int = 0
        self._sections: int = 0
        # The first element is reserved for the frame header. Payloads are not copied.
        self._buffers: list[Bytes] = [b""]

    def stage(self, kind: int, batch: pa.RecordBatch) -> int:
        """Add a section, and return its position.

        Raises:
            ValueError: the batch does not have its kind's schema, or the frame would exceed 1 GiB.
        """
        schema = self._schemas.get(kind)
        if schema is not None and not batch.schema.equals(schema):
            raise ValueError(f"A batch of kind {kind} has another schema: {batch.schema}.")
        return self.stage_payload(kind, (frame.encode(batch, schema),))

    def stage_payload(self, kind: int, payload: Payload) -> int:
        """Add a section that ``frame.encode`` or an equivalent has serialized; return its position.

        Raises:
            ValueError: the frame would exceed 1 GiB.
        """
        position = self.start + (self.length or HEADER_BYTES)
        length, crc = bytes_of(payload), 0
        for piece in payload:
            crc = frame.crc32(piece, crc)
        section = SectionHeader(position, length, kind, crc)
        if section.end - self.start > frame.FRAME_BYTES_MAX:
            raise ValueError("The frame would exceed 1 GiB; commit what is staged first.")
        header = frame.pack_section_header(section, self._seed)
        padding = frame.aligned(length) - length
        self._buffers += (header, *payload, _PADDING[:padding])
        self._sections += 1
        self.length = section.end - self.start
        return position

    def buffers(self, *, synced: int) -> list[Bytes]:
        """Return the frame's bytes; ``synced``: the position up to which the log is on disk."""
        header = FrameHeader(self.start, self.length, synced, self._sections)
        self._buffers[0] = frame.pack_frame_header(header, self._seed)
        # With more buffers than the limit, sections are small on average and cheap to copy.
        many = len(self._buffers) > _BUFFERS_MAX
        return [b"".join(self._buffers)] if many else self._buffers
