"""Why a delivery failed: what was said, and a signature that alike failures share."""

import json
import re
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Final, Self

from rmq_pipeline import limits

#: What differs between failures that are alike, the longest forms first.
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
    """The last failure of a message; texts are empty where nobody said."""

    reason: str = ""
    #: The class of the error, or what else the consumer calls the kind of failure.
    error_type: str = ""
    #: 12 hex digits, the same for failures that differ in numbers, ids and quoted texts only.
    signature: str = ""
    #: The run that saw it.
    run_id: str = ""

    @classmethod
    def of(
        cls, reason: str | None, *, error_type: str | None = "", run_id: str | None = ""
    ) -> Self:
        """A failure with its signature; a long reason is cut."""
        said = (reason or "")[: limits.REASON_LENGTH]
        kind = (error_type or "")[: limits.REASON_LENGTH]
        return cls(said, kind, signature_of(said, error_type=kind), run_id or "")

    @classmethod
    def unsaid(cls) -> Self:
        """The failure of a message whose deliveries ended without a word."""
        return cls.of("no attempt left")

    def of_follower(self) -> Self:
        """That of a message that follows, when its message group is given up: alike to this one."""
        return replace(self, reason=f"an earlier message of its group failed: {self.reason}")

    def to_json(self) -> str:
        """As events and tables keep it."""
        return json.dumps({name: text for name, text in asdict(self).items() if text})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``to_json`` wrote; nothing said, of an empty text."""
        return cls(**json.loads(text)) if text else cls()


def signature_of(reason: str, *, error_type: str) -> str:
    """What the failures that are alike have in common, as 12 hex digits."""
    alike = f"{error_type}\n{_PARTICULAR.sub('#', reason)}"
    return blake2b(alike.encode(), digest_size=_SIGNATURE_BYTES).hexdigest()
