"""The table of unsettled messages against a dict that does the same, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from rmq_pipeline.broker.state.lease_table import LeaseTable


@pytest.mark.parametrize("seed", range(20))
def test_any_history_leaves_the_rows_that_a_dict_would_have(seed: int) -> None:
    random = np.random.default_rng(seed)
    table, model = LeaseTable(), dict[int, int]()
    head = 0

    for step in range(1, 200):
        known = np.array(sorted(model), dtype=np.int64)
        again = random.choice(known, min(len(known), 5), replace=False)
        fresh = np.arange(head, head + random.integers(0, 150), random.integers(1, 4))
        offsets = np.unique(np.concatenate([again, fresh]))
        if len(offsets):
            lease(table, offsets, step=step)
            model.update(dict.fromkeys(offsets.tolist(), step))
            head = max(head, int(offsets[-1]) + 1)
        gone = settled(np.array(sorted(model), dtype=np.int64), random)
        table.remove(table.find(gone))
        for offset in gone.tolist():
            del model[offset]

        every = np.arange(head)
        rows = table.find(every)
        found = {o: int(table.attempt[r]) for o, r in enumerate(rows.tolist()) if r >= 0}
        assert found == model
        assert len(table) == len(model)
        assert table.first_offset() == min(model, default=None)


def settled(offsets: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Some of them: mostly all but a few in front, as beside a group that is held."""
    if random.random() < 0.6:
        return offsets[random.integers(0, 10) :]
    return offsets[random.random(len(offsets)) < random.random()]


def lease(table: LeaseTable, offsets: np.ndarray, *, step: int) -> None:
    n = len(offsets)
    table.upsert(
        offsets,
        attempt=np.full(n, step, np.int32),
        visible_at=np.full(n, step, np.int64),
        delivery=np.full(n, 1, np.int64),
        epoch=np.zeros(n, np.int64),
        attempt_id_hash=np.zeros(n, np.int64),
        group=np.ones(n, np.int64),
    )
