"""Surprising answers of vLLM, given by a scripted server, so that each can be had at will:

- a load that fails after the weights have changed: the previous weights are loaded again; if they are unknown here, or
  that fails, too, nothing is sampled; however many loads fail in a row, the previous weights can be loaded again
- the label changes by a call of its own: without a change the push fails, as it does if the cache is not flushed
- a request names the serving weights, so that it never uses keys and values of others
- answers: tokens, versions, aborts, likeliest tokens out of order; a contradictory answer is refused
- it is healthy while its scheduler answers; no call uses a connection that the server may be closing
- a server gets its version when it is started, and one that was started again is known by its label
"""

import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_agent.cluster.servers import wait_until_it_serves
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.errors import EngineUnreachable, WeightUpdateError
from areal_agent.types import FinishReason, PauseMode, VersionSpan, WeightVersion
from areal_agent.weights.channels import DiskChannel
from areal_agent.weights.push import push

from ..sglang.test_odd_answers import (  # noqa: F401
    test_a_label_that_does_not_move_is_no_success,
    test_every_call_has_a_connection_of_its_own,
    test_health_is_that_of_the_scheduler,
    test_nothing_is_sampled_from_weights_that_nobody_knows,
)
from ..transfers import parameters_of
from .scripted import OLD, ScriptedServer, answering, ended, event, spans

NEW, NEXT = WeightVersion(step=4), WeightVersion(step=5)


@pytest.fixture
async def scripted(tiny) -> AsyncGenerator[tuple[ScriptedServer, ForeignEngine]]:
    server = ScriptedServer(str(tiny))
    async with answering(server) as engine:
        yield server, engine


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}


async def test_a_load_that_fails_is_undone(scripted, ask, share, tiny, other):
    server, engine = scripted
    await engine.load(tiny, OLD)
    server.load_statuses, server.events = [500], [event([5], **ended(1))]
    with pytest.raises(WeightUpdateError, match="loaded again"):
        await push([engine], share(other), NEW)
    assert server.loaded[-1] == str(tiny) and server.label == str(OLD)
    assert (await engine.generate(ask(1))).token_ids == (5,)
    await push([engine], share(other), NEW)
    assert server.label == str(NEW)


async def test_loads_that_fail_in_a_row_are_undone(scripted, tiny, other, tmp_path):
    """The sender keeps two folders, and the one that serves is neither of them by then."""
    server, engine = scripted
    await engine.load(tiny, OLD)
    parameters = parameters_of(other)
    channel = DiskChannel(tmp_path, torch.float32)
    await push([engine], channel.write(parameters), NEW)
    serving = server.loaded[-1]
    for _ in range(3):
        server.load_statuses = [500]
        with pytest.raises(WeightUpdateError, match="loaded again"):
            await push([engine], channel.write(parameters), NEXT)
        assert server.loaded[-1] == serving and (Path(serving) / "model.safetensors").is_file()
    await push([engine], channel.write(parameters), NEXT)
    assert server.label == str(NEXT) and Path(serving).name not in os.listdir(tmp_path / "folders")


async def test_weights_of_somebody_else_are_not_put_back(scripted, ask, share, other):
    server, engine = scripted
    server.label, server.load_statuses = str(OLD), [500]  # loaded before this client came
    with pytest.raises(WeightUpdateError, match="is unknown here"):
        await push([engine], share(other), NEW)
    with pytest.raises(EngineUnreachable, match="it is unknown which weights"):
        await engine.generate(ask(1))


async def test_a_cache_that_is_not_flushed_is_no_success(scripted, share, other):
    server, engine = scripted
    server.flushes = False
    with pytest.raises(WeightUpdateError, match="kept keys and values of the previous weights"):
        await push([engine], share(other), NEW)


async def test_only_a_swap_in_place_keeps_the_cache(scripted, share, other):
    server, engine = scripted
    await push([engine], share(other), NEW, PauseMode.IN_PLACE)
    assert not any("reset_prefix_cache" in call for call in server.calls)
    await push([engine], share(other), NEXT)
    assert any("reset_prefix_cache?reset_running_requests=true" in call for call in server.calls)


async def test_a_request_names_the_weights_that_serve(scripted, ask, share, other):
    server, engine = scripted
    server.events = [event([5], **ended(1))]
    await engine.generate(ask(1))
    await push([engine], share(other), NEW)
    await engine.generate(ask(1))
    assert [body["cache_salt"] for body in server.bodies] == ["default", str(NEW)]


async def test_a_request_says_what_it_asks_for(scripted, ask):
    server, engine = scripted
    server.events = [event([5], **ended(1))]
    await engine.generate(ask(1, top_k=0, stop_token_ids=(3,), logit_bias=((4, 2.0),), regex="a+", seed=7))
    await engine.generate(ask(1, min_tokens=2, ignore_eos=True))
    params, ends = (body["sampling_params"] for body in server.bodies)
    assert (params["top_k"], params["stop_token_ids"], params["ignore_eos"], params["logprobs"]) == (0, [3], False, 0)
    assert (params["logit_bias"], params["structured_outputs"], params["seed"]) == ({"4": 2.0}, {"regex": "a+"}, 7)
    assert "min_tokens" not in params and (ends["min_tokens"], ends["ignore_eos"]) == (2, True)


async def test_tokens_in_events_make_the_answer(scripted, ask):
    server, engine = scripted
    server.events = [event([5]), event([6, 7]), event([], **ended(3, "abort")), USAGE]
    result = await engine.generate(ask(1))
    assert (result.token_ids, result.logprobs, result.cached_tokens) == ((5, 6, 7), (-0.5,) * 3, 8)
    assert result.versions == (VersionSpan(version=OLD, start=0, end=3),)
    assert result.finish_reason is FinishReason.ABORT


async def test_an_abort_before_the_first_token(scripted, ask):
    server, engine = scripted
    server.events = [{"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort", "weight_versions": []}]}]
    assert (await engine.generate(ask(1))).token_ids == ()


@pytest.mark.parametrize(
    ("tops", "likeliest"),
    [
        ({5: -0.5, 8: -1.0, 9: -1.5}, ((5, -0.5), (8, -1.0))),  # the sampled token is among them
        ({5: -7.0, 8: -1.0, 9: -1.5}, ((8, -1.0), (9, -1.5))),  # it is not
        ({5: -0.5, 8: -9999.0, 9: -9999.0}, ((5, -0.5),)),  # the others cannot be sampled
    ],
)
async def test_the_likeliest_tokens_are_ranked(scripted, ask, tops, likeliest):
    server, engine = scripted
    server.events = [event([5], tops=tops, **ended(1))]
    result = await engine.generate(replace(ask(1), num_top_logprobs=2))
    assert result.top_logprobs == (likeliest,) and server.bodies[0]["sampling_params"]["logprobs"] == 3


UNKNOWN = event([5], **ended(1))
UNKNOWN["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([UNKNOWN], "log-probability of the sampled token"),
        ([event([5], finish_reason="length", weight_versions=None)], "cover 0 of 1 tokens"),
        ([event([5], finish_reason="tired", weight_versions=spans(1))], "finish_reason is 'tired'"),
        ([{"choices": [{"token_ids": [5], "logprobs": {"content": []}}]}], "do not match"),
        ([event([5])], "before its last event"),
        ([{"error": {"message": "EngineCore encountered an issue", "code": 500}}], "500: EngineCore"),
    ],
)
async def test_an_answer_that_cannot_be_believed(scripted, ask, events, message):
    server, engine = scripted
    server.events = events
    with pytest.raises(EngineUnreachable, match=message):
        await engine.generate(ask(1))


async def test_metrics_are_added_up(scripted):
    server, engine = scripted
    server.label = str(OLD)
    stats = await engine.stats()
    assert (stats.num_running, stats.num_queued, stats.generated_tokens) == (5, 1, 170)
    assert stats.weight_version == OLD


async def test_a_server_that_is_started_is_given_its_version(scripted, tiny):
    server, engine = scripted
    await wait_until_it_serves(engine, (tiny, OLD), 60.0)
    assert (server.loaded, server.label) == ([str(tiny)], str(OLD))
    server.load_statuses = [500]
    with pytest.raises(EngineUnreachable, match="refuses weights"):
        await wait_until_it_serves(engine, (tiny, NEW), 60.0)


async def test_a_server_that_was_started_again_is_known_by_its_label(scripted, share, other):
    server, engine = scripted
    await push([engine], share(other), NEW)
    assert (await engine.info()).weight_version == NEW
    server.label = "default"
    assert (await engine.info()).weight_version == WeightVersion()
    await push([engine], share(other), NEW)
    assert server.label == str(NEW)
