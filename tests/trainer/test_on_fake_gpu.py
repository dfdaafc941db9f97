import numpy as np
import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig, TeacherConfig
from areal_agent.trainer.config import LoraConfig, TrainerConfig
from areal_agent.trainer.ranks import Group
from tests.fake_gpu import CPU, FakeGpu

PENALISED = {"reference": "initial", "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
CASES = {
    "ppo_clip": ({"packing": "balanced"}, {"dual_clip": 3.0}),
    "gspo": ({"packing": "first_fit"}, {"preset": "gspo", "aggregation": "sequence_mean", "behavior_weight_level": "sequence"}),
    "cispo": ({"packing": "padded"}, {"preset": "cispo", **PENALISED}),
    "trees": ({"packing": "tree"}, {"reference": "initial", "kl_coefficient": 0.1, "kl_in": "reward", "minibatches": 2}),
    "trees, half": ({"packing": "tree", "dtype": "bfloat16"}, {}),
    "critic": ({"packing": "tree", "gradient_checkpointing": True}, {"preset": "ppo", "minibatches": 2}),
    "critic, half": ({"packing": "balanced", "dtype": "bfloat16"}, {"preset": "ppo"}),
    "lora": ({"lora": LoraConfig(rank=2, alpha=4.0)}, PENALISED),
    "lora, half": ({"lora": LoraConfig(rank=2, alpha=4.0), "dtype": "bfloat16", "packing":"balanced"}, PENALISED),
    "fp32 head": ({"dtype": "bfloat16", "fp32_lm_head": True, "packing":"padded"}, {"proximal": "approximate", "minibatches": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_it(model_folder, make_batch, as_input, open_trainer, case, tmp_path, monkeypatch):
    changes, algorithm = CASES[case]
    config = TrainerConfig(device="cuda", **{"dtype":"float32", **changes})
    of = Group.of_one
    monkeypatch.setattr(Group, "of_one", lambda device: of(CPU))
    with FakeGpu() as gpu:
        trainer = open_trainer(model_folder, config, AlgorithmConfig(**algorithm), token_records=tmp_path, token_records_share=1.0)
        gpu.copies.clear()
        m = trainer.train_step(as_input(make_batch(1, num_groups=1)))
        small = dict(gpu.copies)
        gpu.copies.clear()
        m = trainer.train_step(as_input(make_batch(2)))
        for k, n in gpu.copies.items(): print(*k, small.get(k), n)
        gpu.copies.clear()
        print(m.metrics["loss"], m.metrics["num_micro_batches"])
        trainer.publish()
        for k, n in gpu.copies.items(): print(k, n)
