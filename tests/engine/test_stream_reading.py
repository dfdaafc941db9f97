"""The client reads streams of either form, however they arrive, and reports failures:

- events cut anywhere; comments, carriage returns and empty lines between them
- events with only the new tokens, and events with all tokens so far (SGLang): the same chunks, the same result
- contradictory events, errors in mid-stream, lost connections and streams that end early: one clear error
- cancelling sends an abort, streamed or not
- an engine that is missing, redirects, or answers late or with nonsense is told as that
- its time limit grows with the time that its weights take from a slow disk
"""

import asyncio
import dataclasses
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import pairwise

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.wire import control, generate
from areal_agent.engine.wire.fields import WireError
from areal_agent.errors import EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import (
    DiskWeights,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SamplingParams,
    SharedMemoryWeights,
    TensorEntry,
    TokenChunk,
    VersionSpan,
    WeightVersion,
)
from tests.engine.servers import serving_app

INFO = {"model_path": "m", "weight_version": "0:0", "vocab_size": 97, "max_context_tokens": 512}
SPANS = [{"version": "0:7", "start": 0, "end": 2}, {"version": "0:8", "start": 2, "end": 4}]
IDS, LOGPROBS = (5, 6, 7, 8), (-0.5, -1.0, -1.5, -2.0)
RESULT = GenerateResult(
    token_ids=IDS,
    logprobs=LOGPROBS,
    versions=(
        VersionSpan(version=WeightVersion(step=7), start=0, end=2),
        VersionSpan(version=WeightVersion(step=8), start=2, end=4),
    ),
    finish_reason=FinishReason.LENGTH,
    cached_tokens=3,
)


def event(start: int, end: int, *, is_last: bool = False, **meta: object) -> dict[str, object]:
    """An event with tokens `[start, end)`, of `end` tokens so far."""
    tokens = list(zip(LOGPROBS, IDS, strict=True))[start:end]
    last = {"finish_reason": {"type": "length", "length": 4}, "weight_versions": SPANS, "cached_tokens": 3}
    return {
        "text": "",
        "output_ids": list(IDS[start:end]),
        "meta_info": {
            "id": "r1",
            "finish_reason": None,
            "completion_tokens": end,
            "output_token_logprobs": [[logprob, id_, None] for logprob, id_ in tokens],
            **(last if is_last else {}),
            **meta,
        },
    }


DISJOINT = [event(0, 1), event(1, 3), event(3, 4, is_last=True)]
CUMULATIVE = [event(0, 1), event(0, 3), event(0, 4, is_last=True)]
TOLD_APART_BY_LIST = [event(0, 1), event(1, 3), event(3, 4, is_last=True)]
TOLD_APART_BY_LIST[1]["output_ids"] = list(IDS[:3])  # ids of all, log-probabilities of the new ones


def lines(events: list[dict[str, object]]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(e) + b"\n\n" for e in events) + b"data: [DONE]\n\n"


# ------------------------------------------------------------------------------------------------- bytes


@given(
    st.lists(st.tuples(st.binary(max_size=40).map(lambda b: b.hex().encode()), st.sampled_from([b"\n", b"\r\n"]))),
    st.lists(st.integers(0, 400)),
)
def test_events_cut_anywhere(events, cuts):
    whole = b"".join(b": comment" + end + b"data: " + data + end + end for data, end in events) + b"data: [DONE]\n\n"
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    splitter = generate.EventSplitter()
    found = [data for start, end in pairwise(edges) for data in splitter.feed(whole[start:end])]
    assert found == [data for data, _ in events]


# ------------------------------------------------------------------------------------------------ events


@pytest.mark.parametrize("events", [DISJOINT, CUMULATIVE, TOLD_APART_BY_LIST], ids=["new", "all", "mixed"])
def test_both_shapes_read_the_same(events):
    reader = generate.ResultReader()
    chunks = [reader.read(e) for e in events]
    assert [chunk.token_ids for chunk in chunks] == [(5,), (6, 7), (8,)]
    assert [chunk.logprobs for chunk in chunks] == [(-0.5,), (-1.0, -1.5), (-2.0,)]
    assert reader.result == RESULT


@given(st.lists(st.integers(0, 4)), st.booleans(), st.integers(0, 3))
def test_what_the_server_writes_is_read_back(cuts, is_cumulative, num_top):
    tops = tuple(tuple((id_ + i, p - i) for i in range(num_top)) for id_, p in zip(IDS, LOGPROBS, strict=True))
    result = dataclasses.replace(RESULT, top_logprobs=tops if num_top else ())
    reader, before = generate.ResultReader(), 0
    for cut in sorted(cuts):
        part = slice(0 if is_cumulative else before, cut)
        chunk = TokenChunk(token_ids=IDS[part], logprobs=LOGPROBS[part], top_logprobs=result.top_logprobs[part])
        reader.read(generate.decode_event(orjson.dumps(generate.encode_chunk("r1", chunk, num_tokens=cut))))
        before = cut
    request = GenerateRequest(request_id="r1", input_ids=(1,), sampling=SamplingParams())
    last = generate.encode_result(request, result, num_sent=0 if is_cumulative else before)
    reader.read(generate.decode_event(orjson.dumps(last)))
    assert reader.result == result


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event(0, 3), event(0, 2)], "2 entries in an event that takes 3 tokens to 2"),
        ([event(0, 2), event(3, 4)], "1 entries in an event that takes 2 tokens to 4"),
        ([event(0, 2, completion_tokens=None)], "completion_tokens"),
        ([event(0, 2), event(2, 4, is_last=True, weight_versions=SPANS[:1])], "cover 2 of 4"),
    ],
)
def test_events_that_contradict_themselves_are_not_read(events, message):
    reader = generate.ResultReader()
    with pytest.raises(WireError, match=message):
        for e in events:
            reader.read(e)


# ------------------------------------------------------------------------------------------------ client


@pytest.fixture
async def scripted():
    """Yield a client of a server that answers `/generate` with these pieces of bytes, then does `after`."""
    stack = AsyncExitStack()

    async def start(pieces: list[bytes], after=None) -> tuple[HttpEngine, list[object]]:
        bodies: list[object] = []

        async def info(_: web.Request) -> web.Response:
            return web.json_response(INFO)

        async def sample(http: web.Request) -> web.StreamResponse:
            bodies.append(await http.json())
            response = web.StreamResponse()
            await response.prepare(http)
            for piece in pieces:
                await response.write(piece)
            if after is not None:
                await after(http)
            return response

        async def abort(http: web.Request) -> web.Response:
            bodies.append(await http.json())
            return web.json_response({})

        app = web.Application()
        app.router.add_get(control.SERVER_INFO, info)
        app.router.add_post(generate.GENERATE, sample)
        app.router.add_post(control.ABORT_REQUEST, abort)
        url = await stack.enter_async_context(serving_app(app))
        return await stack.enter_async_context(aclosing(HttpEngine(url))), bodies

    async with stack:
        yield start


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("events", [DISJOINT, CUMULATIVE], ids=["new", "all"])
async def test_a_stream_in_pieces_of_any_size(events, size, scripted, ask):
    payload = lines(events)
    engine, bodies = await scripted([payload[i : i + size] for i in range(0, len(payload), size)])
    chunks: list[TokenChunk] = []
    assert await engine.generate(ask(), chunks.append) == RESULT
    assert tuple(id_ for chunk in chunks for id_ in chunk.token_ids) == IDS
    assert bodies[0]["stream"] is True


async def hang_up(http: web.Request) -> None:
    http.transport.abort()


@pytest.mark.parametrize(
    ("payload", "after", "error", "message"),
    [
        (lines(DISJOINT[:2]), None, EngineUnreachable, "ended before its last event"),
        (lines(DISJOINT)[:300], hang_up, EngineUnreachable, "no answer"),
        (b'data: {"error": {"message": "too long"}}\n\n', None, EngineRejected, "400: too long"),
        (
            lines(DISJOINT[:1]) + b'data: {"error": {"message": "x", "code": 503}}\n\n',
            None,
            EngineUnreachable,
            "503: x",
        ),
        (b"data: {oops\n\n", None, EngineUnreachable, "not JSON"),
        (b"data: [1]\n\n", None, EngineUnreachable, "an event is"),
        (b'{"text": "in one piece"}', None, EngineUnreachable, "ended before its last event"),
    ],
)
async def test_streams_that_break_off(payload, after, error, message, scripted, ask):
    engine, _ = await scripted([payload], after)
    with pytest.raises(error, match=message):
        await engine.generate(ask(), lambda _: None)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_cancelling_sends_an_abort(is_streamed, scripted, ask):
    arrived = asyncio.Event()

    async def wait(_: web.Request) -> None:
        if not is_streamed:
            arrived.set()
        await asyncio.Event().wait()

    engine, bodies = await scripted([lines(DISJOINT[:1])], wait)
    on_chunk = [lambda _: arrived.set()] if is_streamed else []
    answer = asyncio.create_task(engine.generate(ask(3), *on_chunk))
    await arrived.wait()
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await engine.aclose()  # waits for the abort
    assert bodies[-1] == {"rid": ask(3).request_id}


def saying(body: object, status: int = 200):
    """Return a handler with this answer."""

    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return handler


@asynccontextmanager
async def answering(path: str, handler, **settings):
    """Yield a client of a server whose `path` is answered by `handler`."""

    app = web.Application()
    app.router.add_get(control.SERVER_INFO, saying(INFO))
    app.router.add_route("*", path, handler)
    async with serving_app(app) as url, aclosing(HttpEngine(url, **settings)) as engine:
        yield engine


@pytest.fixture
async def nobody(unused_tcp_port):
    async with aclosing(HttpEngine(f"http://127.0.0.1:{unused_tcp_port}")) as engine:
        yield engine


async def test_nobody_there(nobody, ask):
    for call in (nobody.generate(ask()), nobody.pause(PauseMode.RETRACT), nobody.resume(), nobody.info()):
        with pytest.raises(EngineUnreachable, match=r"no answer to .*host 127\.0\.0\.1:\d+ \[.*is the engine running"):
            await call
    assert not await nobody.health()
    await nobody.aclose()  # which the fixture does again


async def test_waiting_for_nobody_ends_with_an_error(nobody):
    with pytest.raises(EngineUnreachable, match=r"did not serve within 0.2 s"):
        await nobody.wait_ready(0.2)


async def test_large_weights_have_more_time_than_other_calls():
    has_run_out = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        """A load counts as ended when a call that began after it goes unanswered; other calls never end one."""
        if request.path == control.SEND_PUSH:
            is_loading.set()
            await has_run_out.wait()
            return web.json_response({})
        return await asyncio.get_running_loop().create_future()

    is_loading = asyncio.Event()
    entry = TensorEntry(name="a", dtype="float32", shape=(2**40,), offset=0, num_bytes=2**42)
    async with answering("/{any:.*}", answer, control_timeout_s=0.05) as engine:
        load = asyncio.create_task(engine.send_push("p", SharedMemoryWeights(path="f", entries=(entry,), crc32=0)))
        await is_loading.wait()
        with pytest.raises(EngineUnreachable, match="no answer"):
            await engine.commit_push("p", WeightVersion(step=1))
        assert not load.done()
        has_run_out.set()
        await load


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (lambda: web.json_response({"error": {"message": "too hot"}}, status=400), EngineRejected, "400: too hot"),
        (lambda: web.Response(text="oops", status=500), EngineUnreachable, "500: oops"),
        (lambda: web.Response(text="<html>"), EngineUnreachable, "not JSON"),
        (lambda: web.json_response({"text": "hi"}), EngineUnreachable, "meta_info"),
        (lambda: web.Response(status=307, headers={"Location": "/elsewhere"}), EngineUnreachable, "307"),
        (lambda: web.json_response({"error": "busy"}, status=429), EngineUnreachable, "429: busy"),  # and no refusal
    ],
)
async def test_answers_that_are_none(response, error, message, ask):
    async def answer(_: web.Request) -> web.Response:
        return response()

    async with answering(generate.GENERATE, answer) as engine:
        with pytest.raises(error, match=message):
            await engine.generate(ask())


async def test_a_refused_update_is_a_weight_update_error():
    refusal = {"success": False, "message": "bad path", "num_paused_requests": 0}
    async with answering(control.UPDATE_FROM_DISK, saying(refusal, status=400)) as engine:
        with pytest.raises(WeightUpdateError, match="bad path"):
            await engine.update_weights(DiskWeights(path="x"), WeightVersion(step=1))
