"""What is a text: DuckDB and the commit log take UTF-8 and nothing else."""


def is_text(value: object) -> bool:
    """Whether it is a text that UTF-8 has a form for: no half of a surrogate pair is in it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
