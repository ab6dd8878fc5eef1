"""Failures of handler calls: the reason, and which errors are not failures."""

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from rmq_pipeline import limits
from rmq_pipeline.failure import signature_of
from rmq_pipeline.text import said_by, speakable

REASON_LENGTH: Final = 1_000
#: Errors that end the caller of the handler. Every other error is a failure of the call, even one
#: that is no Exception: the panic of a Rust library, for example, has a class that cannot be
#: imported. They are listed by name, because this module must not import Dagster, and Dagster's
#: error derives directly from BaseException.
_ENDING: Final = frozenset({"KeyboardInterrupt", "DagsterExecutionInterruptedError"})
#: Tracebacks omit the frames of these files, which called the handler.
_HERE: Final = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed, as text that the broker can store."""

    reason: str
    error_type: str
    error: BaseException | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Build the failure of a call that raised."""
        kind = speakable(type(error).__name__)
        return cls(f"{kind}: {said_by(error)}"[:REASON_LENGTH], kind, error)

    @property
    def signature(self) -> str:
        """Key that is equal for similar failures, as the broker computes it."""
        return signature_of(self.reason, error_type=self.error_type)

    def traceback(self) -> str:
        """Return the traceback from the handler on; a long one is cut at the beginning."""
        if self.error is None:
            return ""
        frame = self.error.__traceback__
        while frame is not None and frame.tb_next is not None:
            if not frame.tb_frame.f_code.co_filename.startswith(_HERE):
                break
            frame = frame.tb_next
        try:
            lines = traceback.format_exception(type(self.error), self.error, frame)
        except Exception:  # noqa: BLE001 - formatting a foreign error may raise anything
            return ""
        text = speakable("".join(lines)).strip()
        if len(text) <= limits.TRACEBACK_LENGTH:
            return text
        return f"…{text[1 - limits.TRACEBACK_LENGTH :]}"


def is_failure(error: BaseException) -> bool:
    """Return True if the call has failed; False if the error must end the run."""
    if isinstance(error, Exception):
        return True
    return not any(kind.__name__ in _ENDING for kind in type(error).__mro__)
