"""When an answer is right:

- the last number of the final message is the answer, and a program printed it
- a number that no program printed, another number, or none earns nothing; nor does part of a number
- signs count
"""

import pytest

from envs.calculator.reward import last_number, score


@pytest.mark.parametrize(
    ("said", "outputs", "earned"),
    [
        ("The answer is 71625.", ["71625"], 1.0),
        ("348 plus 27, times 191: 71625", ["71625\n"], 1.0),
        ("The answer is 71625.", ["SyntaxError: invalid syntax", "71625"], 1.0),
        ("The answer is 71625.", ["the result is 71625"], 1.0),
        ("The answer is 71625.", [], 0.0),
        ("The answer is 71625.", ["71626"], 0.0),
        ("The answer is 71626.", ["71625"], 0.0),
        ("It worked.", ["71625"], 0.0),
        ("", ["71625"], 0.0),
        ("The answer is 171625.", ["71625"], 0.0),
        ("The answer is 716250.", ["71625"], 0.0),
        ("The answer is -71625.", ["-71625"], 0.0),
        ("71625 or 71626", ["71625"], 0.0),
    ],
)
def test_score(said: str, outputs: list[str], earned: float) -> None:
    assert score(said, outputs, "71625") == earned


def test_a_negative_answer() -> None:
    assert score("The answer is -61773.", ["-61773"], "-61773") == 1.0
    assert score("The answer is 61773.", ["-61773"], "-61773") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [("", None), ("none", None), ("-7", "-7"), ("3-7", "7"), ("print(8) -> 8.", "8"), ("0012", "0012")],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number
