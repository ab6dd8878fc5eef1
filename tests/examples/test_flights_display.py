"""What the demo says at its end."""

import json

import pytest

from rmq_pipeline.examples.flights.display import Display
from rmq_pipeline.examples.flights.facts import Fact

FACTS = [
    Fact("published", 6_099, 6_099),
    Fact("halves_left_open", 2_400, 1, or_more=True),
    Fact("parked", ["N730MQ", "N1"], ["N730MQ", "N1"]),
    Fact("repairs", {"unpark": "SUCCESS"}, {"unpark": "SUCCESS"}),
]


def lines(told: str) -> list[list[str]]:
    return [line.split() for line in told.splitlines()]


def test_facts_are_told_in_words_and_so_is_that_all_are_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display(as_json=False, total=1)

    display.facts(FACTS, wrong=[], more={"runs": {"seal": {"SUCCESS": 2}, "revive": {}}})

    told = lines(capsys.readouterr().out)
    assert ["published", "6,099", "6,099"] in told
    assert ["halves_left_open", "2,400", "1", "or", "more"] in told
    assert ["parked", "N730MQ,", "N1", "N730MQ,", "N1"] in told
    assert ["repairs", "unpark", "SUCCESS", "unpark", "SUCCESS"] in told
    assert ["runs:", "seal", "(SUCCESS", "2),", "revive", "()"] in told
    assert told[-1][:5] == ["All", "of", "it", "is", "right:"]


def test_what_is_wrong_is_told_and_nothing_is_right_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display(as_json=False, total=1)

    display.facts([Fact("published", 1, 2)], wrong=["published is 1, not 2"], more={})

    told = lines(capsys.readouterr().out)
    assert ["published", "1", "2", "wrong"] in told
    assert told[-1] == ["WRONG", "published", "is", "1,", "not", "2"]


def test_json_has_the_facts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Display(as_json=True, total=1).facts(FACTS, wrong=[], more={"days": 7})

    told = json.loads(capsys.readouterr().out)
    assert told["parked"] == ["N730MQ", "N1"]
    assert (told["published"], told["days"], told["wrong"]) == (6_099, 7, [])
