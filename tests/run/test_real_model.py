"""SmolLM2-135M-Instruct, a real language model in float32, which `AREAL_AGENT_SMOLLM2` names (tests/smollm2.py).

1. The engine's greedy answers are transformers'. 2. Two steps of its recipe train it: engine and trainer agree on every
token before and after a push, and the ledger proves it. 3. The checkpoint is another model, to transformers and to us.
"""

import os
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.embedded.decoder import Piece
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.ledger.verify import verify
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.types import GenerateRequest, SamplingParams
from tests.cluster.conftest import serving
from tests.commands import run

MODEL = Path(os.environ.get("AREAL_AGENT_SMOLLM2", "nowhere"))
QUESTIONS = ("What is 3 + 4?", "Name three fruits.", "Why is the sky blue?")
NUM_TOKENS = 12
TOLERANCE = 1e-3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="AREAL_AGENT_SMOLLM2 names no folder of SmolLM2"),
]


def prompts() -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tuple(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)) for one in chats]


async def test_greedy_answers_are_those_of_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    async with serving(MODEL) as server, aclosing(HttpEngine(server.base_url)) as engine:
        for number, ids in enumerate(prompts()):
            request = GenerateRequest(request_id=f"greedy-{number}", input_ids=ids, sampling=sampling)
            answer = await engine.generate(request)
            expected = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(ids) :]
            assert answer.token_ids == tuple(expected.tolist())


def test_two_steps_of_the_recipe(tmp_path: Path) -> None:
    sizes = ("steps=2", "batch_size=2", "group_size=2", "rollout.max_tokens=8", "eval.num_tasks=2")
    settings = ("max_staleness=0", "engine.dtype=float32", "trainer.dtype=float32", "observe.progress=none")
    folder = tmp_path / "run"
    done = run(
        *("areal_agent.train", "--config", "configs/smollm2.yaml", f"model={MODEL}", f"run_dir={folder}"),
        *(*sizes, *settings),
    )
    assert done.returncode == 0, done.stderr
    rows = step_rows(read_metrics(folder / "metrics.jsonl"))
    assert [row["trainer/num_fresh_tokens"] == row["trainer/num_loss_tokens"] > 0 for row in rows] == [True, True]
    assert max(row["trainer/logp_diff_fresh_max"] for row in rows) < TOLERANCE
    assert verify(folder / "ledger.sqlite").is_ok

    checkpoint = folder / "checkpoints" / "step_000002"
    ids = np.asarray(prompts()[0], dtype=np.int32)
    served = ModelRunner(str(checkpoint), device="cpu", dtype="float32", num_slots=1, max_context_tokens=128)
    with torch.no_grad():
        trained, first = (
            AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)(torch.from_numpy(ids)[None].long()).logits[0]
            for one in (checkpoint, MODEL)
        )
    torch.testing.assert_close(served.prefill([Piece(slot=0, begin=0, ids=ids)])[0], trained[-1], atol=1e-3, rtol=0.0)
    assert not torch.allclose(trained, first, atol=1e-3)
