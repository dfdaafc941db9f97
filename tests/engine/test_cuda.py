"""The embedded engine on a GPU, over pages; skipped without one. `pytest -m cuda` runs these and the others like them.

- with CUDA graphs and without, log-probabilities are transformers' in float32, and in bfloat16 as far as that tells
- a swap after steps were recorded is seen by them; memory that was released and taken again is recorded anew, each time
- steps are recorded while another thread uses the GPU
- no token of weight 0 is drawn
- engine and trainer share the GPU in a whole run, weights by CUDA IPC
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.paged.decode_graphs import CudaRecorder
from areal_agent.engine.embedded.sampler import SamplingRows, sample
from areal_agent.engine.embedded.workload import GPU_CHUNK_TOKENS
from areal_agent.types import SamplingParams, WeightVersion
from tests.engine.paged.conftest import Desk

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

ROOT = Path(__file__).parent.parent.parent
TOLERANCE = 1e-3  # of float32; sums of a GPU are in another order
BFLOAT16_TOLERANCE = 0.05  # of the mean, over peaked distributions; a single one may be further off


@pytest.fixture(params=["steps one by one", "CUDA graphs"])
def has_graphs(request: pytest.FixtureRequest) -> bool:
    return request.param == "CUDA graphs"


def desk_of(
    folder: Path, *, has_graphs: bool, dtype: torch.dtype = torch.float32, max_context_tokens: int = 512
) -> Desk:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda").requires_grad_(False).eval()
    runner = ModelRunner(
        model,
        model_path=str(folder),
        num_slots=8,
        max_context_tokens=max_context_tokens,
        kv_tokens=8 * max_context_tokens,
        recorder=CudaRecorder() if has_graphs else None,
    )
    return Desk(runner)


@pytest.fixture
def requests(ask):
    """Of different lengths, more than there are slots."""
    return [ask(number, prompt_length=1 + 37 * number % 150, max_tokens=1 + 17 * number % 60) for number in range(20)]


def differences(known, requests, results) -> torch.Tensor:
    return torch.cat(
        [
            torch.tensor(result.logprobs) - torch.tensor(known.logprobs(one.input_ids, result.token_ids))
            for one, result in zip(requests, results, strict=True)
        ]
    ).abs()


def test_probabilities_are_those_of_transformers(has_graphs, tiny, requests, truth):
    results = desk_of(tiny, has_graphs=has_graphs).answers(*requests)
    assert differences(truth(tiny), requests, results).max() < TOLERANCE


def test_probabilities_in_bfloat16_are_those_of_float32_on_average(has_graphs, tiny, requests, truth):
    results = desk_of(tiny, has_graphs=has_graphs, dtype=torch.bfloat16).answers(*requests)
    assert differences(truth(tiny), requests, results).mean() < BFLOAT16_TOLERANCE


def test_a_long_prompt_in_chunks_and_a_prefix_hit(has_graphs, make_model, ask, truth):
    folder = make_model(seed=4, max_position_embeddings=4096)
    at = desk_of(folder, has_graphs=has_graphs, max_context_tokens=4096)
    first = ask(1, prompt_length=GPU_CHUNK_TOKENS + 500, max_tokens=20)
    (answer,) = at.answers(first)
    ids = (*first.input_ids, *answer.token_ids, 1, 2, 3)
    second = type(first)(request_id="second", input_ids=ids, sampling=SamplingParams(max_tokens=30, seed=3))
    (after,) = at.answers(second)
    assert after.cached_tokens >= GPU_CHUNK_TOKENS + 500
    assert differences(truth(folder), [first, second], [answer, after]).max() < TOLERANCE


def test_a_swap_is_seen_by_what_was_recorded(has_graphs, tiny, other, requests, truth):
    at = desk_of(tiny, has_graphs=has_graphs)
    at.answers(*requests)
    at.work.swap(load_file(other / "model.safetensors"), WeightVersion(step=8), flush_cache=True)
    assert differences(truth(other), requests, at.answers(*requests)).max() < TOLERANCE


def test_memory_that_was_released_is_recorded_anew(tiny, requests, truth, caplog):
    at = desk_of(tiny, has_graphs=True)
    at.answers(*requests)
    for _ in range(2):
        held = torch.cuda.memory_allocated()
        at.work.release_memory()
        assert torch.cuda.memory_allocated() < held
        at.work.resume_memory()
        assert differences(truth(tiny), requests, at.answers(*requests)).max() < TOLERANCE
    assert "without CUDA graphs" not in caplog.text


def test_steps_are_recorded_while_another_thread_uses_the_gpu(tiny, requests, truth, caplog):
    is_done = threading.Event()

    def use() -> None:
        while not is_done.is_set():
            torch.ones(2**20, device="cuda").sum().item()

    user = threading.Thread(target=use)
    user.start()
    try:
        results = desk_of(tiny, has_graphs=True).answers(*requests)
    finally:
        is_done.set()
        user.join()
    assert differences(truth(tiny), requests, results).max() < TOLERANCE
    assert "without CUDA graphs" not in caplog.text


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
    overrides = ["engine.device=cuda", "trainer.device=cuda", "trainer.transfer=cuda_ipc", "steps=3"]
    command = [sys.executable, "-m", "areal_agent.train", "--config", "configs/quickstart.yaml", *overrides]
    command += ["eval.num_tasks=10", f"run_dir={run}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert "success_after" in json.loads((run / "summary.json").read_text())
    assert "without CUDA graphs" not in done.stdout + done.stderr
