"""Over pages an engine answers as over slots: log-probabilities within 1e-4 of transformers' plain forward,

- for every kind of attention, in batches of different lengths, more requests than slots
- over a long prompt that is prefilled in chunks, and over prefix hits of whole pages
- after retractions for want of pages, after swaps that compute anew and swaps in place
- after the memory was released and taken again
And the same seed gives the same tokens as over slots. Rows that begin alike share pages; in the end none is lost.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.workload import Row, Workload
from areal_agent.types import GenerateRequest, SamplingParams, WeightVersion

TOLERANCE = 1e-4
NEW = WeightVersion(step=8)


@pytest.fixture(scope="module")
def long(make_model):
    return make_model(seed=4, max_position_embeddings=8192)


def request(number: int, ids: tuple[int, ...], max_tokens: int = 10) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return GenerateRequest(request_id=f"turn-{number:04}", input_ids=ids, sampling=sampling)


def assert_true(known, requests, results) -> None:
    for one, result in zip(requests, results, strict=True):
        assert result.logprobs == pytest.approx(known.logprobs(one.input_ids, result.token_ids), abs=TOLERANCE)


def weights_of(runner: ModelRunner, folder) -> dict[str, torch.Tensor]:
    stored = load_file(folder / "model.safetensors")
    return {name: stored[name] for name in stored}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {}),
        ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4}),
    ],
)
def test_batches_of_different_lengths(family, config, make_model, desk, ask, truth):
    folder = make_model(family, seed=3, is_shaken=True, **config)
    requests = [ask(i, prompt_length=1 + 13 * i % 90, max_tokens=1 + 7 * i % 40) for i in range(20)]
    assert_true(truth(folder), requests, desk(folder, num_slots=6).answers(*requests))


def test_the_tokens_are_those_of_slots(tiny, desk, ask):
    requests = [ask(i, prompt_length=5 + 11 * i, max_tokens=30) for i in range(6)]
    slots = Workload(ModelRunner.load(str(tiny), device="cpu", num_slots=8, max_context_tokens=512), WeightVersion())
    rows = [Row.of(one) for one in requests]
    for row in rows:
        slots.add(row)
    while slots.has_work():
        slots.step()
    paged = desk(tiny).answers(*requests)
    assert [result.token_ids for result in paged] == [row.answer.result().token_ids for row in rows]


def test_a_long_prompt_in_chunks_between_others(long, desk, ask, truth):
    at = desk(long, max_context=8192)
    first = ask(1, max_tokens=30)
    (row,) = at.add(first)
    at.steps(3)
    ids = tuple(torch.randint(97, (1700,), generator=torch.Generator().manual_seed(1)).tolist())
    second = request(2, ids, max_tokens=5)
    (answer,) = at.answers(second)
    assert_true(truth(long), [first, second], [row.answer.result(), answer])


def test_a_turn_computes_what_is_not_in_whole_pages(tiny, desk, ask, truth):
    at = desk(tiny)
    ids = ask(1, prompt_length=50).input_ids
    (first,) = at.answers(request(1, ids))
    turn = request(2, (*ids, *first.token_ids, *ask(2, prompt_length=7).input_ids))
    (second,) = at.answers(turn)
    (again,) = at.answers(replace(turn, request_id="again"))
    assert (first.cached_tokens, second.cached_tokens) == (0, 48), "of 59 tokens that have been through the model"
    assert again.cached_tokens == 64, "of 67, the last of which is always computed"
    assert_true(truth(tiny), [turn, turn], [second, again])


def test_the_last_token_is_computed_where_pages_end(tiny, desk, ask, truth):
    at = desk(tiny)
    one = ask(1, prompt_length=64)
    at.answers(one)
    (again,) = at.answers(replace(one, request_id="again"))
    assert again.cached_tokens == 48
    assert_true(truth(tiny), [one], [again])


def test_siblings_share_the_pages_of_their_prompt(tiny, desk, ask, truth):
    at = desk(tiny)
    ids = ask(1, prompt_length=200).input_ids
    requests = [request(number, ids, max_tokens=30) for number in range(6)]
    rows = at.add(*requests)
    at.steps(4)
    assert at.work.num_running == 6
    assert at.work.num_used_tokens <= 192 + 6 * 48, "of 1,200 tokens of prompts"
    at.to_the_end()
    results = [row.answer.result() for row in rows]
    assert sorted(result.cached_tokens for result in results) == [0, 192, 192, 192, 192, 192]
    assert_true(truth(tiny), requests, results)


def test_rows_that_computed_the_same_at_once_share_it_afterwards(tiny, desk, ask, truth):
    at = desk(tiny)
    one = ask(1, prompt_length=100, max_tokens=20)
    first, second = at.add(one, replace(one, request_id="other"))
    second.has_waited_for_sibling = True  # so it does not wait for the first one's pages
    at.steps(2)
    assert at.work.num_used_tokens == 6 * 16 + 2 * 16
    at.to_the_end()
    assert_true(truth(tiny), [one, one], [first.answer.result(), second.answer.result()])


def test_rows_that_outgrow_the_pages_are_retracted_and_lose_nothing(tiny, desk, ask, truth):
    at = desk(tiny, max_context=128, kv_tokens=200)
    requests = [ask(number, prompt_length=10 + number, max_tokens=90) for number in range(6)]
    results = at.answers(*requests)
    assert at.work.counts.retracted_requests > 0
    assert all(len(result.token_ids) == 90 and len(result.versions) == 1 for result in results)
    assert_true(truth(tiny), requests, results)


def test_a_context_that_fills_all_pages_is_served(tiny, desk, ask, truth):
    at = desk(tiny, num_slots=2, max_context=100, kv_tokens=100)
    requests = [ask(number, prompt_length=10, max_tokens=90) for number in range(2)]
    assert_true(truth(tiny), requests, at.answers(*requests))


def test_a_swap_computes_anew(tiny, other, desk, ask, truth):
    at = desk(tiny)
    one = ask(1, prompt_length=40, max_tokens=40)
    (row,) = at.add(one)
    at.steps(12)
    at.work.swap(weights_of(at.runner, other), NEW, flush_cache=True)
    at.to_the_end()
    result = row.answer.result()
    split = result.versions[0].end
    for folder, part in ((tiny, slice(split)), (other, slice(split, None))):
        expected = truth(folder).logprobs(one.input_ids, result.token_ids)
        assert result.logprobs[part] == pytest.approx(expected[part], abs=TOLERANCE)
    (again,) = at.answers(replace(one, request_id="again"))
    assert again.cached_tokens == 32, "of what was computed under the new weights"
    assert_true(truth(other), [one], [again])


def test_pages_of_two_sets_of_weights_are_never_shared(tiny, other, desk, ask, truth):
    at = desk(tiny)
    ids = ask(1, prompt_length=40).input_ids
    (row,) = at.add(request(1, ids, max_tokens=60))
    at.steps(12)
    at.work.swap(weights_of(at.runner, other), NEW, flush_cache=False)
    at.to_the_end()
    assert [span.version for span in row.answer.result().versions] == [WeightVersion(step=7), NEW]
    turn = request(2, (*ids, *row.answer.result().token_ids))
    (result,) = at.answers(turn)
    assert result.cached_tokens == 0
    assert_true(truth(other), [turn], [result])


def test_memory_that_was_released_comes_back(tiny, desk, ask, truth):
    at = desk(tiny)
    one = ask(1, prompt_length=40, max_tokens=40)
    (row,) = at.add(one)
    at.steps(12)
    at.work.release_memory()
    assert at.work.num_used_tokens == at.work.num_cached_tokens == 0
    at.work.resume_memory()
    at.to_the_end()
    assert_true(truth(tiny), [one], [row.answer.result()])


def test_an_abort_in_the_middle_leaves_the_others_right(long, desk, ask, truth):
    at = desk(long, max_context=8192)
    requests = [ask(number, max_tokens=30) for number in (1, 2, 3)]
    rows = at.add(*requests)
    at.steps(3)
    at.add(request(9, (3,) * 3000))
    at.steps(2)
    at.work.abort("turn-0009")
    at.work.abort(requests[0].request_id)
    at.to_the_end()
    assert_true(truth(long), requests, [row.answer.result() for row in rows])


def test_two_thousand_rows_are_answered_and_no_page_is_lost(tiny, desk, ask):
    at = desk(tiny, num_slots=64, kv_tokens=2000)
    results = at.answers(*(ask(number, max_tokens=2) for number in range(2000)))
    assert all(len(result.token_ids) == 2 for result in results)
    assert at.work.num_used_tokens == 0
    at.work.swap({}, NEW, flush_cache=True)
    (row,) = at.add(ask(1, prompt_length=10))
    at.work.step()
    assert (at.work.num_used_tokens, at.work.num_cached_tokens) == (16, 0)
    at.to_the_end()
    assert row.answer.done()
