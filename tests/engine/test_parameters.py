"""Every sampling parameter of the embedded engine does what a plain torch computation of its definition does:

- frequency, presence and repetition penalty, logit bias: the log-probability of every sampled token, alone and
  together; greedy takes the best adjusted token, with its log-probability at temperature 1
- min-p keeps the right tokens, and does not renormalise
- the likeliest tokens are those of the adjusted, temperature-scaled distribution, also under top-k
- `min_tokens` counts all tokens of an answer, also those before an interruption
- none of it depends on the batch, affects other rows, or is lost in an interruption

The embedded engine's log-probabilities are those of transformers' plain forward, within 1e-4:

- for every kind of model that it serves, in a batch and over prefix hits: heads, biases, ropes, tied and untied
- of rows in buckets; test_interruption.py has more requests than slots, sglang/test_contract.py temperatures
- of given tokens, which are scored and not sampled, beside requests under way and while it is paused
- another seed gives other tokens
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from areal_agent.engine.embedded.decoder import bucket_rows
from areal_agent.engine.scoring import ScoringServer
from areal_agent.errors import EngineRejected
from areal_agent.types import GenerateRequest, GenerateResult, PauseMode

TOLERANCE = 1e-4


def adjusted(model, request: GenerateRequest, sampled: Sequence[int]) -> torch.Tensor:
    """The logits `[C, V]` from which each token is drawn, computed from the definitions one token at a time."""
    params, prompt = request.sampling, list(request.input_ids)
    with torch.no_grad():
        rows = model(torch.tensor([[*prompt, *sampled]])).logits[0][len(prompt) - 1 : -1].clone()
    for index, row in enumerate(rows):
        generated = list(sampled[:index])
        for token in set(generated):
            row[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
        for token in {*prompt, *generated}:
            row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
        for token, bias in params.logit_bias:
            row[token] += bias
    return rows


def distribution(model, request: GenerateRequest, result: GenerateResult) -> torch.Tensor:
    logits = adjusted(model, request, result.token_ids)
    return torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)


def of_sampled(rows: torch.Tensor, result: GenerateResult) -> list[float]:
    return rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0].tolist()


PARAMETERS = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "negative": {"frequency_penalty": -0.5, "presence_penalty": -0.3},
    "repetition": {"repetition_penalty": 1.6},
    "encouraged repetition": {"repetition_penalty": 0.7},
    "bias": {"logit_bias": ((3, 4.0), (50, -100.0), (96, 2.5))},
    "all, and a temperature": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": ((7, 3.0), (8, 3.0)),
        "temperature": 0.8,
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
async def test_logprobs_are_those_of_the_definition(name, tiny, served, ask, truth):
    request = ask(1, max_tokens=50, **PARAMETERS[name])
    result = await served.engine.generate(request)
    expected = of_sampled(distribution(truth(tiny).model, request, result), result)
    assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)
    plain = truth(tiny).logprobs(request.input_ids, result.token_ids, request.sampling.temperature)
    assert result.logprobs != pytest.approx(plain, abs=TOLERANCE)


async def test_greedy_takes_the_best_adjusted_token(tiny, served, ask, truth):
    request = ask(2, max_tokens=30, temperature=0.0, **PARAMETERS["repetition"])
    result = await served.engine.generate(request)
    rows = distribution(truth(tiny).model, request, result)  # at temperature 1
    assert list(result.token_ids) == rows.argmax(dim=-1).tolist()
    assert result.logprobs == pytest.approx(of_sampled(rows, result), abs=TOLERANCE)


async def test_min_p_limits_the_choice_and_not_the_probability(tiny, served, ask, truth):
    request = ask(4, max_tokens=120, min_p=0.2)
    result = await served.engine.generate(request)
    free = await served.engine.generate(ask(4, max_tokens=120))
    rows = distribution(truth(tiny).model, request, result)
    share = rows.exp().gather(1, torch.tensor(result.token_ids)[:, None])[:, 0] / rows.exp().amax(dim=-1)
    assert float(share.min()) > 0.2 - TOLERANCE
    assert result.logprobs == pytest.approx(of_sampled(rows, result), abs=TOLERANCE)
    free_rows = truth(tiny).distribution([*request.input_ids, *free.token_ids])[len(request.input_ids) - 1 : -1]
    assert min(p - float(row.max()) for p, row in zip(free.logprobs, free_rows, strict=True)) < -1.61  # log 0.2


@pytest.mark.parametrize("extra", [{}, {"top_k": 2}, PARAMETERS["all, and a temperature"]], ids=str)
async def test_the_likeliest_tokens(extra, tiny, served, ask, truth):
    request = dataclasses.replace(ask(5, max_tokens=20, **extra), num_top_logprobs=4)
    result = await served.engine.generate(request)
    best = distribution(truth(tiny).model, request, result).topk(4, dim=-1)
    assert [[id_ for id_, _ in top] for top in result.top_logprobs] == best.indices.tolist()
    told = [logprob for top in result.top_logprobs for _, logprob in top]
    assert told == pytest.approx(best.values.flatten().tolist(), abs=TOLERANCE)


async def test_each_request_gets_as_many_of_the_likeliest_as_it_asks_for(served, ask):
    requests = [dataclasses.replace(ask(i), num_top_logprobs=number) for i, number in enumerate([0, 3, 1])]
    results = await asyncio.gather(*(served.engine.generate(request) for request in requests))
    assert [{len(top) for top in result.top_logprobs} for result in results] == [set(), {3}, {1}]
    assert [len(result.top_logprobs) for result in results] == [0, 12, 12]


async def test_whoever_else_is_in_the_batch(tiny, serve, ask):
    requests = [ask(40 + i, prompt_length=5 + i, max_tokens=30 + i, **p) for i, p in enumerate(PARAMETERS.values())]
    requests += [ask(20, max_tokens=40), ask(21, max_tokens=35, min_p=0.1)]
    async with serve(tiny, num_slots=4) as served:
        alone = [await served.engine.generate(request) for request in requests]
        together = await asyncio.gather(*(served.engine.generate(request) for request in requests))
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]


async def test_penalties_remember_what_was_sampled_before_an_interruption(tiny, served, ask, truth):
    request = ask(6, max_tokens=40, **PARAMETERS["all, and a temperature"])
    answer = await served.under_way(request, num_steps=12)
    await served.interrupt(PauseMode.RETRACT)
    result = await answer
    expected = of_sampled(distribution(truth(tiny).model, request, result), result)
    assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_min_tokens_counts_what_was_sampled_before_an_interruption(served, ask):
    answer = await served.under_way(ask(7, min_tokens=8, stop_token_ids=(3,), logit_bias=((3, 90.0),)))
    await served.interrupt(PauseMode.RETRACT)
    result = await answer
    assert result.token_ids.index(3) == 8 == len(result.token_ids) - 1


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


@pytest.mark.parametrize("seeds", [(1, 2), (None, None)])
async def test_other_seed_other_tokens_and_without_one_every_call_draws_anew(seeds, served, ask):
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
