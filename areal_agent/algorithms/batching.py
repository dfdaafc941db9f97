"""From records to the tensors that a model is run on: loss tokens, micro-batches under a token budget, padding.

A *sample* is the part of one record that the loss needs. Micro-batches are padded on the right: a causal model never
looks there, so the padding changes no value. Knows no model and no loss.
Shapes: T input tokens and M loss tokens of one sample; S samples and M loss tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from areal_agent.types import TokenRecord


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One record as the loss sees it. Loss token m is predicted at input position `predicting[m]`.

    A record of tokens `a b C D e`, of which C and D were sampled, has the inputs `a b C`, predicts at 1 and 2, and
    leaves out what trails its last loss token. Fields with a default are filled in on the way through a train step, as
    far as the algorithm needs them.
    """

    rollout: str  # the session that it is a branch of
    inputs: Tensor  # [T] int64
    predicting: Tensor  # [M] int64, in 0..T-1
    targets: Tensor  # [M] int64
    temperatures: Tensor  # [M] float32
    behavior: Tensor  # [M] float32, log-probabilities by the engine
    versions: Tensor  # [M] int32, WeightVersion.step
    advantages: Tensor | None = None  # [M] float32
    weight: float = 0.0  # of each of its loss tokens in the loss of the optimiser update
    proximal: Tensor | None = None  # [M] float32, log-probabilities at the start of the step
    reference: Tensor | None = None  # [M] float32, log-probabilities by the reference model
    values: Tensor | None = None  # [M] float32, of the critic at the start of the step
    returns: Tensor | None = None  # [M] float32, what the critic learns

    @property
    def num_tokens(self) -> int:
        """Input tokens: what it costs."""
        return len(self.inputs)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets)


def sample_of(record: TokenRecord) -> Sample:
    """Take from a record what the loss needs.

    Raises ValueError for a record that cannot be trained: its first token is in the loss, or a loss token has no
    finite log-probability or no positive temperature.
    """
    _check(record)
    positions = torch.from_numpy(record.loss_mask).nonzero().squeeze(1)  # [M]
    tokens = torch.from_numpy(record.token_ids).long()
    num_inputs = int(positions[-1]) if len(positions) else 0
    return Sample(
        rollout=record.session_id,
        inputs=tokens[:num_inputs],
        predicting=positions - 1,
        targets=tokens[positions],
        temperatures=torch.from_numpy(record.temperatures)[positions],
        behavior=torch.from_numpy(record.behavior_logprobs)[positions],
        versions=torch.from_numpy(record.versions)[positions],
    )


def _check(record: TokenRecord) -> None:
    where = f"branch {record.branch} of session {record.session_id!r}"
    mask = record.loss_mask
    if mask[:1].any():
        raise ValueError(
            f"{where}: its first token is in the loss, but nothing predicts it; a prompt has to come first"
        )
    logprobs = torch.from_numpy(record.behavior_logprobs[mask])
    if not bool(logprobs.isfinite().all()):
        raise ValueError(f"{where}: a loss token has no finite behaviour log-probability; mask it")
    temperatures = torch.from_numpy(record.temperatures[mask])
    if not bool((temperatures > 0).all()):
        raise ValueError(f"{where}: a loss token has temperature {float(temperatures.min())}; mask greedy tokens")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Samples padded to one length; their loss tokens are concatenated in order, M of them.

    What is None is in none of the samples.
    """

    inputs: Tensor  # [S, T] int64, padded on the right
    num_input_tokens: int  # without padding
    predicting: Tensor  # [M] int64, positions in the flattened inputs
    sequences: Tensor  # [M] int64, in 0..S-1: the row of each loss token
    targets: Tensor  # [M]
    temperatures: Tensor  # [M]
    behavior: Tensor  # [M]
    versions: Tensor  # [M]
    weights: Tensor  # [M] float32
    advantages: Tensor | None  # [M]
    proximal: Tensor | None  # [M]
    reference: Tensor | None  # [M]
    values: Tensor | None  # [M]
    returns: Tensor | None  # [M]

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets)


def collate(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Pad samples to the longest of them and concatenate their loss tokens, on `device`."""
    inputs = pad_sequence([sample.inputs for sample in samples], batch_first=True)
    width = inputs.shape[1]
    counts = torch.tensor([one.num_loss_tokens for one in samples])
    weights = torch.tensor([one.weight for one in samples])
    return MicroBatch(
        inputs=inputs.to(device),
        num_input_tokens=sum(one.num_tokens for one in samples),
        predicting=torch.cat([row * width + one.predicting for row, one in enumerate(samples)]).to(device),
        sequences=torch.arange(len(samples)).repeat_interleave(counts).to(device),
        targets=torch.cat([one.targets for one in samples]).to(device),
        temperatures=torch.cat([one.temperatures for one in samples]).to(device),
        behavior=torch.cat([one.behavior for one in samples]).to(device),
        versions=torch.cat([one.versions for one in samples]).to(device),
        weights=weights.repeat_interleave(counts).to(device),
        advantages=_joined(samples, "advantages", device),
        proximal=_joined(samples, "proximal", device),
        reference=_joined(samples, "reference", device),
        values=_joined(samples, "values", device),
        returns=_joined(samples, "returns", device),
    )


def _joined(
    samples: Sequence[Sample],
    field: Literal["advantages", "proximal", "reference", "values", "returns"],
    device: torch.device,
) -> Tensor | None:
    """One field of all samples, which have it or lack it alike."""
    parts: list[Tensor | None] = [getattr(one, field) for one in samples]
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), f"{len(present)} of {len(parts)} samples have {field}"
    return torch.cat(present).to(device) if present else None


def schedule(
    lengths: Sequence[int], token_budget: int, *, at_least: int = 1, max_padding: float = 1.0
) -> list[list[int]]:
    """Group sequences into micro-batches of at most `token_budget` tokens, padding included (arXiv 2505.24298, alg. 1).

    Sequences are taken by falling length. Each opens a new micro-batch while there are fewer than `at_least` or none
    fits; otherwise it joins the fitting one with the fewest sequences. As the first of a micro-batch is its longest,
    one more sequence costs that length; it fits when the budget allows that and its own padding is no larger a part of
    it than `max_padding`. A sequence longer than the budget is alone. Every index is in exactly one micro-batch; the
    result depends on the lengths alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    micro_batches: list[list[int]] = []
    for index in order:
        fitting = [
            one
            for one in micro_batches
            if (len(one) + 1) * lengths[one[0]] <= token_budget
            and lengths[index] >= (1.0 - max_padding) * lengths[one[0]]
        ]
        if len(micro_batches) < at_least or not fitting:
            micro_batches.append([index])
        else:
            min(fitting, key=len).append(index)
    return micro_batches
