"""From samples to the tensors that a model is run on: packed in one row, or padded to rows of one length.

Packed, sequences stand one behind the other in a single row; each begins at position 0, and attention keeps to
`segments`. Padded, each has a row of its own, filled up on the right: a causal model never looks there. Either way no
sequence sees another, and the loss tokens are the same. Knows no model and no loss.
Shapes: R rows of T tokens, S samples, M loss tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from areal_agent.algorithms.samples import Sample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Samples that go through the model together; their loss tokens are concatenated in order, M of them.

    What is None is in none of the samples. Packed, `a b c` and `d e` are the row `a b c d e` with the positions
    `0 1 2 0 1` and the segments `(3, 2)`.
    """

    inputs: Tensor  # [R, T] int64
    positions: Tensor  # [R, T] int64, of each token in its own sequence
    segments: tuple[int, ...] | None  # lengths of the sequences in the one row; None: one a row, padded on the right
    num_input_tokens: int  # of samples with loss tokens; without padding
    predicting: Tensor  # [M] int64, positions in the flattened inputs
    sequences: Tensor  # [M] int64, in 0..S-1: the sample of each loss token
    targets: Tensor  # [M]
    temperatures: Tensor  # [M]
    behavior: Tensor  # [M]
    versions: Tensor  # [M]
    incarnations: Tensor  # [M]
    weights: Tensor  # [M] float32
    advantages: Tensor | None  # [M]
    proximal: Tensor | None  # [M]
    reference: Tensor | None  # [M]
    values: Tensor | None  # [M]
    returns: Tensor | None  # [M]

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets)


def collate(samples: Sequence[Sample], device: torch.device, *, is_padded: bool = False) -> MicroBatch:
    """Put samples in one row, or in a row each with `is_padded`, and concatenate their loss tokens, on `device`."""
    lengths = [one.num_tokens for one in samples]
    positions = [torch.arange(length) for length in lengths]
    if is_padded:
        inputs = pad_sequence([one.inputs for one in samples], batch_first=True)
        starts = [row * inputs.shape[1] for row in range(len(samples))]
    else:
        inputs = torch.cat([one.inputs for one in samples])[None]
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
    counts = torch.tensor([one.num_loss_tokens for one in samples])
    weights = torch.tensor([one.weight for one in samples])
    return MicroBatch(
        inputs=inputs.to(device),
        positions=(pad_sequence(positions, batch_first=True) if is_padded else torch.cat(positions)[None]).to(device),
        segments=None if is_padded else tuple(lengths),
        num_input_tokens=sum(one.num_tokens for one in samples if one.num_loss_tokens),
        predicting=torch.cat([start + one.predicting for start, one in zip(starts, samples, strict=True)]).to(device),
        sequences=torch.arange(len(samples)).repeat_interleave(counts).to(device),
        targets=torch.cat([one.targets for one in samples]).to(device),
        temperatures=torch.cat([one.temperatures for one in samples]).to(device),
        behavior=torch.cat([one.behavior for one in samples]).to(device),
        versions=torch.cat([one.versions for one in samples]).to(device),
        incarnations=torch.cat([one.incarnations for one in samples]).to(device),
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
