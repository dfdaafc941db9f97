"""One of two ranks, in a process of its own: trains what `TwoRanks` says and writes down what came of it.

`python -m tests.trainer.two_ranks RANK FOLDER`, with the work in FOLDER/work.pickle. One pair of processes does all of
it, for what such a test costs is importing torch.
"""

import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.engine.embedded.weights import WeightLayout, take_weights
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.ranks import Group
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput
from tests.trainer.lab import CPU, Lab


@dataclass(frozen=True, kw_only=True)
class Work:
    """One train step each of `labs`, by name: (config, algorithm). Then trainers, with and without a checkpoint."""

    model: Path
    first: StepInput
    second: StepInput
    labs: Mapping[str, tuple[TrainerConfig, AlgorithmConfig]]
    trainers: Mapping[str, tuple[TrainerConfig, AlgorithmConfig]]
    checkpoints: Mapping[str, Path]  # of one rank, after the first step, by trainer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What rank 0 saw."""

    weights: Mapping[str, torch.Tensor]  # after the step, by lab
    metrics: Mapping[str, Mapping[str, float]]
    saved: Mapping[str, str]  # a checkpoint of two ranks after the first step, by trainer
    straight: Mapping[str, torch.Tensor]  # weights after both steps
    resumed: Mapping[str, torch.Tensor]  # the same, resumed from the checkpoint of one rank
    sent: Mapping[str, torch.Tensor]  # what an engine was sent by torch.distributed
    part_bytes: list[int]  # of it, by rank


def run_two_ranks(work: Work, folder: Path) -> Outcome:
    """Start both ranks and wait for what comes of it."""
    (folder / "work.pickle").write_bytes(pickle.dumps(work))
    argv = [sys.executable, "-m", "tests.trainer.two_ranks"]
    root = Path(__file__).parents[2]
    ranks = [subprocess.Popen([*argv, str(rank), str(folder)], cwd=root) for rank in range(2)]
    try:
        assert [rank.wait() for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return Outcome(**torch.load(folder / "outcome.pt", weights_only=True))


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    work: Work = pickle.loads((folder / "work.pickle").read_bytes())
    group = Group.join(rank, 2, dist.FileStore(str(folder / "rendezvous"), 2), CPU)
    weights: dict[str, torch.Tensor] = {}
    metrics: dict[str, Mapping[str, float]] = {}
    for name, (config, algorithm) in work.labs.items():
        lab = Lab(work.model, config, algorithm, config.tokens_per_micro_batch, group=group)
        metrics[name] = lab.stepper.train(work.first)
        weights[name] = lab.weights()
    saved: dict[str, str] = {}
    straight: dict[str, torch.Tensor] = {}
    resumed: dict[str, torch.Tensor] = {}
    for name in work.trainers:
        trainer = load(work.model, name, work, folder, group)
        trainer.train_step(work.first)
        checkpoint = trainer.save(folder / name, step=1, incarnation=0)
        trainer.train_step(work.second)
        straight[name] = flat(trainer)
        trainer = load(work.checkpoints[name], name, work, folder, group)
        trainer.train_step(work.second)
        resumed[name] = flat(trainer)
        saved |= {name: str(checkpoint.path)} if checkpoint else {}
    config = TrainerConfig(transfer="distributed")
    trainer = Trainer(TrainerSetup(model=work.model, trainer=config, seed=0, shared_memory=folder), group=group)
    published: Any = trainer.publish()
    if rank == 0:
        found = {"weights": weights, "metrics": metrics, "saved": saved, "straight": straight, "resumed": resumed}
        sent = take_weights(published, WeightLayout(AutoModelForCausalLM.from_pretrained(work.model)), CPU)
        part_bytes = [part.num_bytes for part in published.parts]
        torch.save({**found, "sent": dict(sent), "part_bytes": part_bytes}, folder / "outcome.pt")
    group.gather([0.0])  # the engine has been sent it by then
    trainer.close()


def load(model: Path, name: str, work: Work, folder: Path, group: Group) -> Trainer:
    config, algorithm = work.trainers[name]
    setup = {"model": model, "base": work.model, "trainer": config, "algorithm": algorithm}
    return Trainer(TrainerSetup(**setup, seed=0, shared_memory=folder), group=group)


def flat(trainer: Trainer) -> torch.Tensor:
    """The weights of a trainer, as an engine would read them."""
    published: Any = trainer.publish()
    return torch.zeros(0) if published is None else published_weights(published)


def published_weights(published: Any) -> torch.Tensor:
    data = Path(published.path).read_bytes()
    parts = [bytearray(data[one.offset : one.offset + one.num_bytes]) for one in published.entries]
    return torch.cat([torch.frombuffer(part, dtype=torch.float32) for part in parts])


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
