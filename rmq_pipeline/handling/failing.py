"""Why a call of the handler failed; and what its message is not to blame for."""

from dataclasses import dataclass
from typing import Final, Self

from rmq_pipeline.text import said_by, speakable

REASON_LENGTH: Final = 1_000
#: What ends whoever called the handler. All else is a failure, whatever it descends from: the panic
#: of a library in Rust, say, is no Exception, and its class cannot be imported. By name, because
#: the one with which Dagster ends a run has no base but BaseException, and nothing here knows of
#: Dagster.
_ENDING: Final = frozenset({"KeyboardInterrupt", "DagsterExecutionInterruptedError"})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed, in texts that the broker can keep."""

    reason: str
    error_type: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure of a call that raised."""
        kind = speakable(type(error).__name__)
        return cls(f"{kind}: {said_by(error)}"[:REASON_LENGTH], kind)


def is_failure(error: BaseException) -> bool:
    """Whether an error is the call's; else somebody ends the run, and is to get through."""
    if isinstance(error, Exception):
        return True
    return not any(kind.__name__ in _ENDING for kind in type(error).__mro__)
