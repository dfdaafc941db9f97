"""The embedded engine's log-probabilities are those of transformers' plain forward, within 1e-4:

- for every kind of model that it serves, in a batch and over prefix hits: heads, biases, ropes, tied and untied
- of rows in buckets; test_interruption.py has more requests than slots, which end at different times
- not renormalised for top-k; sglang/test_contract.py has temperatures, test_parameters.py the rest
- of given tokens, which are scored and not sampled, beside requests under way and while it is paused
And another seed gives other tokens.
"""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from areal_agent.engine.embedded.decoder import bucket_rows
from areal_agent.engine.scoring import ScoringServer
from areal_agent.errors import EngineRejected
from areal_agent.types import GenerateRequest, GenerateResult, PauseMode

TOLERANCE = 1e-4
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 128}


VARIANTS = {
    "qwen3": ("qwen3", {}),
    "qwen3, untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, a window as long as the context": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1},
    ),
    "qwen2, yarn": ("qwen2", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}),
    "llama, untied": ("llama", {"tie_word_embeddings": False}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, its third rope": (
        "llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        },
    ),
    "llama, linear rope": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}),
    "mistral, one head of keys": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral, wide heads of their own": ("mistral", {"sliding_window": 512, "head_dim": 32, "num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", VARIANTS)
async def test_every_kind_of_model(name, make_model, serve, ask, truth):
    family, config = VARIANTS[name]
    folder = make_model(family, seed=3, is_shaken=True, **config)
    requests = [ask(number, prompt_length=3 + 140 * number) for number in range(3)]
    async with serve(folder) as served:
        results = await asyncio.gather(*(served.engine.generate(request) for request in requests))
        turns = [_next_turn(*one) for one in zip(requests, results, strict=True)]
        answers = await asyncio.gather(*(served.engine.generate(turn) for turn in turns))
    assert all(answer.cached_tokens >= 14 for answer in answers)
    for request, result in zip([*requests, *turns], [*results, *answers], strict=True):
        truth(folder).check(request, result)


def _next_turn(request: GenerateRequest, result: GenerateResult) -> GenerateRequest:
    ids = (*request.input_ids, *result.token_ids, 1, 2, 3)
    return replace(request, request_id=f"{request.request_id}-next", input_ids=ids)


async def test_rows_in_buckets(tiny, serve, ask, truth):
    lengths = [300] * 4 + [5] * 28
    assert len(bucket_rows(lengths)) > 1
    requests = [ask(i, prompt_length=length) for i, length in enumerate(lengths)]
    async with serve(tiny, num_slots=32) as served:
        results = await asyncio.gather(*(served.engine.generate(request) for request in requests))
    for request, result in zip(requests, results, strict=True):
        truth(tiny).check(request, result)


def test_buckets_cover_every_row_once():
    for num_rows in (1, 15, 16, 17, 64):
        parts = bucket_rows([1000] + [10] * (num_rows - 1))
        assert parts[0][0] == 0 and parts[-1][1] == num_rows
        assert all(before[1] == after[0] for before, after in pairwise(parts))


async def test_top_k_limits_the_choice_and_not_the_probability(tiny, serve, ask, truth):
    request = ask(4, top_k=3, max_tokens=40)
    async with serve(tiny) as served:
        result = await served.engine.generate(request)
    rows = truth(tiny).distribution([*request.input_ids, *result.token_ids])[len(request.input_ids) - 1 : -1]
    ranks = [int((row > row[token]).sum()) for row, token in zip(rows, result.token_ids, strict=True)]
    assert set(ranks) == {0, 1, 2}
    truth(tiny).check(request, result)


@pytest.mark.parametrize("seeds", [(1, 2), (None, None)])
async def test_other_seed_other_tokens_and_without_one_every_call_draws_anew(seeds, tiny, serve, ask):
    async with serve(tiny) as served:
        first, second = [await served.engine.generate(ask(6, max_tokens=30, seed=seed)) for seed in seeds]
    assert first.token_ids != second.token_ids


async def test_given_tokens_are_scored_beside_requests_and_while_paused(make_model, serve, ask, truth):
    folder = make_model("qwen2", seed=3, is_shaken=True)
    ids = [*ask(5, prompt_length=300).input_ids]
    async with serve(folder) as served:
        answer = await served.under_way(ask(1, max_tokens=8))
        await served.gate.meanwhile(served.engine.pause(PauseMode.IN_PLACE))
        scorer = await ScoringServer.connect(served.engine.base_url)
        assert await scorer.model() == str(folder)
        found = await scorer.score(ids, 6, 0.7)
        whole = await scorer.score(ids, 0, 1.0)
        with pytest.raises(EngineRejected, match="outside the vocabulary of 97"):
            await scorer.score([5, 97], 0, 1.0)
        await scorer.aclose()
        served.gate.open()
        await served.engine.resume()
        truth(folder).check(ask(1, max_tokens=8), await answer)
    assert found == pytest.approx(truth(folder).logprobs(ids[:7], ids[7:], temperature=0.7), abs=TOLERANCE)
    assert whole == pytest.approx(truth(folder).logprobs(ids[:1], ids[1:]), abs=TOLERANCE)
