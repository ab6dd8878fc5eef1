"""TEMPORARY by the lead; the seal helper replaces this file."""


def seal(engine, *, limit_bytes, window):
    return {}
