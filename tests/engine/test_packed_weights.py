"""A large model's weights lie in blocks on a CPU: logits are those of plain products, also after a push."""

import numpy as np
import pytest
import torch

from areal_agent.engine.embedded import decoder
from areal_agent.engine.embedded.decoder import Piece
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.weights import take_weights
from areal_agent.types import DiskWeights

IDS = np.arange(3, 40, dtype=np.int32)


def logits_of(runner: ModelRunner) -> torch.Tensor:
    runner.kv.cache.wipe()
    prefilled = runner.prefill([Piece(slot=slot, begin=0, ids=IDS) for slot in range(3)])
    return torch.cat([prefilled, runner.decode([7, 8, 9], [len(IDS) + 1] * 3)]).clone()


@pytest.mark.skipif(not decoder.can_pack(torch.float32), reason="torch has no oneDNN here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])  # with biases, with norms of heads, with neither
def test_logits_are_those_of_plain_products(family, dtype, make_model, monkeypatch):
    folders = [make_model(family, seed=seed, is_shaken=True, tie_word_embeddings=family == "llama") for seed in (1, 2)]
    runners: list[ModelRunner] = []
    for smallest in (64, 65):  # the models have a hidden size of 64
        monkeypatch.setattr(decoder, "LARGE", smallest)
        runners.append(ModelRunner(str(folders[0]), device="cpu", dtype=dtype, num_slots=3, max_context_tokens=64))
    is_packed = decoder.can_pack(getattr(torch, dtype))  # not bfloat16 without AVX512
    assert [runner._decoder.is_packed for runner in runners] == [is_packed, False]
    for folder in (folders[0], folders[1]):
        for runner in runners:
            source = DiskWeights(path=str(folder))
            runner.swap_in(take_weights(source, runner.layout, runner.device, needs_manifest=False))
        packed, plain = map(logits_of, runners)
        assert float((packed - plain).norm() / plain.norm()) < (1e-5 if dtype == "float32" else 0.01)
