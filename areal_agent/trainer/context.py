"""Context parallelism: several ranks share the tokens of each packed row (Ulysses, arXiv 2309.14509).

    row of T tokens ─▶ each of C ranks embeds T / C of them ─▶ layers ─▶ log-probabilities of its own loss tokens
                                              │      ▲                            │
                          all-to-all: T tokens of H / C heads                  gather: [M] on every rank
                                              ▼      │
                              attention within the sequences of the whole row

All C ranks then compute the same loss. A rank's backward pass keeps the gradient of its own tokens alone, so that the
sum of gradients over all ranks counts each token once.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from areal_agent.algorithms.batching import MicroBatch
from areal_agent.errors import ConfigError

TOKENS, HEADS = 2, 1
"""The dimensions of queries, keys and values [1, H, T, D]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Context:
    """The ranks that share a row, as one of them sees them: this is number `rank` of `size`."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def check(self, num_heads: int) -> None:
        """Raise ConfigError unless the heads of the model can be shared out."""
        if num_heads % self.size:
            raise ConfigError(
                f"trainer.context_parallel is {self.size}, which does not divide the model's {num_heads} attention "
                f"heads; choose one of {[size for size in range(1, num_heads + 1) if num_heads % size == 0]}"
            )

    def part(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's tokens of a packed micro-batch, and the loss tokens that they predict.

        `segments` remain those of the whole row, which one more sequence fills up to a multiple of `size` tokens.
        """
        assert batch.segments is not None, "trainer.context_parallel is for packed rows"
        filling = -batch.inputs.shape[1] % self.size
        share = self._share(batch)
        tokens = slice(self.rank * share, (self.rank + 1) * share)
        mine = self._is_mine(batch)
        return replace(
            batch,
            inputs=pad(batch.inputs, (0, filling))[:, tokens],
            positions=pad(batch.positions, (0, filling))[:, tokens],
            segments=(*batch.segments, *([filling] if filling else [])),
            predicting=batch.predicting[mine] - tokens.start,
            targets=batch.targets[mine],
            temperatures=batch.temperatures[mine],
        )

    def gather(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """Return the values of all loss tokens of the whole batch, [M], from each rank's own in their order."""
        gathered: Any = _Gather.apply(values, self._is_mine(batch), self.group)
        return gathered

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange this rank's tokens of all heads for all tokens of its share of the heads.

        Key-value heads of which there are too few are repeated. Shapes: query [1, H, T / C, D], key and value
        [1, G, T / C, D] -> [1, H / C, T, D], [1, G' / C, T, D] with G' the least common multiple of G and C.
        """
        num_copies = math.lcm(key.shape[HEADS], self.size) // key.shape[HEADS]
        key, value = (one.repeat_interleave(num_copies, dim=HEADS) for one in (key, value))
        query, key, value = (self._exchange(one, HEADS, TOKENS) for one in (query, key, value))
        return query, key, value

    def tokens(self, outputs: Tensor) -> Tensor:
        """Exchange back what attention returns: [1, T, H / C, D] -> [1, T / C, H, D]."""
        return self._exchange(outputs, 1, 2)

    def own(self, of_heads: Tensor | None) -> Tensor | None:
        """Return this rank's share of one number a head, [H] -> [H / C]."""
        return None if of_heads is None else of_heads.chunk(self.size)[self.rank]

    def _exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        exchanged: Any = _Exchange.apply(tensor, self.group, self.size, split, join)
        return exchanged

    def _share(self, batch: MicroBatch) -> int:
        return math.ceil(batch.inputs.shape[1] / self.size)

    def _is_mine(self, batch: MicroBatch) -> Tensor:
        return batch.predicting // self._share(batch) == self.rank  # [M]


class _Exchange(torch.autograd.Function):
    """All-to-all: part c of dimension `split` goes to rank c, and what comes is joined along `join` by rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, size: int, split: int, join: int) -> Tensor:
        ctx.group, ctx.size, ctx.split, ctx.join = group, size, split, join
        sent = torch.stack(tensor.chunk(size, dim=split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back: Any = _Exchange.apply(gradients[0], ctx.group, ctx.size, ctx.join, ctx.split)
        return back, None, None, None, None


class _Gather(torch.autograd.Function):
    """Puts each rank's values at its own places. The gradient at these places is the values' own: none is added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, is_mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(is_mine)
        gathered = values.new_zeros(len(is_mine))
        gathered[is_mine] = values
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0][ctx.saved_tensors[0]], None, None
