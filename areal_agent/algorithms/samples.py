"""What of one record the loss needs: a *sample*. Knows no other record, no micro-batch and no model.

Shapes: T input tokens and M loss tokens of one sample.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

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
    incarnations: Tensor  # [M] int32, WeightVersion.incarnation
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

    def emptied(self) -> Self:
        """A sample of one input token and no loss token, with the same fields filled in: work that changes nothing."""
        of_tokens = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("rollout", "weight")}
        nothing = {name: value[:0] for name, value in of_tokens.items() if value is not None}
        return replace(self, **(nothing | {"inputs": torch.zeros(1, dtype=torch.long)}))


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
        incarnations=torch.from_numpy(record.incarnations)[positions],
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
