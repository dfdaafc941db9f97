"""An unpacked turn equals the original, to the last bit of its log-probabilities."""

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.gateway.turn import PackedTurn
from areal_agent.tokens.prompt import packed
from areal_agent.types import Completion, Distribution, FinishReason, SamplingParams
from tests import histories

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
LOGPROBS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(IDS)
    return histories.completion(
        draw(st.text()),
        [3] * len(ids),
        token_ids=ids,
        logprobs=tuple(draw(st.lists(LOGPROBS, min_size=len(ids), max_size=len(ids)))),
        finish_reason=draw(st.sampled_from(FinishReason)),
        distribution=draw(st.sampled_from(Distribution)),
    )


@given(new_prompt_ids=IDS, answers=st.lists(completions(), max_size=3).map(tuple))
def test_unpacked_it_is_the_turn_that_it_was(new_prompt_ids: tuple[int, ...], answers: tuple[Completion, ...]) -> None:
    question, sampling = {"role": "user", "content": "hi"}, SamplingParams(seed=7)
    turn = histories.turn(
        "turn-1", *answers, new_prompt_ids=new_prompt_ids, request_delta=(question,), sampling=sampling
    )
    sampled = [packed(answer.token_ids) for answer in answers]
    assert PackedTurn.of(turn, packed(new_prompt_ids), sampled).unpacked() == turn
