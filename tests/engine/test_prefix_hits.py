"""Turns that continue computed ones, with log-probabilities within 1e-4 of transformers' plain forward:

- the next turn of a conversation computes only its new tokens, and reports how many were cached
- siblings that arrive together compute their prompt once
- a swap of weights clears what the old ones computed, also while answers keep their keys (in place)
"""

import asyncio

import pytest

from areal_agent.types import GenerateRequest, PauseMode, SamplingParams, WeightVersion

TOLERANCE = 1e-4
NEW = WeightVersion(step=8)


def request(number: int, ids: tuple[int, ...], max_tokens: int = 10) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return GenerateRequest(request_id=f"turn-{number:04}", input_ids=ids, sampling=sampling)


async def test_a_turn_computes_its_new_tokens_only(tiny, serve, ask, truth):
    async with serve(tiny) as served:
        ids = ask(1, prompt_length=50).input_ids
        first = await served.engine.generate(request(1, ids))
        ids = (*ids, *first.token_ids, *ask(2, prompt_length=7).input_ids)
        second = await served.engine.generate(request(2, ids))
        again = await served.engine.generate(request(3, ids))
    assert first.cached_tokens == 0
    assert second.cached_tokens == 50 + 9, "all but the last sampled token, which never went through the model"
    assert again.cached_tokens == len(ids) - 1, "the last token of a prompt is always computed: it gives the next"
    for result in (second, again):
        assert result.logprobs == pytest.approx(truth(tiny).logprobs(ids, result.token_ids), abs=TOLERANCE)


async def test_siblings_that_arrive_together_compute_their_prompt_once(tiny, schedule, ask, truth):
    ids = ask(1, prompt_length=200).input_ids
    with schedule(tiny) as (scheduler, _):
        scheduler.pause(PauseMode.RETRACT)
        answers = [scheduler.submit(request(number, ids)) for number in range(6)]
        scheduler.resume()
        results = [await asyncio.wrap_future(answer) for answer in answers]
    assert sorted(result.cached_tokens for result in results) == [0, 199, 199, 199, 199, 199]
    for result in results:
        assert result.logprobs == pytest.approx(truth(tiny).logprobs(ids, result.token_ids), abs=TOLERANCE)


async def test_a_swap_forgets_what_was_computed(tiny, other, serve, ask, truth, share):
    ids = ask(1, prompt_length=40).input_ids
    async with serve(tiny) as served:
        await served.engine.generate(request(1, ids))
        await served.engine.update_weights(share(other), NEW)
        result = await served.engine.generate(request(2, ids))
    assert result.cached_tokens == 0
    assert result.logprobs == pytest.approx(truth(other).logprobs(ids, result.token_ids), abs=TOLERANCE)


async def test_keys_of_two_sets_of_weights_are_never_shared(tiny, other, serve, ask, truth, share):
    ids = ask(1, prompt_length=40).input_ids
    async with serve(tiny) as served:
        served.gate.shut()
        mixed = asyncio.create_task(served.engine.generate(request(1, ids, max_tokens=60)))
        await served.gate.steps(10)
        await served.interrupt(PauseMode.IN_PLACE, share(other), NEW)
        ids = (*ids, *(await mixed).token_ids)
        result = await served.engine.generate(request(2, ids))
    assert result.cached_tokens == 0
    assert result.logprobs == pytest.approx(truth(other).logprobs(ids, result.token_ids), abs=TOLERANCE)
