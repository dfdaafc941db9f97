"""One train step: from records to updated weights. It knows no process, no file, and of a weight version the number.

    records ─▶ advantages ─▶ minibatches ─▶ proximal log-probabilities (weights at the start of the step)
                                 └─ each: micro-batches ─ forward, loss, backward ─▶ one optimiser update

The loss of an update is divided by its number of loss tokens, counted before it is split into micro-batches: gradients
do not depend on the split.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from areal_agent.algorithms.advantages import token_advantages
from areal_agent.algorithms.batching import MicroBatch, Sample, collate, sample_of, schedule
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.losses import decoupled_ppo
from areal_agent.trainer.model import Policy
from areal_agent.trainer.optimizer import Optimizer
from areal_agent.trainer.tally import Mismatch, Tally
from areal_agent.types import TokenRecord

MAX_PADDING = 0.05
"""Of a sequence in a micro-batch: sequences of like length go together, and short outliers alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """What one train step is given. `rewards` has the total reward of each rollout that has a record, by session id."""

    step: int  # the version that the step makes; the tokens of version step - 1 are fresh
    records: Sequence[TokenRecord]
    rewards: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimiser update: its counts, and the norm of its gradient before clipping."""

    tally: Tally
    gradient_norm: float
    learning_rate: float
    is_skipped: bool  # the norm was not finite


class Laps:
    """How long each phase of a step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = time.perf_counter()

    def end(self, phase: str) -> None:
        """`phase` has just ended; it began when the one before did."""
        now_s = time.perf_counter()
        self.seconds[phase] = now_s - self._since_s
        self._since_s = now_s


class Stepper:
    """Runs train steps on one policy. What changes: the weights, the optimiser, the generator that splits batches."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        generator: torch.Generator,
        algorithm: AlgorithmConfig,
        tokens_per_micro_batch: int,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._generator = generator
        self._algorithm = algorithm
        self._token_budget = tokens_per_micro_batch

    def train(self, given: StepInput) -> dict[str, float]:
        """Train one step and return its metrics.

        A minibatch without loss tokens makes no update, nor does a gradient that is not finite: see `num_updates` and
        `num_skipped_updates`. Advantages that are all zero make an update, of gradient zero.
        """
        laps = Laps()
        minibatches = self._minibatches(given)
        laps.end("advantages")
        proximal = self._proximal(minibatches)
        laps.end("proximal")
        updates = [
            self._update(samples, logprobs, fresh_version=given.step - 1)
            for samples, logprobs in zip(minibatches, proximal, strict=True)
        ]
        laps.end("update")
        return {
            **_update_metrics(updates),
            **_reward_metrics(given),
            **_advantage_metrics(minibatches),
            **{f"seconds_{phase}": seconds for phase, seconds in laps.seconds.items()},
        }

    def _minibatches(self, given: StepInput) -> list[list[Sample]]:
        """The samples of each optimiser update: whole rollouts, dealt at random; without loss tokens there is none."""
        advantages = token_advantages(given.records, given.rewards, self._algorithm)
        by_rollout: dict[str, list[Sample]] = {}
        for record, of_tokens in zip(given.records, advantages, strict=True):
            sample = sample_of(record, of_tokens)
            if sample.num_loss_tokens:
                by_rollout.setdefault(record.session_id, []).append(sample)
        rollouts = list(by_rollout.values())
        count = min(self._algorithm.minibatches, len(rollouts))
        order = torch.randperm(len(rollouts), generator=self._generator) if count > 1 else torch.arange(len(rollouts))
        shares = order.tensor_split(count) if count else ()
        return [[sample for index in share.tolist() for sample in rollouts[index]] for share in shares]

    def _proximal(self, minibatches: Sequence[Sequence[Sample]]) -> list[list[Tensor] | None]:
        """The log-probabilities of each sample's loss tokens under the weights at the start of the step.

        None for a single minibatch: its own forward pass runs under those weights and gives the same numbers.
        """
        if len(minibatches) <= 1:
            return [None for _ in minibatches]
        return [self._logprobs(samples) for samples in minibatches]

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        logprobs: list[Tensor] = [torch.empty(0)] * len(samples)
        for indices in self._schedule(samples):
            chosen = [samples[index] for index in indices]
            values, _ = self._policy.logprobs_and_entropy(collate(chosen, self._policy.device))
            parts = values.split([sample.num_loss_tokens for sample in chosen])
            for index, part in zip(indices, parts, strict=True):
                logprobs[index] = part
        return logprobs

    def _update(self, samples: Sequence[Sample], proximal: Sequence[Tensor] | None, *, fresh_version: int) -> Update:
        """Accumulate the gradient of all samples exactly, and update once."""
        num_loss_tokens = sum(sample.num_loss_tokens for sample in samples)
        tally = Tally()
        self._optimizer.clear_gradients()  # a step that failed midway may have left some
        for indices in self._schedule(samples):
            chosen = [samples[index] for index in indices]
            batch = collate(chosen, self._policy.device)
            known = torch.cat([proximal[index] for index in indices]) if proximal is not None else None
            tally = tally.merge(
                self._backward(batch, known, num_loss_tokens=num_loss_tokens, fresh_version=fresh_version)
            )
        learning_rate = self._optimizer.learning_rate
        norm = self._optimizer.update()
        return Update(
            tally=tally, gradient_norm=norm, learning_rate=learning_rate, is_skipped=not bool(np.isfinite(norm))
        )

    def _backward(
        self, batch: MicroBatch, proximal: Tensor | None, *, num_loss_tokens: int, fresh_version: int
    ) -> Tally:
        logprobs, entropy = self._policy.logprobs_and_entropy(batch)
        known = logprobs.detach() if proximal is None else proximal
        loss, stats = decoupled_ppo(
            logprobs, known, batch.behavior, batch.advantages, self._algorithm, num_loss_tokens=num_loss_tokens
        )
        loss.backward()
        return Tally(
            loss=float(loss.detach()),
            entropy_sum=float(entropy.detach().sum()),
            num_input_tokens=batch.num_input_tokens,
            num_padded_tokens=batch.inputs.numel(),
            num_micro_batches=1,
            losses=stats,
            mismatch=Mismatch.of(known, batch.behavior, batch.versions == fresh_version),
        )

    def _schedule(self, samples: Sequence[Sample]) -> list[list[int]]:
        return schedule([sample.num_tokens for sample in samples], self._token_budget, max_padding=MAX_PADDING)


def _update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Token metrics over all updates; loss, gradient norm and learning rate as means over updates."""
    tally = reduce(Tally.merge, [update.tally for update in updates], Tally())
    count = max(len(updates), 1)
    return {
        **tally.metrics(),
        "loss": tally.loss / count,
        "grad_norm": sum(update.gradient_norm for update in updates) / count,
        "learning_rate": sum(update.learning_rate for update in updates) / count,
        "num_updates": sum(not update.is_skipped for update in updates),
        "num_skipped_updates": sum(update.is_skipped for update in updates),
    }


def _reward_metrics(given: StepInput) -> dict[str, float]:
    """Over the rollouts that are trained; a group whose rewards are all equal has nothing to teach."""
    by_group: dict[str, dict[str, float]] = {}
    for record in given.records:
        by_group.setdefault(record.group_id, {})[record.session_id] = given.rewards[record.session_id]
    rewards = [reward for group in by_group.values() for reward in group.values()]
    flat = sum(len(set(group.values())) == 1 for group in by_group.values())
    return {
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "flat_group_fraction": flat / max(len(by_group), 1),
        "num_rollouts": len(rewards),
        "num_records": len(given.records),
    }


def _advantage_metrics(minibatches: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Over loss tokens."""
    samples = [sample for minibatch in minibatches for sample in minibatch]
    if not samples:
        return {"advantage_mean": 0.0, "advantage_std": 0.0}
    advantages = torch.cat([sample.advantages for sample in samples]).double()
    return {"advantage_mean": float(advantages.mean()), "advantage_std": float(advantages.std(correction=0))}
