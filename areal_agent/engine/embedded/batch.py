"""How the rows of one batch sample, from one change of its rows to the next: adjust the logits, then draw.

It reads the requests of rows and what they have so far; it gives them nothing but the progress of their grammars.
"""

from collections.abc import Sequence

import numpy as np
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
        self._vocab_size = vocab_size
        self._is_constrained = any(row.matcher is not None for row in rows)
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
        if self._is_constrained:
            adjusted = adjusted.masked_fill(self._forbidden().to(logits.device), float("-inf"))
        draws = sample(adjusted, self._sampling, [row.num_tokens for row in self._rows])
        if self._adjustments is not None:
            self._adjustments.follow(draws.token_ids)
        for row, token_id in zip(self._rows, draws.token_ids, strict=True) if self._is_constrained else ():
            if row.matcher is not None:
                row.matcher.follow([token_id])
        return draws

    def _forbidden(self) -> Tensor:
        """The tokens that no grammar lets come next, `[n, V]`."""
        free = np.ones(self._vocab_size, dtype=np.bool_)
        return torch.from_numpy(
            ~np.stack([free if row.matcher is None else row.matcher.allowed() for row in self._rows])
        )
