"""Room for keys and values:

- a long prompt is prefilled in chunks, between which other rows decode; chunks on a GPU are longer
- a prompt that is prefilled again is counted once
- rows that outgrow the room are retracted and recomputed: log-probabilities are the same, and nothing is lost
- what is kept never exceeds the room; slots give their memory back
- the room is what was asked for, or what fits beside what is left free, and at least one context; on a GPU slots take
  whole contexts, and the prefix cache has the rest
"""

import pytest
import torch

from areal_agent.engine.embedded.kv_cache import KVCache, KVRoom, KVShape, SlotStore, plan_room
from areal_agent.engine.embedded.model import ModelRunner, Piece
from areal_agent.engine.embedded.workload import CHUNK_TOKENS, GPU_CHUNK_TOKENS, TURN_TOKENS, Row, Workload
from areal_agent.errors import ConfigError
from areal_agent.types import GenerateRequest, SamplingParams, WeightVersion

CPU = torch.device("cpu")


class Noted:
    """A ModelRunner that notes its steps: the lengths of prefilled pieces, or the number of decoded rows."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.steps: list[list[int] | int] = []

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

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
        # The last token of a row has no keys yet.
        assert sum(work.lengths()) + work.kv.prefixes.num_tokens <= work.kv.num_tokens + len(work.slots)


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


def test_the_room_is_what_was_asked_for():
    room = room_of(kv_tokens=250)
    assert (room.num_slots, room.kv_tokens, room.reserved_tokens) == (4, 250, 0)


def test_the_room_is_two_contexts_a_slot_where_memory_allows():
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
