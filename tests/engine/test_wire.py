"""The wire: each side reads a record as the other wrote it; contradictory answers are refused; SGLang's are read."""

import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.wire import control, fields, generate
from areal_agent.engine.wire.fields import Message, WireError
from areal_agent.types import (
    DeviceWeights,
    DiskWeights,
    DistributedWeights,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    SharedMemoryWeights,
    TensorEntry,
    VersionSpan,
    WeightPart,
    WeightVersion,
)

versions = st.builds(WeightVersion, incarnation=st.integers(0, 9), step=st.integers(0, 10**6))
ids = st.lists(st.integers(0, 2**31), max_size=30).map(tuple)
grammars = st.dictionaries(st.sampled_from(["json_schema", "regex", "ebnf"]), st.text(), max_size=1)
requests = st.builds(
    GenerateRequest,
    request_id=st.text(min_size=1),
    input_ids=ids,
    sampling=st.builds(
        lambda grammar, **others: SamplingParams(**grammar, **others),
        grammars,
        temperature=st.just(0.0) | st.floats(1e-6, 10),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.one_of(st.just(-1), st.integers(1, 1000)),
        min_p=st.floats(0, 1),
        frequency_penalty=st.floats(-2, 2),
        presence_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.1, 2),
        logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100)).map(lambda d: tuple(d.items())),
        max_tokens=st.integers(1, 10**6),
        min_tokens=st.integers(0, 10**6),
        stop_token_ids=ids,
        ignore_eos=st.booleans(),
        seed=st.none() | st.integers(0, generate.MAX_SEED),
    ),
    num_top_logprobs=st.integers(0, 20),
)


@st.composite
def results(draw) -> GenerateResult:
    tokens = draw(st.lists(st.tuples(st.integers(0, 2**31), st.floats(-50, 0), versions), max_size=20))
    num_top = draw(st.integers(0, 3))
    top = tuple((id_, -float(id_)) for id_ in range(num_top))
    reason = draw(st.sampled_from(FinishReason))
    return GenerateResult(
        token_ids=tuple(token for token, _, _ in tokens),
        logprobs=tuple(logprob for _, logprob, _ in tokens),
        versions=tuple(VersionSpan(version=v, start=i, end=i + 1) for i, (_, _, v) in enumerate(tokens)),
        finish_reason=reason,
        top_logprobs=(top,) * len(tokens) if num_top else (),
    )


def over_the_wire(body: object) -> object:
    return orjson.loads(orjson.dumps(body))


def resent(message: Message) -> Message:
    return type(message).read(orjson.dumps(message.encode()))


@given(requests, st.booleans())
def test_requests_arrive_as_they_were_sent(request, is_streamed):
    call = generate.GenerateCall.read(
        orjson.dumps(generate.encode_request(request, is_streamed=is_streamed), option=orjson.OPT_SERIALIZE_NUMPY)
    )
    assert (call.request(), call.stream) == (request, is_streamed)


@given(requests, results())
def test_results_arrive_as_they_were_sent(request, result):
    assert generate.decode_result(over_the_wire(generate.encode_result(request, result))) == result


entries = st.builds(
    TensorEntry,
    name=st.text(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shape=ids,
    offset=st.integers(0, 2**40),
    num_bytes=st.integers(0, 2**40),
)


shared = st.builds(
    SharedMemoryWeights, path=st.text(), entries=st.lists(entries, max_size=4).map(tuple), crc32=st.integers(0, 2**32)
)
parts = st.builds(
    WeightPart,
    host=st.text(),
    port=st.integers(1, 2**16),
    name=st.text(),
    num_bytes=st.integers(1, 2**40),
    checksum=st.integers(0, 2**32),
)
distributed = st.builds(
    DistributedWeights,
    parts=st.lists(parts, min_size=1, max_size=3).map(tuple),
    entries=st.lists(entries, max_size=4).map(tuple),
    bucket_bytes=st.integers(1, 2**40),
    timeout_s=st.floats(1, 100),
)


device = st.builds(
    DeviceWeights,
    handle=st.text(),
    device=st.text(),
    entries=st.lists(entries, max_size=4).map(tuple),
    checksum=st.integers(0, 2**32),
)


@given(shared | distributed | device | st.builds(DiskWeights, path=st.text()), st.text(min_size=1, max_size=200))
def test_pushed_weights_arrive_as_they_were_sent(weights, push_id):
    send = control.PushSend.of(push_id, weights)
    assert resent(send) == send and resent(send).weights == weights


@given(shared, versions, st.booleans())
def test_weight_updates_arrive_as_they_were_sent(weights, version, flush):
    update = control.SharedMemoryUpdate(
        path=weights.path, entries=weights.entries, crc32=weights.crc32, weight_version=version, flush_cache=flush
    )
    assert resent(update) == update and update.weights == weights
    from_disk = control.DiskUpdate(model_path=weights.path, weight_version=version, flush_cache=flush)
    assert resent(from_disk) == from_disk and from_disk.weights == DiskWeights(path=weights.path)


ENTRY = {"name": "n", "dtype": "float32", "shape": [2], "offset": 0, "num_bytes": 8}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"disk": {"model_path": "x"}, "shared_memory": {"path": "x", "entries": [], "crc32": 1}}, "and disk"),
        ({"disk": {"model_path": "x", "also": 1}}, "'disk.also' is unknown"),
        ({"disk": 5}, "disk is 5; it must be a JSON object"),
        ({"shared_memory": {"path": "x", "entries": [ENTRY | {"shape": "2"}], "crc32": 1}}, "entries.0.shape is '2'"),
        ({"shared_memory": {"path": "x", "entries": [], "crc32": True}}, "crc32 is True; it must be a valid integer"),
        ({"device": {"handle": 5, "device": "", "entries": [], "checksum": 1}}, "device.handle is 5"),
    ],
)
def test_what_is_wrong_with_a_body_is_named(body, message):
    with pytest.raises(WireError, match=message):
        control.PushSend.read(orjson.dumps({"push_id": "p"} | body))


def test_texts_that_stop_and_what_is_off_are_never_sent():
    request = GenerateRequest(request_id="r", input_ids=(1,), sampling=SamplingParams(stop=("END",), top_k=0))
    sent = generate.encode_request(request)
    assert b"END" not in orjson.dumps(sent)
    params = sent["sampling_params"]
    assert set(params) == {"temperature", "top_p", "top_k", "max_new_tokens", "stop_token_ids"}
    assert params["top_k"] == -1


def answer(**meta: object) -> dict[str, object]:
    """An answer as SGLang 0.5 gives it, with fields that we do not need."""
    return {
        "text": " hi",
        "output_ids": [5, 6],
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "stop", "matched": 6},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "weight_version": "0:8",
            "weight_versions": [{"version": "0:7", "start": 0, "end": 1}, {"version": "0:8", "start": 1, "end": 2}],
            "num_retractions": 1,
            "output_token_logprobs": [[-0.5, 5, None], [-1, 6, None]],
            "e2e_latency": 0.1,
            **meta,
        },
    }


def test_an_answer_of_sglang_is_read():
    assert generate.decode_result(answer()) == GenerateResult(
        token_ids=(5, 6),
        logprobs=(-0.5, -1.0),
        versions=(
            VersionSpan(version=WeightVersion(step=7), start=0, end=1),
            VersionSpan(version=WeightVersion(step=8), start=1, end=2),
        ),
        finish_reason=FinishReason.STOP,
        cached_tokens=1,
    )


def test_likeliest_tokens_of_sglang_are_read_without_impossible_ones():
    tops = [[[-0.5, 5, None], [None, 3, None]], [[-0.1, 2, None], [-1.0, 6, None]]]
    result = generate.decode_result(answer(output_top_logprobs=tops))
    assert result.top_logprobs == (((5, -0.5),), ((2, -0.1), (6, -1.0)))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_logprobs": [[-0.5, 5, None]]}, "1 entries that do not match 2"),
        ({"output_token_logprobs": [[-0.5, 5, None], [-1.0, 9, None]]}, "do not match"),
        ({"output_token_logprobs": [[None, 5, None], [-1.0, 6, None]]}, "finite number"),
        ({"output_token_logprobs": [[math.nan, 5, None], [-1.0, 6, None]]}, "finite number"),
        ({"weight_versions": [{"version": "0:7", "start": 0, "end": 1}]}, "cover 1 of 2"),
        ({"weight_versions": [{"version": "0:7", "start": 1, "end": 2}]}, "one from 0 was due"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "'default'"),
        ({"weight_versions": None}, "weight_versions"),
        ({"output_token_logprobs": [[-0.5], [-1.0, 6, None]]}, "each must be .log-probability, token id"),
        ({"output_top_logprobs": [[]]}, "1 entries for 2"),
        ({"output_top_logprobs": [None, []]}, "a list for every token"),
        ({"finish_reason": {"type": "tired"}}, "tired"),
        ({"finish_reason": None}, "finish_reason"),
    ],
)
def test_answers_that_contradict_themselves_are_not_read(meta, message):
    with pytest.raises(WireError, match=message):
        generate.decode_result(answer(**meta))


@pytest.mark.parametrize(
    "body", [{"error": {"message": "why"}}, {"success": False, "message": "why"}, {"error": "why"}]
)
def test_the_message_of_a_failure_is_found(body):
    assert fields.decode_failure(body, 400).message == "why"


SGLANG_INFO = {"model_path": "m", "weight_version": "default", "context_length": None, "max_req_input_len": 4090}


def test_what_sglang_says_of_itself_is_read():
    assert control.decode_info(SGLANG_INFO | {"grammar_backend": "xgrammar"}) == EngineInfo(
        model_path="m", weight_version=WeightVersion(), vocab_size=2**31 - 1, max_context_tokens=4090, has_grammar=True
    )
    assert control.decode_info(SGLANG_INFO | {"context_length": 8192}).max_context_tokens == 8192
    assert not control.decode_info(SGLANG_INFO | {"grammar_backend": "none"}).has_grammar


@pytest.mark.parametrize(
    ("change", "message"),
    [({"max_req_input_len": None}, "length of the context"), ({"weight_version": "new"}, "'new'")],
)
def test_an_engine_that_does_not_say_enough_of_itself(change, message):
    with pytest.raises(WireError, match=message):
        control.decode_info(SGLANG_INFO | change)
