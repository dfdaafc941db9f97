"""Room for keys and values:

- a long prompt is prefilled in chunks, between which other rows decode; chunks on a GPU are longer
- a prompt that is prefilled again is counted once
- rows that outgrow the room are retracted and recomputed: log-probabilities are the same, and nothing is lost
- what is kept never exceeds the room; slots give their memory back
- the room is what was asked for, or what fits beside what is left free, and at least one context; on a GPU slots take
  whole contexts, and the prefix cache has the rest

Overflowing numbers affect only the row in which they arise:

- a row whose logits are not finite gets no token, and the rest of the batch is as without it
- under weights that overflow, each request is answered with an error; the engine lives, and the next weights show no
  trace of it
- a long prompt fails at its first chunk: aborted before the last one, it would leave bad values to others
"""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_agent.engine.embedded.decoder import Piece
from areal_agent.engine.embedded.kv_cache import KVCache, KVRoom, KVShape, SlotStore, plan_room
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.sampler import SamplingRows, sample
from areal_agent.engine.embedded.workload import CHUNK_TOKENS, GPU_CHUNK_TOKENS, TURN_TOKENS, Row, Workload
from areal_agent.errors import ConfigError, EngineUnreachable
from areal_agent.types import DiskWeights, GenerateRequest, SamplingParams, WeightVersion
from tests.engine.conftest import MAX_CONTEXT, Wrapped

CPU = torch.device("cpu")


class Noted(Wrapped):
    """It notes its steps: the lengths of prefilled pieces, or the number of decoded rows."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.steps: list[list[int] | int] = []

    def prefill(self, pieces: list[Piece]) -> torch.Tensor:
        self.steps.append([len(piece.ids) for piece in pieces])
        return self._runner.prefill(pieces)

    def decode(self, last_ids: list[int], lengths: list[int]) -> torch.Tensor:
        self.steps.append(len(lengths))
        return self._runner.decode(last_ids, lengths)


def load(folder, *, num_slots: int = 8, max_context: int = 512, kv_tokens: int | None = None) -> Noted:
    return Noted(
        ModelRunner(str(folder), device="cpu", num_slots=num_slots, max_context_tokens=max_context, kv_tokens=kv_tokens)
    )


def to_the_end(work: Workload, *rows: Row) -> None:
    for row in rows:
        work.add(row)
    while work.has_work():
        work.step()
        assert work.num_tokens == sum(row.num_tokens for row in work.slots)
        # The last token of a row has no keys yet.
        assert work.num_tokens + work.kv.prefixes.num_tokens <= work.kv.num_tokens + len(work.slots)


@pytest.fixture(scope="module")
def long(make_model):
    return make_model(seed=4, max_position_embeddings=8192)


def test_a_long_prompt_is_prefilled_in_chunks_between_decode_steps(long, truth):
    runner = load(long, max_context=8192)
    work = Workload(runner, WeightVersion())
    sampling = SamplingParams(max_tokens=20, seed=1)
    short = Row(request=GenerateRequest(request_id="a", input_ids=(5, 6, 7), sampling=sampling))
    work.add(short)
    work.step()
    ids = tuple(torch.randint(97, (2300,), generator=torch.Generator().manual_seed(1)).tolist())
    row = Row(request=GenerateRequest(request_id="b", input_ids=ids, sampling=sampling))
    runner.steps.clear()
    to_the_end(work, row)
    chunks = [step for step in runner.steps if isinstance(step, list)]
    assert [sum(chunk) for chunk in chunks] == [CHUNK_TOKENS] * 4 + [2300 - 4 * CHUNK_TOKENS]
    in_a_row = TURN_TOKENS // CHUNK_TOKENS
    assert runner.steps[: in_a_row + 2] == [*chunks[:in_a_row], 1, chunks[in_a_row]]
    for one in (short, row):
        result = one.answer.result()
        truth(long).check(one.request, result)


class OnGpu(Noted):
    """A device that calls itself a GPU and computes on the CPU."""

    device = torch.device("cuda")


def test_chunks_of_a_gpu_are_longer(long):
    runner = OnGpu(load(long, max_context=8192))
    work = Workload(runner, WeightVersion())
    work.add(Row(request=GenerateRequest(request_id="a", input_ids=(5,) * 3000, sampling=SamplingParams())))
    work.step()
    assert runner.steps == [[GPU_CHUNK_TOKENS]] and GPU_CHUNK_TOKENS > CHUNK_TOKENS


def test_rows_that_outgrow_the_room_are_retracted_and_lose_nothing(tiny, ask, truth):
    runner = load(tiny, max_context=128, kv_tokens=200)
    work = Workload(runner, WeightVersion())
    rows = [Row(request=ask(number, prompt_length=10 + number, max_tokens=90)) for number in range(6)]
    to_the_end(work, *rows)
    assert work.counts.retracted_requests > 0
    for row in rows:
        result = row.answer.result()
        assert len(result.token_ids) == 90 and len(result.versions) == 1
        truth(tiny).check(row.request, result)


def test_a_prompt_counts_once_however_often_it_is_prefilled(long):
    work = Workload(load(long, max_context=8192), WeightVersion())
    row = Row(request=GenerateRequest(request_id="a", input_ids=(3,) * 1200, sampling=SamplingParams(max_tokens=2)))
    work.add(row)
    work.step()
    work.retract()
    to_the_end(work)
    assert len(row.answer.result().token_ids) == 2
    assert (work.counts.prompt_tokens, work.counts.cached_tokens) == (1200, 0)


def test_an_abort_in_the_middle_of_a_prefill_leaves_the_others_right(long, ask, truth):
    work = Workload(load(long, max_context=8192), WeightVersion())
    others = [Row(request=ask(number, max_tokens=30)) for number in (1, 2)]
    for row in others:
        work.add(row)
    work.step()
    half = Row(request=GenerateRequest(request_id="half", input_ids=(3,) * 3000, sampling=SamplingParams(max_tokens=5)))
    work.add(half)
    work.step()
    work.abort("half")
    to_the_end(work)
    assert half.answer.result().token_ids == ()
    for row in others:
        result = row.answer.result()
        truth(long).check(row.request, result)


def test_a_released_slot_reads_as_zeros_and_its_neighbours_stay():
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=16)
    cache = KVCache(shape, num_slots=3, num_positions=256, device=CPU, dtype=torch.float32)
    for slot in range(3):
        for layer in range(2):
            cache.write(layer, slot, 0, torch.ones(2, 256, 16), torch.ones(2, 256, 16))
    cache.release(1)
    means = [float(cache.copy_out(slot, 0, 256).mean()) for slot in range(3)]
    assert means[0] == means[2] == 1.0
    assert means[1] in (0.0, 1.0), "1 where the platform cannot give memory back"


def room_of(**changes: object) -> KVRoom:
    """Plan for four requests of at most 100 tokens."""
    asked = {"num_slots": 4, "max_context_tokens": 100, "kv_tokens": None, "leave_bytes": None}
    return plan_room(**(asked | {"token_bytes": 1000, "device": CPU} | changes))


def test_the_room_is_what_was_asked_for_or_two_contexts_a_slot_where_memory_allows():
    room = room_of(kv_tokens=250)
    assert (room.num_slots, room.kv_tokens, room.reserved_tokens) == (4, 250, 0)
    assert room_of().kv_tokens == 800


def test_engines_that_share_the_memory_divide_it():
    """Tokens are so large here that the memory is the limit."""
    alone, of_three = (
        room_of(num_slots=2**40, max_context_tokens=1, num_sharing=number).kv_tokens for number in (1, 3)
    )
    assert alone > 3 and of_three == alone // 3


@pytest.mark.parametrize(
    ("kv_tokens", "token_bytes", "remedy"), [(99, 1000, "raise kv_tokens"), (None, 10**15, "memory")]
)
def test_room_for_less_than_one_context_is_refused(kv_tokens, token_bytes, remedy):
    with pytest.raises(ConfigError, match=rf"max_context_tokens = 100; .*{remedy}"):
        room_of(kv_tokens=kv_tokens, token_bytes=token_bytes)


def test_the_room_is_what_is_left_free_by_order():
    """Leaving all of the machine's memory free leaves none, whatever is free now."""
    with pytest.raises(ConfigError, match="leave_gib"):
        room_of(leave_bytes=2**60)
    assert room_of(leave_bytes=0).kv_tokens == 800


@pytest.mark.parametrize(
    ("kv_tokens", "num_slots", "reserved"), [(99_999, 4, 400), (800, 4, 400), (799, 3, 300), (100, 1, 100)]
)
def test_slots_of_a_gpu_take_at_most_half_of_the_room(kv_tokens, num_slots, reserved, caplog):
    room = room_of(kv_tokens=kv_tokens, device=torch.device("cuda"))
    assert (room.num_slots, room.kv_tokens, room.reserved_tokens) == (num_slots, kv_tokens, reserved)
    assert (f"{num_slots} requests run at once and not 4" in caplog.text) == (num_slots < 4)


def test_the_prefix_cache_has_what_slots_leave(tiny, ask):
    runner = load(tiny, num_slots=2, max_context=128)
    as_on_a_gpu = KVRoom(num_slots=2, kv_tokens=300, reserved_tokens=2 * 128)
    runner.kv = SlotStore(runner.kv.cache, as_on_a_gpu, max_context_tokens=128)
    work = Workload(runner, WeightVersion())
    for number in range(4):
        work.add(Row(request=ask(number, prompt_length=10 + number, max_tokens=20)))
    held: list[int] = []
    while work.has_work():
        work.step()
        held.append(work.kv.prefixes.num_tokens)
    assert 0 < max(held) <= 300 - 2 * 128


ROWS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_p=0.5),
    SamplingParams(top_k=3),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
@pytest.mark.parametrize("spoilt", range(len(ROWS)))
def test_the_other_rows_are_as_without_it(spoilt, spoil):
    logits = torch.randn(len(ROWS), 100, generator=torch.Generator().manual_seed(0))
    rows = SamplingRows.of(ROWS, range(len(ROWS)), [2] * len(ROWS), vocab_size=100, device=logits.device)
    right = sample(logits, rows, [0] * len(ROWS))
    logits[spoilt, 7] = spoil
    found = sample(logits, rows, [0] * len(ROWS))
    others = [number for number in range(len(ROWS)) if number != spoilt]
    assert found.logprobs[spoilt] != found.logprobs[spoilt], "NaN alone differs from itself"
    assert 0 <= found.token_ids[spoilt] < 100
    for name in ("token_ids", "logprobs", "top_logprobs"):
        assert [getattr(found, name)[number] for number in others] == [getattr(right, name)[n] for n in others]


class Overflowing(Wrapped):
    """It once gives logits of NaN to the decoding row in one slot."""

    def __init__(self, runner: ModelRunner, slot: int) -> None:
        super().__init__(runner)
        self._slot = slot

    def decode(self, last_ids, lengths):
        logits = self._runner.decode(last_ids, lengths).clone()
        if len(lengths) == 4 and max(lengths) == 20:
            logits[self._slot] = float("nan")
        return logits


@pytest.mark.parametrize("slot", [0, 2, 3])
def test_one_row_is_answered_with_an_error_and_the_others_go_on(slot, tiny, ask, truth):
    work = Workload(Overflowing(load(tiny), slot), WeightVersion())
    rows = [Row(request=ask(number, max_tokens=25)) for number in range(4)]
    to_the_end(work, *rows)
    failed = [row for row in rows if row.answer.exception() is not None]
    assert failed == [rows[slot]]
    assert isinstance(failed[0].answer.exception(), EngineUnreachable)
    assert "its logits are not finite" in str(failed[0].answer.exception())
    for row in (row for row in rows if row not in failed):
        truth(tiny).check(row.request, row.answer.result())


@pytest.fixture
def overflowing(tiny, tmp_path) -> DiskWeights:
    """Finite weights with infinite products: keys and values of the second layer become NaN."""
    folder = tmp_path / "overflowing"
    folder.mkdir()
    weights = load_file(tiny / "model.safetensors")
    for name in ("v_proj", "o_proj"):
        weights[f"model.layers.0.self_attn.{name}.weight"].fill_(1e34)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return DiskWeights(path=str(folder))


async def test_under_the_next_weights_nothing_is_left(tiny, overflowing, served, ask, truth):
    """Positions beyond a short row are read beside a longer one under a mask, and 0 times NaN is NaN."""
    asked = [ask(number, prompt_length=10 + 40 * number, max_tokens=20) for number in range(6)]
    await served.engine.update_weights(overflowing, WeightVersion(step=8))
    failures = await asyncio.gather(
        *(served.engine.generate(ask(10 + number, prompt_length=300)) for number in range(8)), return_exceptions=True
    )
    assert [type(failure) for failure in failures] == [EngineUnreachable] * 8
    assert all("weight version 0:8" in str(failure) for failure in failures)
    await served.engine.load(tiny, WeightVersion(step=9))
    results = await asyncio.gather(*(served.engine.generate(request) for request in asked))
    for request, result in zip(asked, results, strict=True):
        truth(tiny).check(request, result)


def test_a_long_prompt_leaves_nothing_in_the_middle(make_model, overflowing, ask, truth):
    folder = make_model(seed=0, max_position_embeddings=4 * MAX_CONTEXT)
    runner = ModelRunner(str(folder), device="cpu", num_slots=2, max_context_tokens=4 * MAX_CONTEXT)
    work = Workload(runner, WeightVersion(step=8))
    right, wrong = (load_file(Path(path) / "model.safetensors") for path in (folder, overflowing.path))
    work.swap(wrong, WeightVersion(step=8), flush_cache=True)
    long = Row(request=ask(9, prompt_length=3 * MAX_CONTEXT))
    work.add(long)
    work.step()
    work.abort(long.request.request_id)
    assert "after 512 tokens" in str(long.answer.exception(0))
    work.swap(right, WeightVersion(step=9), flush_cache=True)
    rows = [Row(request=ask(number, prompt_length=10 + 300 * number, max_tokens=20)) for number in range(2)]
    to_the_end(work, *rows)
    for row in rows:
        truth(folder).check(row.request, row.answer.result())
