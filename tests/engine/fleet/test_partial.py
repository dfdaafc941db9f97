"""The tokens that a request has so far: a span of one version stays one over many chunks, and a cut is exact."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.fleet.relay import Partial
from areal_agent.types import FinishReason, GenerateRequest, SamplingParams, TokenChunk, VersionSpan, WeightVersion

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
