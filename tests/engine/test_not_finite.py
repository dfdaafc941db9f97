"""Overflowing numbers affect only the row in which they arise:

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

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.sampler import SamplingRows, sample
from areal_agent.engine.embedded.workload import Row, Workload
from areal_agent.errors import EngineUnreachable
from areal_agent.types import DiskWeights, SamplingParams, WeightVersion
from tests.engine.conftest import MAX_CONTEXT
from tests.engine.test_room import load, to_the_end

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


class Overflowing:
    """A ModelRunner that once gives logits of NaN to the decoding row in one slot."""

    def __init__(self, runner, slot: int) -> None:
        self._runner = runner
        self._slot = slot

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

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


async def test_under_the_next_weights_nothing_is_left(tiny, overflowing, serve, ask, truth):
    """Positions beyond a short row are read beside a longer one under a mask, and 0 times NaN is NaN."""
    asked = [ask(number, prompt_length=10 + 40 * number, max_tokens=20) for number in range(6)]
    async with serve(tiny) as served:
        await served.engine.update_weights(overflowing, WeightVersion(step=8))
        failures = await asyncio.gather(
            *(served.engine.generate(ask(10 + number, prompt_length=300)) for number in range(8)),
            return_exceptions=True,
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
