"""How the samples of one pass become the micro-batches of this rank. It knows no model and no loss.

Every rank has equally many, for going through a model is something that all ranks do together; one that has nothing
left is given a sample of no loss token.
"""

from collections.abc import Iterator, Sequence

import torch

from areal_agent.algorithms.batching import MicroBatch, collate
from areal_agent.algorithms.packing import alike, balanced, deal, first_fit
from areal_agent.algorithms.samples import Sample
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.group import Group


class MicroBatches:
    """Splits samples as `trainer.packing` says, within the token budget."""

    def __init__(self, config: TrainerConfig, device: torch.device, group: Group) -> None:
        self._config = config
        self._device = device
        self._group = group

    def share(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], MicroBatch]]:
        """The micro-batches of this rank, with the indices of their samples: those that have loss tokens."""
        present = [index for index, one in enumerate(samples) if one.num_loss_tokens]
        lengths = [samples[index].num_tokens for index in present]
        for part in deal(self._split(lengths), lengths, self._group.size)[self._group.rank]:
            indices = [present[place] for place in part]
            chosen = [samples[index] for index in indices] or [samples[present[0]].emptied()]
            yield indices, collate(chosen, self._device, is_padded=self._config.packing == "padded")

    def _split(self, lengths: Sequence[int]) -> list[list[int]]:
        budget = self._config.tokens_per_micro_batch
        match self._config.packing:
            case "balanced":
                return balanced(lengths, budget, at_least=self._group.size)
            case "first_fit":
                return first_fit(lengths, budget)
            case "padded":
                return alike(lengths, budget)
