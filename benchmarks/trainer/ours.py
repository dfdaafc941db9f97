"""Our side, in a process of its own: `python ours.py FOLDER VARIANT NUM_STEPS` prints a line of JSON.

Variants: `balanced`, `first_fit`, `padded` (trainer.packing), and `whole`: balanced, a micro-batch's logits at once.
CPU time is that of whole train steps: scoring, packing, proximal policy, loss, gradient, optimiser.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import GROUP_SIZE, read_records

from areal_agent.algorithms import batching
from areal_agent.algorithms.batching import collate, sample_of
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.model import Policy
from areal_agent.trainer.optimizer import Optimizer
from areal_agent.trainer.step import Stepper
from areal_agent.trainer.wire import StepInput
from areal_agent.types import TokenRecord

CPU = torch.device("cpu")
ALGORITHM = AlgorithmConfig(normalize_by_std=False, aggregation="sequence_mean")
# with betas 0 and a large epsilon, AdamW moves the weights by the gradient itself
GRADIENT = TrainerConfig(learning_rate=1e6, epsilon=1e6, betas=(0.0, 0.0), weight_decay=0.0, gradient_clip=1e9)


def main(folder: Path, variant: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    if variant == "whole":
        batching.CHUNK_BYTES = 2**62
    packing: Any = "balanced" if variant == "whole" else variant
    given = the_step(folder)
    before_mb = peak_mb()
    stepper, _ = new_stepper(folder, TrainerConfig(learning_rate=1e-6, packing=packing))
    stepper.train(given)  # warms up
    started_s = time.process_time()
    metrics = [stepper.train(given) for _ in range(num_steps)]
    cpu_s = time.process_time() - started_s
    num_tokens = sum(len(one.token_ids) for one in given.records) * num_steps
    print(
        json.dumps(
            {
                "tokens_per_cpu_s": num_tokens / cpu_s,
                "padding": metrics[0]["padding_fraction"],
                "micro_batches": metrics[0]["num_micro_batches"],
                "peak_mb": peak_mb() - before_mb,
                "loss": metrics[0]["loss"],
            }
        )
    )
    write_gradient(folder, given, GRADIENT.model_copy(update={"packing": packing}), folder / f"{variant}.pt")


def new_stepper(folder: Path, config: TrainerConfig) -> tuple[Stepper, Policy]:
    policy = Policy.load(folder / "model", CPU)
    optimizer = Optimizer(policy.model.parameters(), config)
    return Stepper(policy, optimizer, torch.Generator().manual_seed(0), ALGORITHM, config), policy


def write_gradient(folder: Path, given: StepInput, config: TrainerConfig, path: Path) -> None:
    """Save the gradient of one step from the initial weights, by name."""
    stepper, policy = new_stepper(folder, config)
    before = {name: one.detach().clone() for name, one in policy.named_parameters().items()}
    stepper.train(given)
    torch.save({name: before[name] - one.detach() for name, one in policy.named_parameters().items()}, path)


def the_step(folder: Path) -> StepInput:
    """Return the records, with log-probabilities of the initial weights as the engine's."""
    prompts, completions, rewards = read_records(folder)
    records = [
        record_of(index, prompts[index // GROUP_SIZE], one, float(rewards[index]))
        for index, one in enumerate(completions)
    ]
    policy = Policy.load(folder / "model", CPU)
    measured: list[TokenRecord] = []
    for record in records:
        with torch.no_grad():
            sampled, _ = policy.logprobs_and_entropy(collate([sample_of(record)], CPU))
        record.behavior_logprobs[record.loss_mask] = sampled.numpy()
        measured.append(record)
    return StepInput(step=1, records=measured, rewards={one.session_id: float(one.turn_rewards[0]) for one in measured})


def record_of(index: int, prompt: Any, completion: Any, reward: float) -> TokenRecord:
    num_tokens = len(prompt) + len(completion)
    mask = np.arange(num_tokens) >= len(prompt)
    return TokenRecord(
        session_id=f"s{index}",
        group_id=f"g{index // GROUP_SIZE}",
        branch=0,
        parent_branch=None,
        token_ids=np.concatenate([prompt, completion]).astype(np.int32),
        loss_mask=mask,
        turn_index=np.zeros(num_tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(num_tokens, dtype=np.float32),
        temperatures=np.ones(num_tokens, dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turn_rewards=np.array([reward], dtype=np.float32),
        final_reward=reward,
    )


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
