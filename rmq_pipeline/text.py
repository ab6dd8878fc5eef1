"""Valid texts: DuckDB and the commit log accept UTF-8 only."""


def is_text(value: object) -> bool:
    """Return True if the value is a text without lone surrogates, which UTF-8 cannot encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def speakable(said: str) -> str:
    """Return the text with lone surrogates escaped; names of files may contain some."""
    return said.encode(errors="backslashreplace").decode()


def said_by(error: BaseException) -> str:
    """Return the text of an error as valid UTF-8; empty if its ``str`` raises."""
    try:
        return speakable(str(error))
    except Exception:  # noqa: BLE001 - a foreign error's str() may raise anything
        return ""
