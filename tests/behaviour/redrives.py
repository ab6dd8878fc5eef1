"""Redriving by offset, for the tests of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from rmq_pipeline import schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint

OUTCOMES = "SELECT message_id, outcome, first_outcome FROM redrives ORDER BY dead_letter_offset"


def places(*offsets: int) -> pa.Table:
    """Dead letters of a group, by their offsets."""
    return pa.table([[0] * len(offsets), offsets], schema=schema.DEAD_LETTER)


def redrive(endpoint: Endpoint, group: str, *offsets: int, redrive_id: str = "r-1") -> list[str]:
    answer = endpoint.broker.redrive(group, places(*offsets), redrive_id=redrive_id)
    assert answer.schema.equals(schema.REDRIVEN)
    assert answer["queue_offset"].to_pylist() == list(offsets)
    outcomes: list[str] = answer["outcome"].to_pylist()
    return outcomes


def bodies(received: pa.Table) -> list[bytes]:
    found: list[bytes] = received["body"].to_pylist()
    return found
