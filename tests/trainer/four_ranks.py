"""Four ranks for tests of meshes and of saves: `python -m tests.trainer.four_ranks FOLDER`.

They play all layouts of `LAYOUTS` one after the other; a layout of two ranks leaves the others out. Then they train a
step with each of `MESHES`, and two replicas of two ranks save. They are forked, for what such a test costs is importing
torch.
"""

import os
import pickle
import resource
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_agent.algorithms.batching import Sample, collate
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.trainer.attention import use_segment_attention
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.forward import LossTokenForward
from areal_agent.trainer.ranks import ALONE, Group
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput
from tests.trainer.lab import CPU, Lab
from tests.trainer.two_ranks import flat

LAYOUTS = {"cp2": (2, 2), "cp4": (4, 4), "cp2 x dp2": (4, 2)}
"""The number of ranks, and of those that share a row."""
MESHES = {
    "cp2 x dp2": {"context_parallel": 2},
    "two replicas": {"replicas": 2},
    "four replicas": {"replicas": 4},
    "two replicas, cp2": {"replicas": 2, "context_parallel": 2},
}
NUM_RANKS = 4
LENGTHS = (5, 9, 4)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One train step by `lab` with each mesh; two by `trainer`, or one from one rank's `checkpoint` of the first."""

    model: Path
    first: StepInput
    second: StepInput
    lab: tuple[TrainerConfig, AlgorithmConfig]
    trainer: tuple[TrainerConfig, AlgorithmConfig]
    checkpoint: Path

    def load(self, model: Path, folder: Path, group: Group = ALONE, **trainer: Any) -> Trainer:
        """Return `trainer` with these settings changed."""
        config, algorithm = self.trainer
        config = config.model_copy(update=trainer)
        setup = TrainerSetup(model=model, trainer=config, algorithm=algorithm, seed=0, shared_memory=folder)
        return Trainer(setup, group=group)


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


def saves(work: Work, folder: Path, group: Group) -> dict[str, Any]:
    """Save at once and beside a step, fail to save in three ways, and resume."""
    at_once = work.load(work.model, folder, group)
    at_once.train_step(work.first)
    faults = [
        save(at_once, folder / "is a file"),
        *(save(at_once, folder / "at once", is_limited=group.rank == number) for number in (0, 3)),
        save(at_once, folder / "at once"),
    ]
    beside = work.load(work.model, folder, group, async_save=True)
    beside.train_step(work.first)
    may_write = threading.Event()
    assert beside.saver._thread is not None
    beside.saver._thread.submit(may_write.wait if group.rank == 0 else bool)
    beside.save(folder / "beside", step=1, incarnation=0)
    beside.train_step(work.second)
    may_write.set()
    beside.save(folder / "beside", step=2, incarnation=0)
    beside.saver.close()
    at_once.train_step(work.second)
    resumed = work.load(work.checkpoint, folder, group)
    resumed.train_step(work.second)
    weights = {"after a step beside a save": flat(beside), "after failures": flat(at_once), "resumed": flat(resumed)}
    return {"faults": faults, **weights}


def save(trainer: Trainer, directory: Path, *, is_limited: bool = False) -> str:
    """Return why step 1 could not be saved; a rank that is limited can write no file of 16 KiB."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, unlimited[1]))
    try:
        trainer.save(directory, step=1, incarnation=0)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return ""


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    work: Work = pickle.loads((folder / "work.pickle").read_bytes())
    found: dict[str, Any] = {}
    for name, (size, parallel) in LAYOUTS.items():
        if rank >= size:
            continue
        store = dist.FileStore(str(folder / f"rendezvous-{parallel}-{size}"), size)
        group = Group.join(rank, size, store, CPU, context_parallel=parallel)
        batches = [[0, 1, 2]] if size == parallel else [[0, 1], [2]]
        found[name] = loss_and_gradient(work.model, batches, group)
        group.leave()
    for name, mesh in MESHES.items():
        group = Group.join(rank, NUM_RANKS, dist.FileStore(str(folder / name), NUM_RANKS), CPU, **mesh)
        lab = Lab(work.model, *work.lab, work.lab[0].tokens_per_micro_batch, group=group)
        found[f"step, {name}"] = {"metrics": lab.stepper.train(work.first), "weights": lab.weights()}
        if name == "two replicas":
            found |= saves(work, folder, group)
        group.leave()
    if rank == 0:
        torch.save(found, folder / "outcome.pt")


if __name__ == "__main__":
    for number in range(NUM_RANKS):
        if os.fork() == 0:
            main(number, Path(sys.argv[1]))
            os._exit(0)
    sys.exit(any(os.wait()[1] for _ in range(NUM_RANKS)))
