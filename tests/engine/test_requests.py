"""A wrong request is refused with a message that contains the value, and the engine goes on serving:

- ids outside the vocabulary, prompts and lengths beyond the context, ids already in flight; by client and server
- more than a thousand likeliest tokens, whatever the vocabulary: their answers would take all memory
- a request with only ids is served: it gets `rid` and `sampling_params`
- a call that needs no field needs no body, and changes nothing when it comes again
- bodies that are not JSON, lack fields, have wrong types or unknown ones; unknown paths and methods
- when the model thread dies, everybody is answered, and the engine reports that it is not healthy
- options out of bounds and a port in use are refused
"""

import asyncio
import dataclasses

import aiohttp
import pytest

from areal_agent.engine.__main__ import main
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.engine.wire import control, generate
from areal_agent.engine.wire.fields import decode_failure
from areal_agent.engine.wire.generate import check_request
from areal_agent.errors import ConfigError, EngineRejected, EngineUnreachable
from areal_agent.types import EngineInfo, GenerateRequest, SamplingParams, WeightVersion


def body(**changes: object) -> dict[str, object]:
    request = GenerateRequest(request_id="r1", input_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4))
    return generate.encode_request(request) | changes


def params(**changes: object) -> dict[str, object]:
    sampling = body()["sampling_params"] | changes
    return body(sampling_params=sampling)


def test_a_whole_vocabulary_of_likeliest_tokens_is_refused(ask):
    info = EngineInfo(model_path="m", weight_version=WeightVersion(), vocab_size=151_936, max_context_tokens=1024)
    check_request(dataclasses.replace(ask(1), num_top_logprobs=1000), info)
    with pytest.raises(EngineRejected, match=r"is 151936; it must be from 0 \(off\) to 1000"):
        check_request(dataclasses.replace(ask(1), num_top_logprobs=151_936), info)


async def test_a_request_that_just_fits_is_served(tiny, serve, ask):
    async with serve(tiny, max_context=64) as served:
        result = await served.engine.generate(ask(1, prompt_length=52, max_tokens=12))
        with pytest.raises(EngineRejected, match=r"53 tokens and max_tokens 12 exceed the context of 64"):
            await served.engine.generate(ask(1, prompt_length=53, max_tokens=12))
    assert len(result.token_ids) == 12


async def test_the_client_refuses_what_the_engine_has_no_grammar_for(served, ask):
    assert not (await served.engine.info()).has_grammar
    with pytest.raises(EngineRejected, match=r"json_schema is .* use an engine that has one"):
        await served.engine.generate(ask(1, json_schema='{"type": "object"}'))


async def test_an_id_in_flight_twice(served, ask):
    first = await served.queued(ask(1))
    for on_chunk in ((), (lambda _: None,)):  # refused before the stream begins
        with pytest.raises(EngineRejected, match=r"400: .*in flight already"):
            await served.engine.generate(ask(1), *on_chunk)
    await served.engine.resume()
    assert len((await first).token_ids) == 12


async def test_a_request_of_ids_alone_is_given_the_rest(served):
    async with aiohttp.ClientSession(served.engine.base_url) as session:
        answers = []
        for _ in range(2):
            async with session.post(generate.GENERATE, json={"input_ids": [1, 2, 3]}) as response:
                assert response.status == 200
                answers.append(await response.json())
    assert [len(answer["output_ids"]) for answer in answers] == [128, 128], "SGLang's default"
    assert len({answer["meta_info"]["id"] for answer in answers}) == 2


REFUSED = {
    "id outside": (body(input_ids=[1, 97]), "outside the vocabulary"),
    "no ids": (body(input_ids=[]), "empty"),
    "too long": (body(input_ids=[1] * 600), "context of 512"),
    "ids are text": (body(input_ids=["1"]), "input_ids"),
    "ids are booleans": (body(input_ids=[True]), "input_ids"),
    "batched ids": (body(input_ids=[[1, 2]]), "input_ids"),
    "empty rid": (body(rid=""), "rid"),
    "rid is a number": (body(rid=5), "rid"),
    "stream is text": (body(stream="yes"), "stream"),
    "text": (body(text="hello"), "text"),
    "negative temperature": (params(temperature=-1), "temperature"),
    "unknown parameter": (params(min_tokens=3), "'sampling_params.min_tokens' is unknown; sampling_params takes ebnf"),
    "a million wrong ids": ({"input_ids": [0.5] * 1_000_000}, "input_ids.0 is 0.5"),
    "top_p zero": (params(top_p=0), "top_p is 0; it must be above 0 and at most 1 (off)"),
    "top_k zero": (params(top_k=0), "top_k"),
    "temperature too small": (params(temperature=1e-40), "temperature is 1e-40"),
    "temperature too large": (params(temperature=1e39), "temperature"),
    "no tokens": (params(max_new_tokens=0), "max_new_tokens is 0, logprob_start_len -1"),
    "scored and sampled": (body(logprob_start_len=0), "to have the tokens of a prompt scored, set the first to 0"),
    "scored from behind its end": (params(max_new_tokens=0) | {"logprob_start_len": 9}, "logprob_start_len is 9"),
    "min_p above 1": (params(min_p=1.5), "min_p"),
    "frequency_penalty above 2": (params(frequency_penalty=2.5), "frequency_penalty"),
    "presence_penalty is text": (params(presence_penalty="much"), "presence_penalty"),
    "repetition_penalty zero": (params(repetition_penalty=0), "repetition_penalty"),
    "repetition_penalty too small": (params(repetition_penalty=1e-40), "repetition_penalty"),
    "bias of no id": (params(logit_bias={"the": 1.0}), "logit_bias"),
    "bias outside": (params(logit_bias={"97": 1.0}), "logit_bias names the token id 97"),
    "bias of an endless id": (params(logit_bias={"9" * 5000: 1.0}), "it must be a token id"),
    "bias too large": (params(logit_bias={"5": 1e39}), "logit_bias.5 is 1e+39"),
    "bias is no number": (params(logit_bias={"5": None}), "logit_bias.5 is None"),
    "bias is a list": (params(logit_bias=[5]), "logit_bias"),
    "bias is an empty text": (params(logit_bias=""), "logit_bias"),
    "stop ids are a number": (params(stop_token_ids=5), "stop_token_ids is 5"),
    "more tokens at least than at most": (
        params(max_new_tokens=4, min_new_tokens=5),
        "min_tokens (min_new_tokens) is 5; it must be from 0 (off) to max_tokens (max_new_tokens), which is 4",
    ),
    "min_new_tokens negative": (params(min_new_tokens=-1), "min_new_tokens is -1"),
    "ignore_eos is text": (params(ignore_eos="yes"), "ignore_eos is 'yes'"),
    "stop id that cannot be masked": (
        params(min_new_tokens=1, stop_token_ids=[97]),
        "stop_token_ids beside min_tokens 1 is (97,)",
    ),
    "too many to be masked": (params(min_new_tokens=1, stop_token_ids=[5] * 101), "at most 100 ids"),
    "an end besides the grammar's": (params(ignore_eos=True, regex="a"), "ignore_eos is True beside regex"),
    "fewest tokens of a grammar": (params(min_new_tokens=2, regex="a"), "min_tokens is 2 beside regex"),
    "grammar": (params(json_schema="{}"), "json_schema"),
    "too many likeliest": (body(top_logprobs_num=98), "98"),
    "likeliest negative": (body(top_logprobs_num=-1), "-1"),
    "seed negative": (params(sampling_seed=-1), "sampling_seed"),
    "not an object": ([1], "JSON object"),
}


async def test_wrong_bodies_are_answered_with_400(served, ask):
    async with aiohttp.ClientSession(served.engine.base_url) as session:
        for name, (wrong, message) in REFUSED.items():
            async with session.post(generate.GENERATE, json=wrong) as response:
                assert (name, response.status) == (name, 400)
                assert message in (await response.json())["error"]["message"]
        assert len((await served.engine.generate(ask(1))).token_ids) == 12


FAILURES = [
    ("POST", generate.GENERATE, b"{not json", 400, "is not JSON"),
    ("POST", generate.GENERATE, b"", 400, "input_ids is missing"),
    ("POST", control.PAUSE_GENERATION, b'{"mode": "later"}', 400, "mode is 'later'"),
    ("POST", control.ABORT_REQUEST, b"{}", 400, "rid is missing"),
    ("POST", control.UPDATE_FROM_DISK, b'{"model_path": "x"}', 400, "weight_version is missing"),
    ("POST", control.UPDATE_FROM_DISK, b'{"model_path": "x", "weight_version": "new"}', 400, "'new'"),
    ("POST", control.UPDATE_FROM_SHARED_MEMORY, b'{"path": "x"}', 400, "is missing"),
    ("POST", "/begin_weight_push", b"{}", 400, "push_id is missing"),
    ("POST", "/begin_weight_push", b'{"push_id": ""}', 400, "it must have at least 1 character"),
    ("POST", "/begin_weight_push", b'{"push_id": "p", "x": 1}', 400, "'x' is unknown; the body takes push_id"),
    ("POST", "/send_weight_push", b'{"push_id": "p"}', 400, "one of shared_memory, disk, distributed"),
    ("POST", "/send_weight_push", b'{"push_id": "p", "cuda_ipc": {}}', 400, "'cuda_ipc' is unknown"),
    ("POST", control.RELEASE_MEMORY, b'{"tags": ["weights"]}', 400, "tags.0 is 'weights'; it must be 'kv_cache'"),
    ("POST", "/send_weight_push", b'{"push_id": "p", "disk": {"path": "x"}}', 400, "disk.model_path is missing"),
    (
        "POST",
        "/send_weight_push",
        b'{"push_id": "p", "shared_memory": {"path": "x", "entries": 3}}',
        400,
        "entries is 3",
    ),
    ("POST", "/commit_weight_push", b'{"push_id": "p"}', 400, "weight_version is missing"),
    ("POST", "/commit_weight_push", b'{"push_id": "p", "weight_version": "8"}', 400, "incarnation:step"),
    ("POST", "/v1/chat/completions", b"{}", 404, "python -m areal_agent.gateway"),
    ("GET", generate.GENERATE, b"", 405, "Method Not Allowed"),
]


async def test_every_failure_is_json_with_a_message(served):
    async with aiohttp.ClientSession(served.engine.base_url) as session:
        for method, path, data, status, said in FAILURES:
            async with session.request(method, path, data=data) as response:
                assert (path, data, response.status) == (path, data, status)
                assert said in decode_failure(await response.json(), status).message
    assert await served.engine.health()


async def test_a_call_that_needs_no_field_needs_no_body_and_may_come_twice(served, ask):
    calls = (control.CONTINUE_GENERATION, control.PAUSE_GENERATION, control.RELEASE_MEMORY, control.RESUME_MEMORY)
    async with aiohttp.ClientSession(served.engine.base_url) as session:
        for path in (*(one for one in calls for _ in range(2)), *calls[:1] * 2):
            async with session.post(path) as response:
                assert (path, response.status) == (path, 200)
        assert len((await served.engine.generate(ask(1))).token_ids) == 12


async def test_info_and_stats_tell_model_and_work(tiny, serve, ask):
    async with serve(tiny, max_context=128) as served:
        await served.engine.generate(ask(1))
        info, stats = await served.engine.info(), await served.engine.stats()
    assert info == EngineInfo(
        model_path=str(tiny), weight_version=WeightVersion(step=7), vocab_size=97, max_context_tokens=128
    )
    assert (stats.num_running, stats.num_queued, stats.generated_tokens) == (0, 0, 12)
    assert stats.busy_s > 0


async def test_a_model_thread_that_dies_answers_everyone(tiny, serve, ask):
    async with serve(tiny, num_slots=1) as served:
        served.gate.breaks_with = RuntimeError("out of memory")
        results = await asyncio.gather(*(served.engine.generate(ask(i)) for i in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [EngineUnreachable] * 3
        assert "out of memory" in str(results[0])
        await served.server.failed.wait()
        assert not await served.engine.health()
        with pytest.raises(EngineUnreachable, match="has ended"):
            await served.engine.generate(ask(4))


def load(folder, max_context: int = 128) -> ModelRunner:
    return ModelRunner(str(folder), device="cpu", num_slots=2, max_context_tokens=max_context)


async def test_a_port_in_use(tiny, served):
    port = int(served.engine.base_url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*another port"):
        await EngineServer.start(load(tiny), port=port)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "0"], "threads is 0; give a whole number from 1 to 1024, or 'auto'"),
        (["--threads", "all"], "threads is 'all'; give a whole number"),
        (["--port", "70000"], "port is 70000"),
        (["--max-running", "0"], "max_running_requests is 0"),
        (["--sharing", "0"], "--sharing is 0; it counts this engine too"),
        (["--weight-version", "new"], "--weight-version: weight version 'new'"),
    ],
)
def test_options_out_of_bounds(options, message):
    with pytest.raises(ConfigError, match=message):
        main(["--model", "anything", *options])
