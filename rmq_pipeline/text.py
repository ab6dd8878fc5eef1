"""What is a text: DuckDB and the commit log take UTF-8 and nothing else."""

import pyarrow as pa


def is_text(value: object) -> bool:
    """Whether it is a text that UTF-8 has a form for: no half of a surrogate pair is in it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def broken_at(texts: pa.Array) -> int | None:
    """The first row of a flat column of texts that is no UTF-8; None where there is none.

    Arrow checks 1,000 texts in 10 µs, but does not tell which is wrong: that is found by halves.
    """
    if _is_sound(texts):
        return None
    low, high = 0, len(texts)
    while high - low > 1:
        middle = (low + high) // 2
        if _is_sound(texts.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _is_sound(texts: pa.Array) -> bool:
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
