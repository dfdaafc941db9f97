"""Which attention over pages this machine has: the quick one where it has proved to be right."""

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from areal_agent.engine.embedded.kv_cache import KVShape
from areal_agent.engine.embedded.paged.attention import Flash, Gathered, PagedAttention, PagedPieces
from areal_agent.engine.embedded.paged.pool import PAGE_TOKENS, PagePool

logger = logging.getLogger(__name__)

_TOLERANCE = 0.05
"""Of means of standard normal values in bfloat16, whose 8 bits leave 0.01 of each."""

_LENGTHS = (3 * PAGE_TOKENS + 5, PAGE_TOKENS, 1)  # of the rows of the trial


def best_attention(shape: KVShape, *, num_heads: int, device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """`Flash` on a GPU where it is proved, else `Gathered`."""
    if device.type != "cuda":
        return Gathered()
    return proved(Flash.of_torch, Flash.undo, Trial(shape, num_heads=num_heads, device=device, dtype=dtype))


def proved(make_quick: Callable[[], PagedAttention], undo: Callable[[], object], trial: "Trial") -> PagedAttention:
    """The quick one where it is to be had and answers as `Gathered` did before; else that, once the other is undone."""
    expected = trial.outputs(Gathered())
    try:
        quick = make_quick()
        error = trial.error(quick, expected)
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as failure:
        logger.info("attention gathers pages: FlashAttention 3 is not to be had (%s)", str(failure)[:200])
        undo()
        return Gathered()
    if not error <= _TOLERANCE:
        logger.warning("attention gathers pages: FlashAttention 3 is off by %.3g here", error)
        undo()
        return Gathered()
    logger.info("attention reads pages by FlashAttention 3, off by %.2g at most in a trial", error)
    return quick


class Trial:
    """One layer's attention over a few random rows, whose pages lie in no order."""

    def __init__(self, shape: KVShape, *, num_heads: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = KVShape(num_layers=1, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        self._num_heads = num_heads
        self._device, self._dtype = device, dtype
        width = -(-max(_LENGTHS) // PAGE_TOKENS)
        pages = np.random.default_rng(0).permutation(len(_LENGTHS) * width) + 1
        self._tables = pages.reshape(len(_LENGTHS), width).astype(np.int32)

    def error(self, attention: PagedAttention, expected: tuple[Tensor, Tensor]) -> float:
        """The largest difference of its outputs from these; NaN where there is one among them."""
        return float(
            torch.stack([(a - b).abs().max() for a, b in zip(self.outputs(attention), expected, strict=True)]).max()
        )

    def outputs(self, attention: PagedAttention) -> tuple[Tensor, Tensor]:
        """Of a prefill that goes on from another one, and of the decode after it."""
        generator = torch.Generator().manual_seed(0)
        pool = PagePool(self._shape, num_pages=self._tables.size + 1, device=self._device, dtype=self._dtype)
        begins = [length // 2 for length in _LENGTHS]
        first = PagedPieces(tables=self._tables[:2], begins=[0, 0], num_tokens=begins[:2])
        attention.prefill(pool, first).attend(0, *self._random(sum(begins), generator))
        ends = [length - begin for length, begin in zip(_LENGTHS, begins, strict=True)]
        second = PagedPieces(tables=self._tables, begins=begins, num_tokens=ends)
        prefilled = attention.prefill(pool, second).attend(0, *self._random(sum(ends), generator))
        lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=self._device) + 1
        step = attention.decode(pool, torch.from_numpy(self._tables).to(self._device), lengths)
        return prefilled, step.attend(0, *self._random(len(_LENGTHS), generator))

    def _random(self, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        heads = (self._num_heads, self._shape.num_kv_heads, self._shape.num_kv_heads)
        one, two, three = (
            torch.randn(num_tokens, number, self._shape.head_dim, generator=generator).to(self._device, self._dtype)
            for number in heads
        )
        return one, two, three
