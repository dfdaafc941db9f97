"""A request that loses its server goes on at another one, which its tokens do not show:

- tokens, log-probabilities and spans are complete, streamed or not; chunks come once and in order
- spans of one version from two servers are joined; with two versions, each token has the one that sampled it
- only the rest is requested: fewer tokens, the same stop ids and seed, an id of its own
- a server that ends a request itself, as at its shutdown, loses it, too
- with all tokens there, or a stop id at the end, nothing more is sampled
- a wrong request is sent once; one that fails everywhere says where and how
- with no server it waits and goes on when one is back; after a limit, its error gives each server's state
- an abort or a cancellation ends it wherever it is: at a server, at a silent one, between two
- an answer that cannot be continued (grammar, penalties, unknown versions) begins again if nobody saw it, else fails
- 2,000 requests at two servers survive the death of one
- of the tokens that a request has so far, a span of one version stays one over many chunks, and a cut is exact
"""

import asyncio
import contextlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.fake import Operation, fake_logprob
from areal_agent.engine.fleet.member import MemberState
from areal_agent.engine.fleet.relay import Partial
from areal_agent.errors import EngineRejected, EngineUnreachable
from areal_agent.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    ImageSpan,
    PromptImage,
    SamplingParams,
    TokenChunk,
    VersionSpan,
    WeightVersion,
)

from .conftest import NEW, OLD, PATIENT, URLS, Server, Stage, ask, tokens

COMPLETE = "request-0000"


def spans(*lengths: tuple[object, int]) -> tuple[VersionSpan, ...]:
    made: list[VersionSpan] = []
    for version, length in lengths:
        start = made[-1].end if made else 0
        made.append(VersionSpan(version=version, start=start, end=start + length))
    return tuple(made)


async def broken_off(
    stage: Stage, request: GenerateRequest | None = None, **options: Any
) -> tuple["asyncio.Future[GenerateResult]", Server]:
    """Send a request whose server dies after three tokens; return its answer, and the server that has it then."""
    answer, first, second = await stage.under_way(request, **options)
    first.kill()
    await second.until_asked()
    return answer, second


@pytest.mark.parametrize("is_watched", [True, False])
async def test_it_goes_on_where_it_was(stage, is_watched):
    chunks: list[TokenChunk] = []
    answer, second = await broken_off(stage, on_chunk=chunks.append if is_watched else None)
    second.fake.step(100)
    result = await answer
    assert result.token_ids == tokens(ask(), 8) and result.finish_reason is FinishReason.LENGTH
    assert result.versions == spans((OLD, 8))
    assert result.logprobs[:3] == tuple(fake_logprob(id_, i) for i, id_ in enumerate(result.token_ids[:3]))
    assert result.logprobs[3:] == tuple(fake_logprob(id_, i) for i, id_ in enumerate(result.token_ids[3:]))
    if is_watched:
        for name in ("token_ids", "logprobs"):
            assert tuple(one for told in chunks for one in getattr(told, name)) == getattr(result, name)
    (first,) = (server for server in stage.servers.values() if server is not second)
    assert stage.state(first) is not MemberState.SERVING and stage.report(first).reason
    assert (await stage.fleet.stats()).num_moves == 1


async def test_each_token_bears_the_version_that_sampled_it(stage):
    answer, first, second = await stage.under_way(num_tokens=2)
    first.fake.version = NEW
    first.fake.step(1)
    second.fake.version = NEW
    first.kill()
    await second.finish()
    assert (await answer).versions == spans((OLD, 2), (NEW, 6))


async def test_what_is_left_is_asked_for(stage):
    image = PromptImage(span=ImageSpan(digest="ab" * 32, start=0, end=1), data=b"a picture")
    request = replace(ask(5, stop_token_ids=(7,), temperature=0.5), images=(image,))
    answer, second = await broken_off(stage, request)
    (left,) = second.fake.requests
    assert tuple(left.input_ids) == (*request.input_ids, *tokens(request, 3))
    assert left.sampling == replace(request.sampling, max_tokens=5)
    assert left.images == (image,)
    assert left.request_id != request.request_id
    second.fake.step(100)
    await answer


async def test_the_likeliest_tokens_are_whole(stage):
    answer, second = await broken_off(stage, replace(ask(), num_top_logprobs=2))
    second.fake.step(100)
    assert [top[0][0] for top in (await answer).top_logprobs] == list(tokens(ask(), 8))


async def test_a_server_that_ends_a_request_by_itself_loses_it(stage):
    answer, first, second = await stage.under_way()
    await first.fake.abort(COMPLETE)  # as a server does that shuts down
    await second.finish()
    assert (await answer).token_ids == tokens(ask(), 8)


async def test_it_may_move_more_than_once(open_stage):
    servers = [Server(url) for url in (*URLS, "http://three")]
    async with open_stage(*servers) as stage:
        answer = stage.start(ask())
        for left in (2, 1):
            server = (await stage.holder())[0]
            server.fake.step(left)
            server.kill()
        server = (await stage.holder())[0]
        server.fake.step(100)
        assert (await answer).token_ids == tokens(ask(), 8)
        assert (await answer).versions == spans((OLD, 8))


@pytest.mark.parametrize(
    ("sampling", "num_tokens", "reason"),
    [({"max_tokens": 3}, 3, FinishReason.LENGTH), ({"stop_token_ids": (1005,)}, 3, FinishReason.STOP)],
)
async def test_nothing_is_sampled_beyond_the_end(open_stage, sampling, num_tokens, reason):
    """The server dies after the last token, before it has said that it was the last."""

    class Dying(Server):
        async def generate(self, request, on_chunk=None) -> GenerateResult:
            result = await super().generate(request, on_chunk)
            raise EngineUnreachable(f"gone after {len(result.token_ids)} tokens")

    async with open_stage(Dying(URLS[0], is_stepped=False), Dying(URLS[1], is_stepped=False)) as stage:
        result = await stage.fleet.generate(ask(**sampling))
        assert (result.token_ids, result.finish_reason) == (tokens(ask(), num_tokens), reason)
        assert result.versions == spans((OLD, num_tokens))
        assert sum(len(server.fake.requests) for server in stage.servers.values()) == 1


async def test_a_wrong_request_is_asked_once(open_stage):
    async with open_stage(*(Server(url, vocab_size=3) for url in URLS)) as stage:
        with pytest.raises(EngineRejected, match=r"input_ids\[2\]"):
            await stage.fleet.generate(ask())
        assert [one.state for one in stage.fleet.report()] == [MemberState.SERVING] * 2


async def test_an_id_that_is_in_flight_is_refused(stage):
    answer, first, _ = await stage.under_way(num_tokens=0)
    with pytest.raises(EngineRejected, match="in flight"):
        await stage.fleet.generate(ask())
    first.fake.step(100)
    await answer


async def test_one_that_fails_everywhere_says_where_and_how(open_stage):
    servers = [Server(url) for url in URLS]
    for server in servers:
        for number in range(9):
            server.fake.fail_next(Operation.GENERATE, EngineUnreachable(f"out of memory, {number}"))
    async with open_stage(*servers, patience=replace(PATIENT, max_failures=3)) as stage:
        with pytest.raises(EngineUnreachable, match=r"failed 3 times: .*memory, 0; then .*memory.*; then .*memory"):
            await stage.fleet.generate(ask())


async def test_with_nobody_serving_it_waits_for_one(stage):
    answer, first, second = await stage.under_way()
    second.kill()
    first.kill()
    await stage.until(lambda: stage.report(second).state is not MemberState.SERVING)
    second.restart(OLD)
    await second.finish()
    assert (await answer).token_ids == tokens(ask(), 8)


async def test_nobody_for_too_long_says_who_is_how(open_stage):
    async with open_stage(*map(Server, URLS), patience=replace(PATIENT, wait_s=0.05)) as stage:
        for server in stage.servers.values():
            server.kill()
        with pytest.raises(EngineUnreachable, match=r"no server has served for 0\.05 s: http://one .*http://two"):
            await stage.fleet.generate(ask())


# ------------------------------------------------------------------------------------------------ the end


async def test_an_abort_at_a_server(stage):
    answer, *_ = await stage.under_way()
    await stage.fleet.abort(COMPLETE)
    result = await answer
    assert (result.token_ids, result.finish_reason) == (tokens(ask(), 3), FinishReason.ABORT)


async def test_an_abort_between_two_servers(stage):
    answer, *_ = await stage.under_way()
    await stage.kill_all()
    await stage.fleet.abort(COMPLETE)
    result = await answer
    assert (result.token_ids, result.finish_reason) == (tokens(ask(), 3), FinishReason.ABORT)
    assert result.versions == spans((OLD, 3))


async def test_an_abort_at_a_server_that_is_silent(open_stage):
    async with open_stage(*map(Server, URLS), patience=replace(PATIENT, abort_s=0.05)) as stage:
        answer, first, _ = await stage.under_way()
        first.fake.hang_next(Operation.ABORT)
        await stage.fleet.abort(COMPLETE)
        result = await answer
        assert (result.token_ids, result.finish_reason) == (tokens(ask(), 3), FinishReason.ABORT)


async def test_after_a_move_the_abort_follows(stage):
    answer, second = await broken_off(stage)
    second.fake.step(2)
    await stage.fleet.abort(COMPLETE)
    result = await answer
    assert (result.token_ids, result.finish_reason) == (tokens(ask(), 5), FinishReason.ABORT)


async def test_cancelling_ends_it_at_a_server_and_between_two(stage):
    at_server, waiting = stage.start(ask(1)), stage.start(ask(2))
    await stage.until(lambda: stage.one.fake.num_in_flight + stage.two.fake.num_in_flight == 2)
    at_server.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await at_server
    assert stage.one.fake.num_in_flight + stage.two.fake.num_in_flight == 1
    await stage.kill_all()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [one.num_requests for one in stage.fleet.report()] == [0, 0]


# ---------------------------------------------------------------------------------- what cannot be continued

LOOKS_BACK = [{"json_schema": "{}"}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}]


def grammatical(url: str) -> Server:
    server = Server(url)
    server.fake._has_grammar = True
    return server


def without_versions(url: str) -> Server:
    server = Server(url)
    server.told_versions = False
    return server


@pytest.mark.parametrize("sampling", LOOKS_BACK)
async def test_what_counts_from_the_first_token_begins_again(open_stage, sampling):
    async with open_stage(*map(grammatical, URLS)) as stage:
        answer, second = await broken_off(stage, ask(**sampling))
        assert tuple(second.fake.requests[0].input_ids) == ask().input_ids
        second.fake.step(100)
        assert (await answer).token_ids == tokens(ask(), 8)


@pytest.mark.parametrize(
    ("make", "sampling", "why"),
    [
        *((grammatical, sampling, "count from the first token") for sampling in LOOKS_BACK),
        (without_versions, {}, "the weights that sampled them are unknown"),
    ],
)
async def test_what_was_handed_out_is_not_taken_back(open_stage, make, sampling, why):
    async with open_stage(*map(make, URLS)) as stage:
        answer, first, _ = await stage.under_way(ask(**sampling), on_chunk=lambda _: None)
        first.kill()
        with pytest.raises(EngineUnreachable, match=f"broke off after 3 tokens.*{why}"):
            await answer


async def test_tokens_of_unknown_weights_are_sampled_again(open_stage):
    async with open_stage(*map(without_versions, URLS)) as stage:
        answer, second = await broken_off(stage)
        second.fake.step(100)
        result = await answer
        assert (result.token_ids, result.versions) == (tokens(ask(), 8), spans((OLD, 8)))
        assert len(second.fake.requests[0].input_ids) == 3


# ------------------------------------------------------------------------------------------------- many


async def test_two_thousand_requests_survive_the_death_of_a_server(stage):
    answers = [stage.start(ask(number, max_tokens=4)) for number in range(2000)]
    await stage.until(lambda: stage.one.fake.num_in_flight + stage.two.fake.num_in_flight == 2000)
    assert stage.one.fake.num_in_flight == 1000
    stage.one.fake.step(2)
    stage.one.kill()
    await stage.until(lambda: stage.two.fake.num_in_flight == 2000)
    stage.two.fake.step(4)
    results = await asyncio.gather(*answers)
    assert {result.token_ids for result in results} == {tokens(ask(), 4)}
    assert {result.versions for result in results} == {spans((OLD, 4))}


CHUNKS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)))  # version and length


def request() -> GenerateRequest:
    return GenerateRequest(request_id="r", input_ids=(1,), sampling=SamplingParams(max_tokens=1000))


def chunk(step: int, length: int) -> TokenChunk:
    span = VersionSpan(version=WeightVersion(step=step), start=0, end=length)
    return TokenChunk(token_ids=(5,) * length, logprobs=(-1.0,) * length, versions=(span,))


@given(CHUNKS, st.integers(0, 20))
def test_spans_are_those_of_the_tokens(chunks, num_kept):
    partial = Partial(request())
    for step, length in chunks:
        partial.take(chunk(step, length))
    steps = [step for step, length in chunks for _ in range(length)][:num_kept]
    partial.cut(num_kept)
    spans = partial.result(FinishReason.ABORT).versions
    assert [span.version.step for span in spans for _ in range(span.start, span.end)] == steps
    assert all(a.version != b.version and a.end == b.start for a, b in pairwise(spans))
    assert partial.num_told == partial.num_tokens == len(steps)


def test_many_chunks_of_one_version_are_one_span():
    partial = Partial(request())
    for _ in range(500):
        partial.take(chunk(1, 1))
    assert len(partial._spans) == 1


def test_what_follows_an_untold_token_is_untold():
    partial = Partial(request())
    partial.take(chunk(1, 2))
    partial.take(TokenChunk(token_ids=(5,), logprobs=(-1.0,)))
    partial.take(chunk(1, 2))
    assert (partial.num_tokens, partial.num_told, partial.num_sure) == (5, 2, 2)


def test_another_server_samples_what_is_missing_of_the_fewest_and_the_most():
    partial = Partial(
        GenerateRequest(request_id="r", input_ids=(1,), sampling=SamplingParams(max_tokens=9, min_tokens=3))
    )
    asked: list[tuple[int, int]] = []
    for _ in range(3):
        sampling = partial.begin().sampling
        asked.append((sampling.min_tokens, sampling.max_tokens))
        partial.take(chunk(1, 2))
    assert asked == [(3, 9), (1, 7), (0, 5)]
