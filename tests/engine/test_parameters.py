"""Every sampling parameter of the embedded engine does what a plain torch computation of its definition does:

- frequency, presence and repetition penalty, logit bias: the log-probability of every sampled token, alone and
  together; greedy takes the best adjusted token, with its log-probability at temperature 1
- min-p keeps the right tokens, and does not renormalise
- the likeliest tokens are those of the adjusted, temperature-scaled distribution, also under top-k
- `min_tokens` counts all tokens of an answer, also those before an interruption
- none of it depends on the batch, affects other rows, or is lost in an interruption
"""

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
import torch

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
async def test_logprobs_are_those_of_the_definition(name, tiny, serve, ask, truth):
    request = ask(1, max_tokens=50, **PARAMETERS[name])
    async with serve(tiny) as served:
        result = await served.engine.generate(request)
    expected = of_sampled(distribution(truth(tiny).model, request, result), result)
    assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)
    plain = truth(tiny).logprobs(request.input_ids, result.token_ids, request.sampling.temperature)
    assert result.logprobs != pytest.approx(plain, abs=TOLERANCE)


async def test_greedy_takes_the_best_adjusted_token(tiny, serve, ask, truth):
    request = ask(2, max_tokens=30, temperature=0.0, **PARAMETERS["repetition"])
    async with serve(tiny) as served:
        result = await served.engine.generate(request)
    rows = distribution(truth(tiny).model, request, result)  # at temperature 1
    assert list(result.token_ids) == rows.argmax(dim=-1).tolist()
    assert result.logprobs == pytest.approx(of_sampled(rows, result), abs=TOLERANCE)


async def test_min_p_limits_the_choice_and_not_the_probability(tiny, serve, ask, truth):
    request = ask(4, max_tokens=120, min_p=0.2)
    async with serve(tiny) as served:
        result = await served.engine.generate(request)
        free = await served.engine.generate(ask(4, max_tokens=120))
    rows = distribution(truth(tiny).model, request, result)
    share = rows.exp().gather(1, torch.tensor(result.token_ids)[:, None])[:, 0] / rows.exp().amax(dim=-1)
    assert float(share.min()) > 0.2 - TOLERANCE
    assert result.logprobs == pytest.approx(of_sampled(rows, result), abs=TOLERANCE)
    free_rows = truth(tiny).distribution([*request.input_ids, *free.token_ids])[len(request.input_ids) - 1 : -1]
    assert min(p - float(row.max()) for p, row in zip(free.logprobs, free_rows, strict=True)) < -1.61  # log 0.2


@pytest.mark.parametrize("extra", [{}, {"top_k": 2}, PARAMETERS["all, and a temperature"]], ids=str)
async def test_the_likeliest_tokens(extra, tiny, serve, ask, truth):
    request = dataclasses.replace(ask(5, max_tokens=20, **extra), num_top_logprobs=4)
    async with serve(tiny) as served:
        result = await served.engine.generate(request)
    best = distribution(truth(tiny).model, request, result).topk(4, dim=-1)
    assert [[id_ for id_, _ in top] for top in result.top_logprobs] == best.indices.tolist()
    told = [logprob for top in result.top_logprobs for _, logprob in top]
    assert told == pytest.approx(best.values.flatten().tolist(), abs=TOLERANCE)


async def test_each_request_gets_as_many_of_the_likeliest_as_it_asks_for(tiny, serve, ask):
    requests = [dataclasses.replace(ask(i), num_top_logprobs=number) for i, number in enumerate([0, 3, 1])]
    async with serve(tiny) as served:
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


async def test_penalties_remember_what_was_sampled_before_an_interruption(tiny, serve, ask, truth):
    request = ask(6, max_tokens=40, **PARAMETERS["all, and a temperature"])
    async with serve(tiny) as served:
        answer = await served.under_way(request, num_steps=12)
        await served.interrupt(PauseMode.RETRACT)
        result = await answer
    expected = of_sampled(distribution(truth(tiny).model, request, result), result)
    assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_min_tokens_counts_what_was_sampled_before_an_interruption(tiny, serve, ask):
    async with serve(tiny) as served:
        answer = await served.under_way(ask(7, min_tokens=8, stop_token_ids=(3,), logit_bias=((3, 90.0),)))
        await served.interrupt(PauseMode.RETRACT)
        result = await answer
    assert result.token_ids.index(3) == 8 == len(result.token_ids) - 1
