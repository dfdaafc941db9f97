"""Families of models on a real vLLM server (slow): what it samples, before and after pushes by the trainer's channels,
has the log-probabilities of transformers. vLLM's reload alone would leave experts or sinks as they were.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from areal_agent.cluster.servers import start_vllm
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.vllm.server import VllmServer
from areal_agent.trainer.model import Policy
from areal_agent.types import WeightVersion
from areal_agent.weights.channels import DiskChannel, DistributedChannel

from ...trainer.families import PACKED, make
from ..sampled import assert_sampled_by
from ..servers import STARTUP_S
from ..sglang.conftest import DEADLINE_S, open_stage, with_tokenizer
from .conftest import CONTEXT, HEAD_DIM, ON_CPU

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
SIZES = {"vocab_size": 400, "hidden_size": 64, "head_dim": HEAD_DIM, "max_position_embeddings": CONTEXT}
MORE = {
    "gpt_oss": {"intermediate_size": 64, "head_dim": 64, "max_position_embeddings": 131_072},  # vLLM takes no less
    "qwen3_moe": {"moe_intermediate_size": 32},
    "gemma2": {"query_pre_attn_scalar": HEAD_DIM, "sliding_window": 16},
}


def save(model_type: str, folder: Path, tokenizer: Path, seed: int) -> Path:
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = make(model_type, PACKED[model_type] | SIZES | MORE[model_type] | ends, seed=seed)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return with_tokenizer(folder, tokenizer)


@pytest.mark.parametrize("model_type", MORE)
async def test_new_weights_serve(model_type, vllm_python, small_model, tmp_path, ask, truth) -> None:
    model, other = (save(model_type, tmp_path / str(seed), small_model, seed) for seed in (0, 1))
    policies = [Policy.load(folder, CPU) for folder in (model, other)]
    entries, request = policies[0].published(), ask(1, prompt_length=40)
    to_workers = DistributedChannel(entries, CPU, host="127.0.0.1", bucket_bytes=2**16, timeout_s=60.0)
    config = EngineConfig.model_validate({"python": vllm_python, "startup_timeout_s": STARTUP_S, **ON_CPU})
    async with (
        start_vllm(config, model, WeightVersion(), tmp_path) as servers,
        asyncio.timeout(DEADLINE_S),
        open_stage(VllmServer(servers.urls[0]), model, other, num_long=1) as stage,
    ):
        assert_sampled_by(stage.before, request, await stage.engine.generate(request), truth)
        await stage.push(DiskChannel(tmp_path / "disk", torch.float32).write(policies[1].whole_parameters()))
        assert_sampled_by(stage.after, request, await stage.engine.generate(request), truth)
        await stage.engine.load(model, stage.old)
        await stage.push(to_workers.write(policies[1].whole_parameters()))
        assert_sampled_by(stage.after, request, await stage.engine.generate(request), truth)
    to_workers.close()
