"""The prefix cache:

- after any holds, matches, splits and drops, a match is the longest held beginning of the ids, with the keys and values
  of exactly those ids, and the token count is right
- the least recently used goes first, and never a node that others continue
- the next turn of a conversation computes only its new tokens, and reports how many were cached
- siblings that arrive together compute their prompt once; log-probabilities are those of transformers
- a swap of weights clears what the old ones computed, also while answers keep their keys (in place)
"""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.engine.embedded.kv_cache import PrefixCache
from areal_agent.types import GenerateRequest, PauseMode, SamplingParams, WeightVersion
from tests.engine.conftest import both_ways

fixed_shapes = both_ways


def ids_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def keys_of(ids: np.ndarray) -> torch.Tensor:
    """Keys that differ for every prefix, `[1, 1, T, 1]`: for each token, a hash of all tokens up to it."""
    hashes, running = [], 7
    for value in ids.tolist():
        running = (running * 31 + value + 1) % 1_000_003
        hashes.append(float(running))
    return torch.tensor(hashes, dtype=torch.float64)[None, None, :, None]


def hold(cache: PrefixCache, ids: np.ndarray) -> None:
    cache.hold(ids, lambda start, stop: keys_of(ids)[:, :, start:stop].clone())


def held(cache: PrefixCache, ids: np.ndarray) -> int:
    """Check that the match of `ids` is right, and return its length."""
    prefix = cache.match(ids)
    keys = torch.cat([*prefix.parts, torch.empty(1, 1, 0, 1, dtype=torch.float64)], dim=2)
    assert torch.equal(keys, keys_of(ids[: prefix.num_tokens]))
    return prefix.num_tokens


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda values: ids_of(*values))


def shared(a: np.ndarray, b: np.ndarray) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(sequences, max_size=12), sequences)
def test_a_match_is_the_longest_that_is_held(all_held, asked):
    cache = PrefixCache()
    for ids in all_held:
        hold(cache, ids)
    assert held(cache, asked) == max((shared(ids, asked) for ids in all_held), default=0)
    prefixes = {tuple(ids[:end]) for ids in all_held for end in range(1, len(ids) + 1)}
    assert cache.num_tokens == len(prefixes)


@given(st.lists(st.tuples(sequences, st.integers(0, 40)), max_size=12), sequences)
def test_shrinking_keeps_it_right(steps, asked):
    cache = PrefixCache()
    for ids, limit in steps:
        hold(cache, ids)
        cache.shrink(limit)
        assert cache.num_tokens <= limit
        held(cache, asked)
    cache.shrink(0)
    assert (cache.num_tokens, held(cache, asked)) == (0, 0)


def test_the_least_recently_used_leaf_goes_first():
    cache = PrefixCache()
    for ids in (ids_of(1, 1, 2, 2), ids_of(1, 1, 3, 3), ids_of(4, 4)):
        hold(cache, ids)
    held(cache, ids_of(1, 1, 2, 2))
    cache.shrink(cache.num_tokens - 1)
    assert held(cache, ids_of(1, 1, 3, 3)) == 2
    cache.shrink(cache.num_tokens - 1)
    assert held(cache, ids_of(4, 4)) == 0
    assert held(cache, ids_of(1, 1, 2, 2)) == 4


def test_a_copy_is_made_of_what_is_new_only():
    cache, copied = PrefixCache(), []

    def copy_out(start: int, stop: int) -> torch.Tensor:
        copied.append((start, stop))
        return torch.zeros(1, 1, stop - start, 1)

    cache.hold(ids_of(1, 2, 3), copy_out)
    cache.hold(ids_of(1, 2, 3, 4, 5), copy_out)
    cache.hold(ids_of(1, 2), copy_out)
    assert copied == [(0, 3), (3, 5)]


TOLERANCE = 1e-4
NEW = WeightVersion(step=8)


def request(number: int, ids: tuple[int, ...], max_tokens: int = 10) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return GenerateRequest(request_id=f"turn-{number:04}", input_ids=ids, sampling=sampling)


async def test_a_turn_computes_its_new_tokens_only(tiny, served, ask, truth):
    ids = ask(1, prompt_length=50).input_ids
    first = await served.engine.generate(request(1, ids))
    ids = (*ids, *first.token_ids, *ask(2, prompt_length=7).input_ids)
    second = await served.engine.generate(request(2, ids))
    again = await served.engine.generate(request(3, ids))
    assert first.cached_tokens == 0
    assert second.cached_tokens == 50 + 9, "all but the last sampled token, which never went through the model"
    assert again.cached_tokens == len(ids) - 1, "the last token of a prompt is always computed: it gives the next"
    for result in (second, again):
        assert result.logprobs == pytest.approx(truth(tiny).logprobs(ids, result.token_ids), abs=TOLERANCE)


async def test_siblings_that_arrive_together_compute_their_prompt_once(tiny, schedule, ask, truth):
    ids = ask(1, prompt_length=200).input_ids
    with schedule(tiny) as (scheduler, _):
        scheduler.pause(PauseMode.RETRACT)
        answers = [scheduler.submit(request(number, ids)) for number in range(6)]
        scheduler.resume()
        results = [await asyncio.wrap_future(answer) for answer in answers]
    assert sorted(result.cached_tokens for result in results) == [0, 199, 199, 199, 199, 199]
    for result in results:
        assert result.logprobs == pytest.approx(truth(tiny).logprobs(ids, result.token_ids), abs=TOLERANCE)


async def test_a_swap_forgets_what_was_computed(other, served, ask, truth, share):
    ids = ask(1, prompt_length=40).input_ids
    await served.engine.generate(request(1, ids))
    await served.engine.update_weights(share(other), NEW)
    result = await served.engine.generate(request(2, ids))
    assert result.cached_tokens == 0
    assert result.logprobs == pytest.approx(truth(other).logprobs(ids, result.token_ids), abs=TOLERANCE)


async def test_keys_of_two_sets_of_weights_are_never_shared(other, served, ask, truth, share):
    ids = ask(1, prompt_length=40).input_ids
    served.gate.shut()
    mixed = asyncio.create_task(served.engine.generate(request(1, ids, max_tokens=60)))
    await served.gate.steps(10)
    await served.interrupt(PauseMode.IN_PLACE, share(other), NEW)
    ids = (*ids, *(await mixed).token_ids)
    result = await served.engine.generate(request(2, ids))
    assert result.cached_tokens == 0
    assert result.logprobs == pytest.approx(truth(other).logprobs(ids, result.token_ids), abs=TOLERANCE)
