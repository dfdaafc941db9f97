"""When an output is right.

1. Any text is the same as itself, for every checker; 2. white space at the end of lines and of the text is free, line
ends are not; 3. numbers within the tolerance are the same, unless a whole one is expected, others not, and what is not
finite never; 4. any JSON value is the same as itself, and not as one with a leaf changed; 5. a truth value is no
number, a text no number; 6. data nested as deep as can be is compared all the same; 7. a verdict's reward is a number
from 0 to 1, whatever.
"""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.judge import CaseVerdict, CloseNumbers, Exact, Outcome, SameLines, Verdict

CHECKERS = [Exact(), SameLines(), CloseNumbers()]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_a_text_is_itself(text: str) -> None:
    assert all(checker.accepts_text(text.encode(), text) for checker in CHECKERS)


@given(value=JSON)
def test_a_value_is_itself(value: object) -> None:
    again = json.loads(json.dumps(value))
    assert all(checker.accepts_data(again, value) for checker in CHECKERS)


@given(value=JSON)
def test_a_changed_leaf_is_seen(value: object) -> None:
    assert not any(checker.accepts_data([value, "a"], [value, "b"]) for checker in CHECKERS)
    assert not any(checker.accepts_data({"key": value}, {"key": [value]}) for checker in CHECKERS)


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        (b"1 2\r\n", "1 2", True),
        (b"1\t2  \n\n\n", "1 2\n", True),
        (b" 1 2", "1 2", True),
        (b"1\n2", "1 2", False),
        (b"12", "1 2", False),
        (b"\n1", "1", False),
        (b"1", "1.0", False),
        (b"", "", True),
        (b"\xff", "\ufffd", False),
    ],
)
def test_white_space(output: bytes, expected: str, is_same: bool) -> None:
    assert SameLines().accepts_text(output, expected) is is_same


@pytest.mark.parametrize(
    ("output", "expected", "is_close"),
    [
        (b"1.0000001 yes", "1.0 yes", True),
        (b"1.1", "1.0", False),
        (b"1000000.5", "1e6", True),
        (b"1000000006.5", "1000000007", False),  # a whole number must be met
        (b"1000000007.0", "1000000007", True),
        (b"0." + b"1" * 10_000, "0.11111111", False),
        (b"nan", "nan", True),  # the same word
        (b"nan", "1", False),
        (b"inf", "1e308", False),
        (b"1 2", "1", False),
        (b"1\n2", "1 2", False),
        (b"1_0", "10", False),
    ],
)
def test_close_numbers(output: bytes, expected: str, is_close: bool) -> None:
    assert CloseNumbers().accepts_text(output, expected) is is_close


@pytest.mark.parametrize(
    ("result", "expected"),
    [(True, 1), (1, True), ("1", 1), (None, 0), ([], None), ([1, 2], [1]), ({"a": 1}, {"b": 1}), ([[1]], [1])],
)
def test_what_looks_alike_is_not_the_same(result: object, expected: object) -> None:
    assert not any(checker.accepts_data(result, expected) for checker in CHECKERS)


def test_numbers_in_data_may_differ_by_a_little() -> None:
    assert CloseNumbers().accepts_data({"x": [1.0000001]}, {"x": [1.0]})
    assert not CloseNumbers().accepts_data({"x": [1.0000001]}, {"x": [1]})
    assert CloseNumbers(whole_too=True).accepts_data({"x": [1.0000001]}, {"x": [1]})
    assert not SameLines().accepts_data([1.0000001], [1])
    assert not CloseNumbers().accepts_data([10**400], [1.0])


def test_deep_data_is_compared() -> None:
    deep, other = [1], [2]
    for _ in range(50_000):
        deep, other = [deep], [other]
    assert Exact().accepts_data(deep, deep)
    assert not Exact().accepts_data(deep, other)


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
def test_a_tolerance_that_is_none_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        CloseNumbers(absolute=tolerance)


@given(scores=st.lists(st.floats(0, 1), min_size=1), outcome=st.sampled_from(Outcome))
def test_a_reward_is_finite_and_bounded(scores: list[float], outcome: Outcome) -> None:
    verdict = Verdict(cases=tuple(CaseVerdict(outcome=outcome, score=score) for score in scores))
    assert 0.0 <= verdict.partial_reward <= 1.0
    assert verdict.reward == float(outcome is Outcome.PASSED)


@pytest.mark.parametrize("score", [math.nan, math.inf, -0.1, 1.1])
def test_a_score_beyond_its_bounds_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        CaseVerdict(outcome=Outcome.PASSED, score=score)
