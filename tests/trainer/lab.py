"""A policy and its stepper on which train steps are tried out."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.cluster.gang import start_trainer
from areal_agent.cluster.hosts import Process
from areal_agent.files import read_manifest
from areal_agent.trainer.client import TrainerClient
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.model import Critic, Policy
from areal_agent.trainer.optimizer import Optimizer
from areal_agent.trainer.ranks import ALONE, Group, Precision
from areal_agent.trainer.step import Stepper
from areal_agent.trainer.trainer import Trainer, settled
from areal_agent.trainer.wire import StepInput
from areal_agent.types import TokenRecord

CPU = torch.device("cpu")
# with betas 0 and a large epsilon, AdamW moves the weights by the gradient itself
GRADIENT_DESCENT = TrainerConfig(learning_rate=1e6, epsilon=1e6, betas=(0.0, 0.0), weight_decay=0.0, gradient_clip=1e9)
PLAIN = AlgorithmConfig()


@asynccontextmanager
async def real_process(tmp_path: Path) -> AsyncIterator[tuple[Process, TrainerClient]]:
    async with start_trainer(1, tmp_path) as gang:
        yield gang.processes[0], gang.client


def connected(sock: socket.socket) -> Callable[[], Awaitable[socket.socket]]:
    """The `connect` of a client whose other end is played here."""

    async def connect() -> socket.socket:
        return sock

    return connect


load_once = cache(Policy.load)


def load(folder: Path, group: Group) -> Policy:
    """Load a policy; one that is alone as a copy: loading and its proof of attention take longer than a step."""
    return deepcopy(load_once(folder, CPU)) if group is ALONE else Policy.load(folder, CPU, group=group)


class Lab:
    """A policy that starts from the same weights every time, with critic, reference and teacher as the algorithm asks.

    `reference` is a folder of other weights for the reference.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainerConfig = GRADIENT_DESCENT,
        algorithm: AlgorithmConfig = PLAIN,
        budget: int = 4096,
        reference: Path | None = None,
        group: Group = ALONE,
    ) -> None:
        self.policy = load(folder, group)
        config = settled(config, group, [self.policy])
        precision = Precision.of(config, CPU, self.policy.hidden_size)
        more = {"group": group, "precision": precision}
        self.critic = Critic(self.policy, config, algorithm, **more) if algorithm.critic else None
        other = None
        if algorithm.reference == "initial":
            other = load(reference or folder, group).frozen()
        judge = algorithm.teacher
        teacher = None
        if judge is not None and judge.model is not None:
            teacher = load(Path(judge.model), group).frozen()
        if config.lora is not None:
            self.policy.adapt(config.lora, 0, precision)
        if config.gradient_checkpointing:
            self.policy.recompute_layers()
        for policy in (self.policy, other, teacher):
            if policy is not None:
                policy.shard(group, precision)
        self.stepper = Stepper(
            self.policy,
            Optimizer(self.policy.trained_parameters().values(), config),
            torch.Generator().manual_seed(0),
            algorithm,
            config.model_copy(update={"tokens_per_micro_batch": budget}),
            reference=other and other.logprobs_and_entropy,
            teacher=teacher and teacher.logprobs_and_entropy,
            critic=self.critic,
            group=group,
        )
        self.before = self.weights()

    def weights(self) -> torch.Tensor:
        """All of them, flat; on other ranks than the first there are none."""
        return torch.cat([torch.zeros(0), *(one.flatten() for _, one in self.policy.whole_parameters())]).clone()

    def gradient(self, given: StepInput) -> torch.Tensor:
        self.stepper.train(given)
        return self.before - self.weights()

    def logprobs(self, record: TokenRecord) -> torch.Tensor:
        """Of every token but the first, by a plain forward pass over one sequence; differentiable."""
        ids = torch.from_numpy(record.token_ids).long()
        logits = self.policy.model(input_ids=ids[None]).logits[0, :-1]
        temperatures = torch.from_numpy(record.temperatures)[1:, None]
        return torch.log_softmax(logits / temperatures, dim=-1).gather(1, ids[1:, None])[:, 0]

    def mean_logprob(self, records: Iterable[TokenRecord]) -> float:
        """Of all loss tokens, with the weights as they are."""
        with torch.no_grad():
            found = [self.logprobs(one)[torch.from_numpy(one.loss_mask)[1:]] for one in records]
        return float(torch.cat(found).mean())

    def gap(self, given: StepInput) -> float:
        """By how much tokens of rewarded rollouts are likelier than those of the others."""
        good, bad = (
            [one for one in given.records if (given.rewards[one.session_id] > 0) is is_good]
            for is_good in (True, False)
        )
        return self.mean_logprob(good) - self.mean_logprob(bad)

    def exact(self, records: Iterable[TokenRecord]) -> list[TokenRecord]:
        """The records as the weights that they are would have sampled them."""
        return [
            replace(one, behavior_logprobs=np.append(0.0, self.logprobs(one).detach().numpy()).astype(np.float32))
            for one in records
        ]


def held_by(checkpoint: Path) -> dict[str, object]:
    """What a checkpoint holds, by file: digests, and the bytes of shards' tensors, whose headers have no order."""
    return {
        name: {key: one.numpy().tobytes() for key, one in load_file(checkpoint / name).items()}
        if name.startswith("training/shard")
        else digest
        for name, digest in read_manifest(checkpoint)[0].items()
    }


def train_alike(one: Trainer, other: Trainer, given: StepInput) -> dict[str, float]:
    """Train a step with both and compare all metrics but times."""
    ours, theirs = (
        {name: value for name, value in trainer.train_step(given).metrics.items() if "seconds" not in name}
        for trainer in (one, other)
    )
    assert ours == theirs
    return ours
