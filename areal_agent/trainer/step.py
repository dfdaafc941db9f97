"""One train step: from records to updated weights.

    records ─▶ credit ─▶ forward passes with the weights at the start of the step, as far as the algorithm needs them
            ─▶ advantages ─▶ minibatches
                                 └─ each: micro-batches ─ forward, loss, backward ─▶ one optimiser update

A token's weight in an update is fixed before the update is split into micro-batches and over ranks, so gradients do not
depend on the split. Rank 0 has the records and makes all choices; the other ranks `_follow` it:

    rank 0    ─ credit ─ work ──────────── advantages ─ work ───────── ... ─ the generator's state, as all have done
                          │ ▲ results                    │
    rank 1..   waiting ───┴─┘ of its share    waiting ───┴─ update
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from areal_agent.algorithms.advantages import AdvantageFunction, own_advantages, token_advantages, value_targets
from areal_agent.algorithms.batching import NO_IMAGES, MicroBatch, Sample, collate, sample_of
from areal_agent.algorithms.config import AlgorithmConfig, load_own
from areal_agent.algorithms.credit import with_causal_credit, with_parts
from areal_agent.algorithms.distillation import distill_metrics, distilled_advantages, teacher_differences
from areal_agent.algorithms.losses import (
    LossStats,
    LossTokens,
    approximate_proximal,
    choose_objective,
    divergence,
    policy_loss,
)
from areal_agent.algorithms.packing import alike, balanced, deal, first_fit, siblings, token_weights
from areal_agent.algorithms.trees import in_order, pays
from areal_agent.observe.token_records import SeenTokens, TokenRecorder
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.metrics import (
    Mismatch,
    Tally,
    Update,
    advantage_metrics,
    critic_metrics,
    device_memory,
    mfu_metrics,
    reward_metrics,
    update_metrics,
)
from areal_agent.trainer.model import Critic, Policy
from areal_agent.trainer.optimizer import Optimizer
from areal_agent.trainer.ranks import ALONE, Group
from areal_agent.trainer.wire import StepInput
from areal_agent.types import TokenRecord, WeightVersion

TRIAL_TOKENS = 1024
"""The length of sequence preferred for the trial of compiled layers: kernels are chosen for the first row's length."""

Measure = Callable[[MicroBatch], Tensor]
"""What a model says of each loss token of a micro-batch, [M]."""
Share = Sequence[tuple[list[int], list[Sample]]]
"""The samples of each of a rank's micro-batches, and their indices among those of all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Something that all ranks do at once, each with its share: `measure` (with what), `update` or `fit`."""

    what: str
    arguments: dict[str, Any]
    share: Share


class Stepper:
    """Runs train steps on one policy, and on its critic if there is one.

    A step changes the weights, the optimisers, and the generator that splits batches, but never the reference. All
    ranks call a method together; what ranks other than 0 give it is not looked at, and they get nothing back. Raises
    ConfigError if the user's own function cannot be imported.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        generator: torch.Generator,
        algorithm: AlgorithmConfig,
        config: TrainerConfig,
        *,
        reference: Callable[[MicroBatch], tuple[Tensor, Tensor]] | None = None,
        teacher: Callable[[MicroBatch], tuple[Tensor, Tensor]] | None = None,
        critic: Critic | None = None,
        group: Group = ALONE,
        recorder: TokenRecorder | None = None,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._generator = generator
        self._algorithm = algorithm
        self._config = config
        self._group = group
        self._measures: dict[str, Measure] = {"policy": lambda batch: policy.logprobs_and_entropy(batch)[0]}
        if reference is not None:
            self._measures["reference"] = lambda batch: reference(batch)[0]
        if teacher is not None:
            self._measures["teacher"] = lambda batch: teacher(batch)[0]
        if critic is not None:
            self._measures["critic"] = critic.values
        self._critic = critic
        self._works = [policy.work] + ([] if critic is None else [critic.work])
        self._recorder = recorder
        self._objective = choose_objective(algorithm)
        self._own_advantage: AdvantageFunction | None = load_own(algorithm, "advantage")

    def train(self, given: StepInput) -> dict[str, float]:
        """Train one step and return its metrics.

        A minibatch without loss tokens makes no update, nor does one whose gradient is not finite
        (`num_skipped_updates`) or exactly zero (`num_empty_updates`), as when all groups are alike and the loss has no
        other term.
        """
        if self._group.rank:
            return self._follow(given.step)
        laps = Laps()
        given = self._credited(given)
        samples = self._measured([sample_of(record, given.images) for record in given.records])
        laps.end("proximal")
        differences = self._judged(given, samples)
        if differences is not None:
            laps.end("teacher")
        samples = self._kept(given, self._scored(given, samples, differences))
        minibatches = self._minibatches(samples)
        laps.end("advantages")
        start_version = WeightVersion(incarnation=given.incarnation, step=given.step - 1)
        updates: list[Update] = [
            self._together("update", chosen, start_version=start_version, is_first=number == 0)
            for number, chosen in enumerate(minibatches)
        ]
        memory = self._end(given.step)
        laps.end("update")
        return {
            **update_metrics(updates, [[one.inputs for one in chosen] for chosen in minibatches]),
            **reward_metrics(given),
            **advantage_metrics(samples),
            **critic_metrics(samples, updates),
            **({} if differences is None else distill_metrics(differences)),
            **mfu_metrics(updates, laps.seconds["update"], self._policy.device, self._group),
            **{f"seconds_{phase}": seconds for phase, seconds in laps.seconds.items()},
            **memory,
        }

    # ------------------------------------------------------------------ all ranks together

    def _together(self, what: str, samples: Sequence[Sample], **arguments: Any) -> Any:
        """Have every rank do its share of this work. Return what this rank's share gives."""
        shares = self._shares(samples)
        return self._do(self._group.scatter([Work(what=what, arguments=arguments, share=share) for share in shares]))

    def _follow(self, step: int | None = None) -> dict[str, float]:
        """Do this rank's share of what rank 0 hands out, until it has done."""
        while isinstance(work := self._group.scatter(), Work):
            self._do(work)
        self._generator.set_state(work)
        return self._finished(step)

    def _do(self, work: Work) -> Any:
        do = {"update": self._update, "fit": self._fit}.get(work.what, self._measure)
        measured = work.arguments.get("by")
        if self._policy.is_untried:
            self._try_compiled(work.share)
        with ExitStack() as computing:
            if measured in (None, "policy"):
                computing.enter_context(self._policy.computing())
            if self._critic is not None and measured in (None, "critic"):
                computing.enter_context(self._critic.computing())
            return do(work.share, **work.arguments)

    def _try_compiled(self, share: Share) -> None:
        """Try compiled layers on one sequence: a whole micro-batch may be too much for layers as they are."""
        samples = [one for one in share[0][1] if one.num_loss_tokens] if share else []
        if samples:
            usual = min(samples, key=lambda one: abs(one.num_tokens - TRIAL_TOKENS))
            with self._policy.computing():
                self._policy.try_compiled(self._collate([usual]))

    def _end(self, step: int | None = None) -> dict[str, float]:
        """Release the other ranks, whose generators have drawn nothing. Return metrics of all ranks."""
        self._group.scatter([self._generator.get_state()] * self._group.num_data_ranks)
        return self._finished(step)

    def _finished(self, step: int | None) -> dict[str, float]:
        if self._recorder is not None and step is not None:
            self._recorder.write(step)
        return device_memory(self._policy.device, self._group)

    # ------------------------------------------------------------------ supervised fine-tuning

    def fit(
        self, records: Sequence[TokenRecord], rate: float = 1.0, images: Mapping[str, bytes] = NO_IMAGES
    ) -> dict[str, float]:
        """Make one update towards the loss tokens of `records`, and return its metrics.

        The loss is their mean negative log-probability in nats, -(1/N) sum_t log p_t over the N loss tokens of all
        records. `rate` multiplies the schedule's learning rate. A gradient that is not finite makes no update.
        """
        if self._group.rank:
            return self._follow()
        samples = [sample_of(record, images) for record in records]
        num_tokens = sum(one.num_loss_tokens for one in samples)
        samples = [replace(one, weight=1.0 / max(num_tokens, 1)) for one in samples]
        metrics: dict[str, float] = self._together("fit", samples, rate=rate)
        return {**metrics, "num_loss_tokens": num_tokens, **self._end()}

    def _fit(self, share: Share, rate: float) -> dict[str, float]:
        self._optimizer.clear_gradients()
        loss, num_input_tokens = 0.0, 0
        for _, samples in share:
            batch = self._collate(samples)
            logprobs, _ = self._policy.logprobs_and_entropy(batch)
            of_batch = -(logprobs * batch.weights).sum()
            of_batch.backward()
            loss += float(of_batch.detach())
            num_input_tokens += batch.num_input_tokens
        self._optimizer.rate = rate
        learning_rate, norm = self._optimizer.learning_rate, self._optimizer.update()
        sums = [sum(column) for column in zip(*self._group.gather([loss, num_input_tokens]), strict=True)]
        return {
            "loss": sums[0],
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "num_input_tokens": sums[1],
            "num_skipped_updates": float(not math.isfinite(norm)),
        }

    def measure(self, records: Sequence[TokenRecord], images: Mapping[str, bytes] = NO_IMAGES) -> list[Tensor]:
        """Return the log-probability of each loss token of each record, [M] float32, in nats."""
        if self._group.rank:
            self._follow()
            return []
        measured = self._by_sample([sample_of(record, images) for record in records], "policy")
        self._end()
        return measured

    # ------------------------------------------------------------------ before the updates

    def _credited(self, given: StepInput) -> StepInput:
        """Add named reward parts to the final rewards, and credit turns with the rewards of their branches."""
        records, rewards = with_parts(given.records, given.rewards, given.parts, self._algorithm.reward_parts)
        return replace(given, records=with_causal_credit(records, self._algorithm.discount), rewards=rewards)

    def _measured(self, samples: Sequence[Sample]) -> list[Sample]:
        """Add what the models compute at the start of the step, as far as the algorithm needs it.

        A single minibatch needs no proximal log-probabilities: its own forward pass uses those weights.
        """
        measured = list(samples)
        is_distilled = self._algorithm.teacher is not None and self._algorithm.proximal != "behavior"
        has_several = self._algorithm.proximal == "recompute" and self._num_minibatches(samples) > 1
        if self._is_penalised or is_distilled or has_several:
            proximal = self._by_sample(samples, "policy")
            measured = [replace(one, proximal=part) for one, part in zip(measured, proximal, strict=True)]
        if "reference" in self._measures:
            parts = self._by_sample(samples, "reference")
            measured = [replace(one, reference=part) for one, part in zip(measured, parts, strict=True)]
        if self._critic is not None:
            values = self._by_sample(samples, "critic")
            measured = [replace(one, values=part) for one, part in zip(measured, values, strict=True)]
        return measured

    @property
    def _is_penalised(self) -> bool:
        return self._algorithm.kl_in == "reward" and self._algorithm.kl_coefficient > 0

    def _by_sample(self, samples: Sequence[Sample], by: str) -> list[Tensor]:
        """Have every rank measure its share, and return the results as one [M] tensor a sample."""
        found: dict[int, Tensor] = self._together("measure", samples, by=by)
        return [found.get(index, torch.zeros(0)) for index in range(len(samples))]

    @torch.no_grad()
    def _measure(self, share: Share, by: str) -> dict[int, Tensor]:
        """Return what all ranks measured, by the index of the sample; ranks other than 0 get nothing."""
        measured: dict[int, Tensor] = {}
        for indices, samples in share:
            found = self._measures[by](self._collate(samples)).float().cpu()
            parts = found.split([one.num_loss_tokens for one in samples])
            measured |= {index: part.clone() for index, part in zip(indices, parts, strict=False)}  # no view is sent
        return {index: part for of_rank in self._group.collect(measured) for index, part in of_rank.items()}

    def _judged(self, given: StepInput, samples: Sequence[Sample]) -> list[Tensor] | None:
        """Return by how much likelier a teacher finds each loss token, [M] a record; None without a teacher."""
        if "teacher" in self._measures:
            judged = self._by_sample(samples, "teacher")
        elif given.teacher is not None:
            judged = [torch.from_numpy(one) for one in given.teacher]
        else:
            return None
        students = [one.behavior if one.proximal is None else one.proximal for one in samples]
        return [teacher_differences(*pair) for pair in zip(judged, students, strict=True)]

    def _scored(
        self, given: StepInput, samples: Sequence[Sample], differences: Sequence[Tensor] | None
    ) -> list[Sample]:
        """Add advantages and, for a critic, returns. `differences` are a teacher's."""
        teacher = self._algorithm.teacher
        if teacher is not None:
            assert differences is not None, "a teacher's log-probabilities come with the batch, or it is loaded here"
            if teacher.is_alone:
                advantages = distilled_advantages(differences, None, teacher)
                return [replace(one, advantages=part) for one, part in zip(samples, advantages, strict=True)]
        penalties = [self._penalty(one) for one in samples] if self._is_penalised else None
        values = [one.values for one in samples if one.values is not None] if self._critic is not None else None
        if self._own_advantage is None:
            advantages = token_advantages(given.records, self._algorithm, values=values, penalties=penalties)
        else:
            advantages = own_advantages(self._own_advantage, given.records, given.rewards, self._algorithm)
        advantages = [
            one[torch.from_numpy(record.loss_mask)] for one, record in zip(advantages, given.records, strict=True)
        ]
        if teacher is not None and differences is not None:
            advantages = distilled_advantages(differences, advantages, teacher)
        scored = [replace(sample, advantages=one) for sample, one in zip(samples, advantages, strict=True)]
        if values is None:
            return scored
        returns = value_targets(given.records, values, self._algorithm, penalties=penalties)
        return [replace(sample, returns=one) for sample, one in zip(scored, returns, strict=True)]

    def _kept(self, given: StepInput, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Empty the samples that `truncated: mask` takes out of the loss."""
        if self._algorithm.truncated == "train":
            return samples
        is_cut = [bool(record.truncated[-1]) for record in given.records]
        return [sample.emptied() if cut else sample for sample, cut in zip(samples, is_cut, strict=True)]

    def _penalty(self, sample: Sample) -> Tensor:
        assert sample.proximal is not None and sample.reference is not None, "a divergence needs a reference"
        kl = divergence(sample.proximal, sample.reference, self._algorithm.kl_estimator)
        return self._algorithm.kl_coefficient * kl

    def _num_minibatches(self, samples: Sequence[Sample]) -> int:
        return min(self._algorithm.minibatches, len({one.rollout for one in samples if one.num_loss_tokens}))

    def _minibatches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Deal whole rollouts at random into one minibatch for each update. Empty without loss tokens."""
        by_rollout: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.num_loss_tokens:
                by_rollout.setdefault(sample.rollout, []).append(sample)
        rollouts = list(by_rollout.values())
        count = self._num_minibatches(samples)
        order = torch.randperm(len(rollouts), generator=self._generator) if count > 1 else torch.arange(len(rollouts))
        shares = order.tensor_split(count) if count else ()
        return [self._weighted([one for i in share.tolist() for one in rollouts[i]]) for share in shares]

    def _weighted(self, samples: Sequence[Sample]) -> list[Sample]:
        """Set the weight of each sample's tokens in one update."""
        weights = token_weights(
            [one.num_loss_tokens for one in samples], [one.rollout for one in samples], self._algorithm
        )
        return [replace(one, weight=weight) for one, weight in zip(samples, weights, strict=True)]

    # ------------------------------------------------------------------ the updates

    def _update(self, share: Share, start_version: WeightVersion, *, is_first: bool) -> Update:
        """Accumulate the gradient of all samples, then update once. `is_first` marks the first update of a step."""
        tally = Tally()
        self._optimizer.clear_gradients()  # an earlier step that failed midway may have left some
        if self._critic is not None:
            self._critic.optimizer.clear_gradients()
        for _, samples in share:
            tally = tally.merge(self._backward(self._collate(samples), samples, start_version, is_first=is_first))
        learning_rate, clip = self._optimizer.learning_rate, self._optimizer.clip
        norm = self._optimizer.update()
        return Update(
            tally=reduce(Tally.merge, [tally.read(iter(one)) for one in self._group.gather(tally.numbers())]),
            gradient_norm=norm,
            gradient_clip=clip,
            learning_rate=learning_rate,
            critic_gradient_norm=self._critic.optimizer.update() if self._critic is not None else None,
        )

    def _backward(
        self, batch: MicroBatch, samples: Sequence[Sample], start_version: WeightVersion, *, is_first: bool
    ) -> Tally:
        logprobs, entropy = self._policy.logprobs_and_entropy(batch)
        start = logprobs.detach() if batch.proximal is None else batch.proximal
        assert batch.advantages is not None, "scored samples have advantages"
        tokens = LossTokens(
            logprobs=logprobs,
            entropy=entropy,
            proximal=self._proximal(batch, start, logprobs, start_version),
            behavior=batch.behavior,
            advantages=batch.advantages,
            weights=batch.weights,
            sequences=batch.sequences,
            reference=batch.reference,
        )
        self._keep(samples, tokens)
        if batch.num_loss_tokens:
            loss, stats = policy_loss(tokens, self._algorithm, self._objective)
        else:  # a rank with nothing left still takes part, with a gradient of zero
            loss, stats = logprobs.sum(), LossStats()
        loss.backward()
        value_loss, num_clipped = (0.0, 0) if self._critic is None else self._critic.backward(batch)
        is_of_the_start = is_first or batch.proximal is not None  # else the mismatch would include earlier updates
        return Tally(
            loss=float(loss.detach()),
            entropy_sum=float(entropy.detach().sum()),
            num_input_tokens=batch.num_input_tokens,
            num_shared_tokens=batch.num_shared_tokens,
            num_positions=batch.inputs.numel(),
            num_micro_batches=1,
            num_operations=sum(one.count(batch) for one in self._works),
            value_loss=value_loss,
            num_clipped_values=num_clipped,
            losses=stats,
            mismatch=Mismatch.of(start, batch.behavior, _is_of(batch, start_version))
            if is_of_the_start
            else Mismatch(),
        )

    def _keep(self, samples: Sequence[Sample], tokens: LossTokens) -> None:
        """Keep what the loss is computed from, of those trajectories that are chosen for it."""
        if self._recorder is None or not any(self._recorder.keeps(one.rollout) for one in samples):
            return
        columns = torch.stack([tokens.logprobs.detach(), tokens.proximal.detach(), tokens.advantages]).float().cpu()
        parts = columns.split([one.num_loss_tokens for one in samples], dim=1)  # after one transfer for all samples
        for one, part in zip(samples, parts, strict=True):
            if self._recorder.keeps(one.rollout):
                seen = SeenTokens((one.predicting + 1).int().numpy(), *part.numpy())
                self._recorder.add(one.rollout, one.branch, seen)

    def _proximal(self, batch: MicroBatch, start: Tensor, logprobs: Tensor, start_version: WeightVersion) -> Tensor:
        """Return the log-probabilities of the policy around which ratios are clipped."""
        match self._algorithm.proximal:
            case "recompute":
                return start
            case "approximate":
                return approximate_proximal(logprobs, batch.behavior, batch.versions, start_version.step)
            case "behavior":
                return batch.behavior

    # ------------------------------------------------------------------ micro-batches

    def _shares(self, samples: Sequence[Sample]) -> list[Share]:
        """Return the micro-batches of each data rank. Samples without loss are skipped.

        Every data rank gets equally many, because a forward pass is collective; one that runs out gets a sample without
        a loss token.
        """
        present = [index for index, one in enumerate(samples) if one.num_loss_tokens]
        overlaps: list[int] = []
        if self._config.packing == "tree" and pays([samples[index].inputs for index in present]):
            order, overlaps = in_order([samples[index].inputs for index in present])
            present = [present[place] for place in order]
        lengths = [samples[index].num_tokens for index in present]
        dealt = deal(self._split(lengths, overlaps), lengths, self._group.num_data_ranks, overlaps)
        shares: list[Share] = []
        for parts in dealt:
            batches = [[present[place] for place in part] for part in parts]
            shares.append([(one, [samples[i] for i in one] or [samples[present[0]].emptied()]) for one in batches])
        return shares

    def _collate(self, samples: Sequence[Sample]) -> MicroBatch:
        packing = self._config.packing
        is_tree = packing == "tree" and pays([one.inputs for one in samples])
        return collate(samples, self._policy.device, is_padded=packing == "padded", is_tree=is_tree)

    def _split(self, lengths: Sequence[int], overlaps: Sequence[int]) -> list[list[int]]:
        budget = self._config.tokens_per_micro_batch
        match self._config.packing:
            case "tree" if any(overlaps):
                return siblings(lengths, overlaps, budget)
            case "balanced" | "tree":
                return balanced(lengths, budget, at_least=self._group.num_data_ranks)
            case "first_fit":
                return first_fit(lengths, budget)
            case "padded":
                return alike(lengths, budget)


def _is_of(batch: MicroBatch, version: WeightVersion) -> Tensor:
    """Return which loss tokens this very version sampled, [M]. Two incarnations of one step are different versions."""
    return (batch.versions == version.step) & (batch.incarnations == version.incarnation)


class Laps:
    """Measures how long each phase of a step takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = time.perf_counter()

    def end(self, phase: str) -> None:
        """Record that `phase` has just ended. It began when the one before ended."""
        now_s = time.perf_counter()
        self.seconds[phase] = now_s - self._since_s
        self._since_s = now_s
