"""The embedded engine on a GPU; skipped without one. `pytest -m cuda` runs these and the others like them.

- log-probabilities are transformers' in float32, and in bfloat16 as far as that tells; also over a long prompt in
  chunks and over a prefix hit, after a swap, and after the memory of keys and values was released
- decode steps are recorded as graphs, also after that release; prompts are one call of a kernel in bfloat16
- no token of weight 0 is drawn
- engine and trainer share the GPU in a whole run
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_agent.dtype import DType
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.sampler import SamplingRows, sample
from areal_agent.engine.embedded.workload import GPU_CHUNK_TOKENS, Row, Workload
from areal_agent.types import GenerateRequest, GenerateResult, SamplingParams, WeightVersion

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

ROOT = Path(__file__).parent.parent.parent
TOLERANCE = 1e-3  # of float32; sums of a GPU are in another order
BFLOAT16_TOLERANCE = 0.05  # of the mean, over peaked distributions; a single one may be further off


def work_on(folder: Path, *, dtype: DType = "float32", max_context_tokens: int = 512) -> Workload:
    runner = ModelRunner(
        str(folder),
        device="cuda",
        dtype=dtype,
        num_slots=8,
        max_context_tokens=max_context_tokens,
        kv_tokens=16 * max_context_tokens,
    )
    return Workload(runner, WeightVersion(step=7))


def answers(work: Workload, *requests: GenerateRequest) -> Sequence[GenerateResult]:
    rows = [Row(request=request) for request in requests]
    for row in rows:
        work.add(row)
    while work.has_work():
        work.step()
    return [row.answer.result() for row in rows]


@pytest.fixture
def requests(ask):
    """Requests of different lengths, more than there are slots."""
    return [ask(number, prompt_length=1 + 37 * number % 150, max_tokens=1 + 17 * number % 60) for number in range(20)]


def differences(known, requests, results) -> torch.Tensor:
    return torch.cat(
        [
            torch.tensor(result.logprobs) - torch.tensor(known.logprobs(one.input_ids, result.token_ids))
            for one, result in zip(requests, results, strict=True)
        ]
    ).abs()


def test_probabilities_are_those_of_transformers(tiny, requests, truth):
    results = answers(work_on(tiny), *requests)
    assert differences(truth(tiny), requests, results).max() < TOLERANCE


def test_steps_are_replayed_and_prompts_are_one_call(tiny):
    runner = work_on(tiny, dtype="bfloat16")._runner
    assert runner.fixed is not None and runner.fixed.num_graphs > 0 and runner.kernel is not None
    runner.release_memory()
    assert runner.fixed.num_graphs == 0
    runner.resume_memory()
    assert runner.fixed.num_graphs > 0


def test_probabilities_in_bfloat16_are_those_of_float32_on_average(tiny, requests, truth):
    results = answers(work_on(tiny, dtype="bfloat16"), *requests)
    assert differences(truth(tiny), requests, results).mean() < BFLOAT16_TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "measure", "bound"),
    [("float32", torch.max, TOLERANCE), ("bfloat16", torch.mean, BFLOAT16_TOLERANCE)],
)
def test_a_long_prompt_in_chunks_and_a_prefix_hit(dtype, measure, bound, make_model, ask, truth):
    folder = make_model(seed=4, max_position_embeddings=4096)
    work = work_on(folder, dtype=dtype, max_context_tokens=4096)
    first = ask(1, prompt_length=GPU_CHUNK_TOKENS + 500, max_tokens=20)
    (answer,) = answers(work, first)
    ids = (*first.input_ids, *answer.token_ids, 1, 2, 3)
    second = type(first)(request_id="second", input_ids=ids, sampling=SamplingParams(max_tokens=30, seed=3))
    (after,) = answers(work, second)
    assert after.cached_tokens >= GPU_CHUNK_TOKENS + 500
    assert measure(differences(truth(folder), [first, second], [answer, after])) < bound


def test_a_swap_is_seen(tiny, other, requests, truth):
    work = work_on(tiny)
    answers(work, *requests)
    work.swap(load_file(other / "model.safetensors"), WeightVersion(step=8), flush_cache=True)
    assert differences(truth(other), requests, answers(work, *requests)).max() < TOLERANCE


def test_memory_is_released_and_taken_again(tiny, requests, truth):
    work = work_on(tiny)
    answers(work, *requests)
    for _ in range(2):
        held = torch.cuda.memory_allocated()
        work.release_memory()
        assert torch.cuda.memory_allocated() < held
        work.resume_memory()
        assert differences(truth(tiny), requests, answers(work, *requests)).max() < TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 64])
def test_no_token_of_weight_0_is_drawn(num_rows):
    vocab_size, device = 151_936, torch.device("cuda")
    logits = torch.full((num_rows, vocab_size), float("-inf"), device=device)
    allowed = torch.randperm(vocab_size, device=device)[:300]
    logits[:, allowed] = torch.randn(num_rows, 300, device=device)
    rows = SamplingRows.of([SamplingParams()] * num_rows, list(range(num_rows)), vocab_size=vocab_size, device=device)
    drawn = {token for start in range(500) for token in sample(logits, rows, [start] * num_rows).token_ids}
    assert drawn <= set(allowed.tolist())


@pytest.mark.slow
def test_engine_and_trainer_share_the_gpu_in_a_whole_run(tmp_path):
    run = tmp_path / "run"
    overrides = ["engine.device=cuda", "trainer.device=cuda", "steps=3"]
    command = [sys.executable, "-m", "areal_agent.train", "--config", "configs/quickstart.yaml", *overrides]
    command += ["eval.num_tasks=10", f"run_dir={run}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert "success_after" in json.loads((run / "summary.json").read_text())
