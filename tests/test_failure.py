"""Alike failures have one signature."""

import pytest

from rmq_pipeline import limits
from rmq_pipeline.failure import Failure, signature_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("row 17 of 200 is bad", "row 3 of 9000 is bad"),
        ("KeyError: 'N14228'", "KeyError: 'N24211'"),
        ('no plane "N14228"', 'no plane "N2"'),
        ("<object at 0x7f3a10>", "<object at 0x55c1ff>"),
        (
            "run 6f1c2f9e-0d3b-4f53-9d0b-0a8f4f0d8c11 died",
            "run 1b4e28ba-2fa1-11d2-883f-0016d3cca427 died",
        ),
        ("message 01000C29A3B5D11F2E05 is gone", "message AF03AC29A3B5D11F2E05 is gone"),
        ("at 2013-01-01T09:00:00.5 late", "at 2014-12-31T10:11:12.25 late"),
    ],
)
def test_failures_that_differ_in_particulars_are_alike(one: str, other: str) -> None:
    assert signature_of(one, error_type="E") == signature_of(other, error_type="E")


@pytest.mark.parametrize(
    ("one", "other"),
    [("no engine", "no crew"), ("defaced cafe", "defaced"), ("it's late, isn't it", "it's early")],
)
def test_failures_that_differ_in_words_are_not_alike(one: str, other: str) -> None:
    assert signature_of(one, error_type="E") != signature_of(other, error_type="E")


def test_failures_of_two_error_types_are_not_alike() -> None:
    assert signature_of("bad", error_type="E") != signature_of("bad", error_type="F")


def test_a_signature_is_twelve_hex_digits_and_stays_the_same() -> None:
    assert signature_of("no engine 7", error_type="EngineError") == "1beaf357920f"


def test_a_failure_survives_json() -> None:
    failure = Failure.of("no engine", error_type="EngineError", run_id="run-1")

    assert Failure.from_json(failure.to_json()) == failure
    assert Failure.from_json("") == Failure()


def test_a_long_reason_is_cut() -> None:
    assert len(Failure.of("x" * 1_000_000).reason) == limits.REASON_LENGTH
