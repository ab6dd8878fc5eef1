"""Failures of deliveries: the reason, and a signature that similar failures share."""

import json
import re
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Final, Self

from rmq_pipeline import limits

#: The parts in which similar failures differ, the longest forms first.
_PARTICULAR: Final = re.compile(
    r"""
    '[^'\n]*' | "[^"\n]*" | `[^`\n]*`                                  # quoted texts
    | \b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b         # UUIDs
    | \b0[xX][0-9a-fA-F]+\b                                            # addresses
    | \b(?=[a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b                            # hashes and ids in hex
    | [0-9]+(?:[.,:][0-9]+)*                                           # numbers and times
    """,
    re.VERBOSE,
)
_SIGNATURE_BYTES: Final = 6


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failure of a message; a text is empty if the consumer gave none."""

    reason: str = ""
    #: The class of the error, or the consumer's own name for the kind of failure.
    error_type: str = ""
    #: 12 hex digits, the same for failures that differ only in numbers, ids and quoted texts.
    signature: str = ""
    #: The run that reported the failure.
    run_id: str = ""
    #: Where the error was raised; of similar failures in a batch only the first has it.
    traceback: str = ""

    @classmethod
    def of(
        cls,
        reason: str | None,
        *,
        error_type: str | None = "",
        run_id: str | None = "",
        traceback: str | None = "",
    ) -> Self:
        """Return a failure with its signature; cuts a long reason, and a traceback in front."""
        said = (reason or "")[: limits.REASON_LENGTH]
        kind = (error_type or "")[: limits.REASON_LENGTH]
        where = (traceback or "")[-limits.TRACEBACK_LENGTH :]
        return cls(said, kind, signature_of(said, error_type=kind), run_id or "", where)

    @classmethod
    def unsaid(cls) -> Self:
        """Return the failure of a message whose leases ran out without a reported reason."""
        return cls.of("no attempt left")

    def of_follower(self) -> Self:
        """Return the failure of a later message of the group, dead-lettered with this one."""
        said = f"an earlier message of its group failed: {self.reason}"
        return replace(self, reason=said, traceback="")

    def to_json(self) -> str:
        """Return the JSON for events and tables."""
        return json.dumps({name: text for name, text in asdict(self).items() if text})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the failure from the result of ``to_json``; an empty one from an empty text."""
        return cls(**json.loads(text)) if text else cls()


def signature_of(reason: str, *, error_type: str) -> str:
    """Return the signature of a failure: 12 hex digits that similar failures share."""
    alike = f"{error_type}\n{_PARTICULAR.sub('#', reason)}"
    return blake2b(alike.encode(), digest_size=_SIGNATURE_BYTES).hexdigest()
