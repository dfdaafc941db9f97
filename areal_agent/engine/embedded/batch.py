"""How the rows of one batch sample, from one change of its rows to the next: adjust the logits, then draw.

It reads the requests of rows and what they have so far; it gives them nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_agent.engine.embedded.adjustments import Adjustments, History
from areal_agent.engine.embedded.row import Row
from areal_agent.engine.embedded.sampler import Draws, SamplingRows, sample


class SamplingBatch:
    """The sampling of these rows, in this order. Rows that come, go or move make a new one necessary."""

    def __init__(self, rows: Sequence[Row], *, vocab_size: int, device: torch.device) -> None:
        params = [row.request.sampling for row in rows]
        histories = [History(prompt_ids=row.request.input_ids, token_ids=row.token_ids) for row in rows]
        self._rows = rows
        self._adjustments = Adjustments.of(params, histories, vocab_size=vocab_size, device=device)
        self._sampling = SamplingRows.of(
            params,
            [row.seed for row in rows],
            [row.request.num_top_logprobs for row in rows],
            vocab_size=vocab_size,
            device=device,
        )

    @torch.inference_mode()
    def sample(self, logits: Tensor) -> Draws:
        """The next token of every row; logits `[n, V]`."""
        adjusted = logits if self._adjustments is None else self._adjustments.apply(logits)
        draws = sample(adjusted, self._sampling, [len(row.token_ids) for row in self._rows])
        if self._adjustments is not None:
            self._adjustments.follow(draws.token_ids)
        return draws
