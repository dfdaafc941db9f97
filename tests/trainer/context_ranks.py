"""Four ranks for a test of context parallelism: `python -m tests.trainer.context_ranks FOLDER`.

They play all layouts of `LAYOUTS` one after the other; a layout of two ranks leaves the others out. They are forked,
for what such a test costs is importing torch.
"""

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_agent.algorithms.batching import Sample, collate
from areal_agent.trainer.attention import use_segment_attention
from areal_agent.trainer.forward import LossTokenForward
from areal_agent.trainer.ranks import ALONE, Group
from tests.trainer.lab import CPU, Lab

LAYOUTS = {"cp2": (2, 2), "cp4": (4, 4), "cp2 x dp2": (4, 2)}
"""The number of ranks, and of those that share a row."""
NUM_RANKS = 4
LENGTHS = (5, 9, 4)


def samples(vocab_size: int) -> list[Sample]:
    """Three sequences whose row of 18 tokens needs filling up, with loss tokens at both sides of every cut."""
    generator = torch.Generator().manual_seed(0)
    made: list[Sample] = []
    for number, length in enumerate(LENGTHS):
        predicting = torch.arange(1 if number else 3, length)
        zeros = torch.zeros(len(predicting))
        draws: dict[str, Any] = {"high": vocab_size, "generator": generator}
        made.append(
            Sample(
                rollout=str(number),
                inputs=torch.randint(size=(length,), **draws),
                predicting=predicting,
                targets=torch.randint(size=predicting.shape, **draws),
                temperatures=zeros + 0.7 + number / 10,
                behavior=zeros,
                versions=zeros.int(),
                incarnations=zeros.int(),
                weight=0.1 * (number + 1),
            )
        )
    return made


def loss_and_gradient(folder: Path, batches: Sequence[Sequence[int]], group: Group = ALONE) -> tuple[Tensor, Tensor]:
    """Return sum of weight * (logp + 0.3 entropy) over these samples, and its gradient, in float64.

    Without FSDP2, which has no float64: the gradients of all ranks are added up here.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    use_segment_attention(model)
    forward = LossTokenForward(model)
    forward.context = group.context
    given = samples(model.config.vocab_size)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches[group.data_rank :: group.num_data_ranks]:
        packed = collate([given[index] for index in batch], CPU)
        logprobs, entropy = forward(packed)
        loss = (packed.weights * (logprobs + 0.3 * entropy)).sum()
        loss.backward()
        total += loss.detach()
    gradient = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    if group is not ALONE:
        dist.all_reduce(gradient)
    return torch.tensor(sum(row[0] for row in group.gather([float(total)])), dtype=torch.float64), gradient


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    model, given, config, algorithm = pickle.loads((folder / "work.pickle").read_bytes())
    found: dict[str, Any] = {}
    for name, (size, parallel) in LAYOUTS.items():
        if rank >= size:
            continue
        store = dist.FileStore(str(folder / f"rendezvous-{parallel}-{size}"), size)
        group = Group.join(rank, size, store, CPU, context_parallel=parallel)
        batches = [[0, 1, 2]] if size == parallel else [[0, 1], [2]]
        found[name] = loss_and_gradient(model, batches, group)
        if name == "cp2 x dp2":
            lab = Lab(model, config, algorithm, config.tokens_per_micro_batch, group=group)
            metrics = lab.stepper.train(given)
            found["step"] = {"metrics": metrics, "weights": lab.weights()}
        group.leave()
    if rank == 0:
        torch.save(found, folder / "outcome.pt")


if __name__ == "__main__":
    for number in range(NUM_RANKS):
        if os.fork() == 0:
            main(number, Path(sys.argv[1]))
            os._exit(0)
    sys.exit(any(os.wait()[1] for _ in range(NUM_RANKS)))
