"""The contract of an engine, in front of the embedded engine and (slow) of a real SGLang server:

- tokens in, tokens out, with the log-probabilities that transformers computes, versions and finish reasons
- end tokens: those of the request and of the model, none before `min_tokens`, the model's not with `ignore_eos`
- the joined chunks are the result; the likeliest tokens come when asked for
- given tokens are scored, as a teacher's server is asked to
- an abort ends the named request, and none whose id begins with its id; it works during a pause
- a cancelled call leaves nothing behind in the server
- the server is healthy while paused, in every mode
- requests that would end the server are refused before they are sent
"""

import asyncio

import pytest
import torch

from areal_agent.engine.scoring import ScoringServer
from areal_agent.errors import EngineRejected
from areal_agent.types import FinishReason, PauseMode, VersionSpan

from .conftest import END, Watched, until_one_waits

TOLERANCE = 1e-4
LONG = 3000  # tokens: a request that is still under way when a test gets to it


async def test_logprobs_are_those_of_transformers(stage, ask, truth):
    request = ask(1, max_tokens=24)
    result = await stage.engine.generate(request)
    assert len(result.token_ids) == 24 and result.finish_reason is FinishReason.LENGTH
    assert result.logprobs == pytest.approx(
        truth(stage.model).logprobs(request.input_ids, result.token_ids), abs=TOLERANCE
    )
    assert result.versions == (VersionSpan(version=stage.old, start=0, end=24),)


async def test_logprobs_are_after_temperature(stage, ask, truth):
    request = ask(2, max_tokens=12, temperature=0.7)
    result = await stage.engine.generate(request)
    expected = truth(stage.model).logprobs(request.input_ids, result.token_ids, temperature=0.7)
    assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_a_stop_token_ends_an_answer_and_is_in_it(stage, ask):
    whole = await stage.engine.generate(ask(3, temperature=0.0, max_tokens=20))
    stop = whole.token_ids[7]
    cut = await stage.engine.generate(ask(3, temperature=0.0, max_tokens=20, stop_token_ids=(stop,)))
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


async def test_given_tokens_are_scored(stage, ask, truth):
    ids = list(ask(4).input_ids) * 5
    scorer = await ScoringServer.connect(stage.engine.base_url)
    found = [await scorer.score(ids, start, 1.0) for start in (0, 20, 20)]  # the last one finds its prefix cached
    assert await scorer.model() == str(stage.model)
    await scorer.aclose()
    expected = truth(stage.model).logprobs(ids[:1], ids[1:])
    assert found[0] == pytest.approx(expected, abs=TOLERANCE)
    assert found[1] == found[2] == pytest.approx(expected[20:], abs=TOLERANCE)


STOP = 3
LIKELY = 90.0  # a bias that leaves no other token a chance


async def test_the_end_token_of_the_model_ends_an_answer_and_is_in_it(stage, ask):
    result = await stage.engine.generate(ask(16, logit_bias=((END, LIKELY),)))
    assert (result.token_ids, result.finish_reason) == ((END,), FinishReason.STOP)


async def test_an_end_token_that_is_ignored_is_in_the_answer_and_the_next_one_is_sampled(stage, ask):
    result = await stage.engine.generate(ask(17, max_tokens=5, ignore_eos=True, logit_bias=((END, LIKELY),)))
    assert (result.token_ids, result.finish_reason) == ((END,) * 5, FinishReason.LENGTH)


@pytest.mark.parametrize("end", [STOP, END])
async def test_no_end_token_is_sampled_before_min_tokens(stage, ask, truth, end):
    request = ask(18, max_tokens=20, min_tokens=5, stop_token_ids=(STOP,), logit_bias=((end, LIKELY),))
    result = await stage.engine.generate(request)
    assert len(result.token_ids) == 6 and result.finish_reason is FinishReason.STOP
    assert result.token_ids[-1] == end and not {STOP, END} & set(result.token_ids[:-1])
    rows = truth(stage.model).distribution([*request.input_ids, *result.token_ids[:-2]])[-5:]
    rows[:, [STOP, END]] = float("-inf")
    told = rows.log_softmax(dim=-1).gather(1, torch.tensor(result.token_ids[:5])[:, None])[:, 0].tolist()
    assert result.logprobs[:5] == pytest.approx(told, abs=TOLERANCE)


async def test_a_stop_token_of_the_request_ends_an_answer_that_ignores_the_models(stage, ask):
    request = ask(
        19, max_tokens=LONG, min_tokens=3, ignore_eos=True, stop_token_ids=(STOP,), logit_bias=((STOP, LIKELY),)
    )
    watched = Watched(stage.engine, request)
    result = await watched.answer
    assert len(result.token_ids) == 4 and result.token_ids[-1] == STOP
    assert result.finish_reason is FinishReason.STOP
    assert (tuple(watched.token_ids), tuple(watched.logprobs)) == (result.token_ids, result.logprobs)
    assert result.versions == (VersionSpan(version=stage.old, start=0, end=4),)
    await _until_idle(stage)


async def test_the_likeliest_tokens(stage, ask, truth):
    request = ask(5, max_tokens=4)
    request = type(request)(
        request_id=request.request_id, input_ids=request.input_ids, sampling=request.sampling, num_top_logprobs=3
    )
    result = await stage.engine.generate(request)
    rows = truth(stage.model).distribution([*request.input_ids, *result.token_ids])[len(request.input_ids) - 1 : -1]
    for row, top in zip(rows, result.top_logprobs, strict=True):
        values = row.topk(3).values.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(values, abs=TOLERANCE)


async def test_an_abort_ends_the_request_that_it_names(stage, ask):
    short, longer = ask(6, max_tokens=LONG), ask(7, max_tokens=60)
    named = Watched(stage.engine, _called(short, "job-1"))
    other = asyncio.ensure_future(stage.engine.generate(_called(longer, "job-10")))
    await named.until(3)
    await stage.engine.abort("job-1")
    result = await named.answer
    assert result.finish_reason is FinishReason.ABORT
    assert tuple(named.token_ids) == result.token_ids and 3 <= len(result.token_ids) < LONG
    assert result.versions == (VersionSpan(version=stage.old, start=0, end=len(result.token_ids)),)
    assert len((await other).token_ids) == 60


async def test_an_abort_while_paused_keeps_what_was_handed_out(stage, ask):
    watched = Watched(stage.engine, ask(8, max_tokens=LONG))
    await watched.until(3)
    await stage.engine.pause(PauseMode.RETRACT)
    await stage.engine.abort(ask(8).request_id)
    result = await watched.answer
    assert result.finish_reason is FinishReason.ABORT
    assert tuple(watched.token_ids) == result.token_ids and len(result.token_ids) >= 3
    assert result.versions[-1].end == len(result.token_ids)


async def test_an_abort_of_a_request_that_waits_for_the_end_of_a_pause_is_not_lost(stage, ask):
    await stage.engine.pause(PauseMode.RETRACT)
    waiting = Watched(stage.engine, ask(9, max_tokens=LONG))
    await until_one_waits(stage.engine)
    await stage.engine.abort(ask(9).request_id)
    assert (await waiting.answer).token_ids == ()
    await stage.engine.resume()
    await _until_idle(stage)
    assert len((await stage.engine.generate(ask(10, max_tokens=5))).token_ids) == 5


async def test_a_frozen_request_is_aborted_when_it_goes_on(stage, ask):
    watched = Watched(stage.engine, ask(11, max_tokens=LONG))
    await watched.until(3)
    await stage.engine.pause(PauseMode.IN_PLACE)
    await stage.engine.abort(ask(11).request_id)
    await stage.engine.resume()
    result = await watched.answer
    assert result.finish_reason is FinishReason.ABORT and 3 <= len(result.token_ids) < LONG
    assert tuple(watched.token_ids) == result.token_ids


async def test_a_pause_that_aborts_hands_out_what_there_is(stage, ask):
    watched = Watched(stage.engine, ask(12, max_tokens=LONG))
    await watched.until(3)
    await stage.engine.pause(PauseMode.ABORT)
    result = await watched.answer
    assert result.finish_reason is FinishReason.ABORT and tuple(watched.token_ids) == result.token_ids


async def test_a_cancelled_call_leaves_nothing_behind(stage, ask):
    watched = Watched(stage.engine, ask(13, max_tokens=LONG))
    await watched.until(3)
    watched.answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watched.answer
    await _until_idle(stage)
    assert not stage.engine.requests.by_id


async def test_it_is_healthy_while_paused(stage):
    for mode in PauseMode:
        await stage.engine.pause(mode)
        assert await stage.engine.health(), mode
        await stage.engine.resume()
        assert await stage.engine.health(), mode


async def test_an_id_that_would_end_the_server_is_refused(stage, ask):
    request = ask(14)
    for token_id in (-1, 10_000, 2**40):
        wrong = type(request)(request_id="wrong", input_ids=(5, token_id), sampling=request.sampling)
        with pytest.raises(EngineRejected, match=rf"input_ids\[1\] is {token_id}"):
            await stage.engine.generate(wrong)
    assert len((await stage.engine.generate(request)).token_ids) == 12


async def test_a_prompt_that_is_too_long_is_refused(stage, ask):
    with pytest.raises(EngineRejected, match="exceed the context"):
        await stage.engine.generate(ask(15, prompt_length=4050, max_tokens=100))


async def test_many_requests_at_once(stage, ask):
    results = await asyncio.gather(*(stage.engine.generate(ask(100 + n, max_tokens=8)) for n in range(64)))
    assert [len(result.token_ids) for result in results] == [8] * 64


def _called(request, name: str):
    return type(request)(request_id=name, input_ids=request.input_ids, sampling=request.sampling)


async def _until_idle(stage) -> None:
    """Wait until the server has no request; only the real one tells, the other's tests have seen to it."""
    while stage.is_real and (stats := await stage.engine.stats()).num_running + stats.num_queued:
        pass
