"""Manifests: what they restore, which are kept, and which are damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rmq_pipeline.backup import manifest as deciding
from rmq_pipeline.errors import (
    RequestError,
)


def test_a_damaged_manifest_is_left_out() -> None:
    part = deciding.LogPart(0, 0, 5000, "a")
    whole = replace(made(1, 10, 20), log=(part, replace(part, start=5000, stop=6000)))
    assert deciding.Manifest.parse(whole.content()) == whole

    for log in ((replace(part, start=64),), (part, replace(part, start=5064, stop=6000))):
        with pytest.raises(ValueError, match="hole"):
            deciding.Manifest.parse(replace(whole, log=log).content())
    for wrong in ({"log_end": "x"}, {"log_end": -1}, {"home": 5}):
        with pytest.raises(ValueError, match=r" is "):
            deciding.Manifest.parse(replace(whole, **wrong).content())


def made(number: int, first_ms: int, last_ms: int) -> deciding.Manifest:
    state = deciding.Snapshot(0, first_ms, 0)
    return deciding.Manifest(number, "/home", state, 10, last_ms + 1, None, (), ())


def test_the_newest_backup_of_a_moment_is_chosen() -> None:
    backups = [made(1, 10, 20), made(2, 10, 30), made(3, 40, 50)]

    assert deciding.restorable(backups) == [(10, 30), (40, 50)]
    assert deciding.restorable([*backups, made(4, 51, 60), made(5, 80, 79)]) == [(10, 30), (40, 60)]
    chosen = {at: deciding.chosen(backups, at).number for at in (10, 25, 30, 40, 50)}
    assert chosen == {10: 2, 25: 2, 30: 2, 40: 3, 50: 3}
    assert deciding.chosen(backups, None).number == 3
    for at in (9, 31, 51):
        with pytest.raises(RequestError, match="cannot restore"):
            deciding.chosen(backups, at)


def test_backups_are_kept_by_number_or_by_days() -> None:
    day = 86_400_000
    backups = [made(n, n * day, n * day + 1) for n in range(1, 11)]

    def gone(keep: str) -> list[int]:
        return [each.number for each in deciding.dropped(backups, keep=keep)]

    assert gone("10") == []
    assert gone("3") == [1, 2, 3, 4, 5, 6, 7]
    assert gone("2d") == [1, 2, 3, 4, 5, 6, 7]
    assert gone("1d") == [1, 2, 3, 4, 5, 6, 7, 8]
    for wrong in ("", "0", "-1", "2w", "d", "1.5d"):
        with pytest.raises(RequestError, match="says neither"):
            gone(wrong)
