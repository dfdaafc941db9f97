"""One train step on a full micro-batch, by a process of its own, which prints how much memory that took at the most.

`python -m tests.doctor.train_once FOLDER`
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.models.recipe import RECIPE
from areal_agent.process import peak_memory_bytes
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput
from areal_agent.types import TokenRecord
from tests.histories import record

NUM_RECORDS, LENGTH = 16, 512  # 8,192 tokens


def long_record(number: int) -> TokenRecord:
    return replace(
        record(f"s{number}", [0] * (LENGTH - 1)),
        token_ids=(number + np.arange(LENGTH, dtype=np.int32)) % RECIPE.vocab_size,  # no prefix is shared
        behavior_logprobs=np.where(np.arange(LENGTH) > 0, -7.0, 0.0).astype(np.float32),
        turn_rewards=np.array([number % 2], dtype=np.float32),
        final_reward=float(number % 2),
    )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=RECIPE.vocab_size,
        hidden_size=RECIPE.hidden_size,
        intermediate_size=RECIPE.intermediate_size,
        num_hidden_layers=RECIPE.num_layers,
        num_attention_heads=RECIPE.num_heads,
        num_key_value_heads=RECIPE.num_heads,
        head_dim=RECIPE.head_dim,
        max_position_embeddings=RECIPE.max_context_tokens,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    before = peak_memory_bytes(os.getpid())
    setup = TrainerSetup(
        model=folder,
        trainer=TrainerConfig(tokens_per_micro_batch=NUM_RECORDS * LENGTH),
        algorithm=AlgorithmConfig(),
        seed=0,
        shared_memory=folder,
    )
    trainer = Trainer(setup)
    rewards = {f"s{number}": float(number % 2) for number in range(NUM_RECORDS)}
    records = [long_record(number) for number in range(NUM_RECORDS)]
    trainer.train_step(StepInput(step=1, records=records, rewards=rewards))
    after = peak_memory_bytes(os.getpid())
    trainer.close()
    assert before is not None and after is not None
    print(after - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
