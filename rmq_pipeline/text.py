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


def speakable(said: str) -> str:
    """The same as such a text: half characters, as names of files may hold, are spelt out."""
    return said.encode(errors="backslashreplace").decode()


def said_by(error: BaseException) -> str:
    """What an error says, as such a text; nothing where it cannot say it."""
    try:
        return speakable(str(error))
    except Exception:  # noqa: BLE001 - the str() of anybody's error may raise anything
        return ""
