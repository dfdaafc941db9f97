"""Decode steps in a few fixed shapes, which a GPU replays as CUDA graphs.

A decode step is some hundreds of small kernels, and launching them takes a GPU's host longer than computing them takes
the GPU. A graph is launched once, but its shapes and addresses are fixed. So rows and width are rounded up, inputs and
logits have buffers that stay, and each shape is recorded at the start:

    ids, positions, lengths ── one copy ──▶ inputs [3, R] ── graph of (R, W) ──▶ logits [S, V], its first R rows

Weights are swapped in place and slots stay where they are, so a graph stays right for as long as the cache has its
memory. A row that is only there to fill up R attends to the first position of its slot, and writes to the one after
the longest context, which no other row reads. Where no graph can be recorded, and on a CPU, where only tests use this,
the same function is called.

Shapes: n rows, R rows and W positions of a fixed shape, S slots, V vocabulary.
"""

import gc
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from areal_agent.engine.embedded.decoder import Bucket, Decoder, DecodeStep, StepGivenUp, bucket_rows, length_mask
from areal_agent.engine.embedded.kv_cache import KVCache

logger = logging.getLogger(__name__)

NARROWEST = 128
EXCESS_BYTES = 20e9
"""Keys and values that a step may read more than one in buckets would: an H100 reads them while that is launched."""


class FixedShapes:
    """The decode steps of one model over one cache. Use it from one thread at a time, as the model."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        max_context_tokens: int,
        vocab_size: int,
        excess_bytes: float = EXCESS_BYTES,
    ) -> None:
        """Record all shapes. The cache has `whole_positions` of the longest context."""
        self._excess_bytes = excess_bytes
        self._decoder = decoder
        self._cache = cache
        self._rows = sizes(1, cache.num_slots, with_middles=False)
        longest = -(-max_context_tokens // 16) * 16  # kernels want whole blocks
        self._widths = sizes(min(NARROWEST, longest), longest, with_middles=True)
        self._inputs = {
            rows: torch.zeros(3, rows, dtype=torch.long, device=cache.device) for rows in self._rows
        }  # of each size its ids, positions and lengths
        self._logits = torch.zeros(cache.num_slots, vocab_size, device=cache.device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._stream: torch.cuda.Stream | None = None
        self._is_warm = False
        self._can_record = cache.device.type == "cuda"
        self.record()

    def takes(self, lengths: Sequence[int]) -> bool:
        """Return whether rows of these lengths, the new token counted, are near enough to one of the shapes."""
        rows, width = self._shape(lengths)
        in_buckets = sum((stop - start) * max(lengths[start:stop]) for start, stop in bucket_rows(lengths))
        return (rows * width - in_buckets) * self._cache.token_bytes <= self._excess_bytes

    @torch.inference_mode()
    def logits(self, last_ids: Sequence[int], lengths: Sequence[int], *, unneeded: threading.Event) -> Tensor:
        """Compute one more token in each of the first n slots, and return its logits `[n, V]` float32.

        They are overwritten by the next step. Raises StepGivenUp if `unneeded` is set.
        """
        if unneeded.is_set():
            raise StepGivenUp
        shape = rows, _ = self._shape(lengths)
        num_beyond = rows - len(lengths)
        told = [
            [*last_ids, *[0] * num_beyond],
            [*(length - 1 for length in lengths), *[self._cache.num_positions - 1] * num_beyond],
            [*lengths, *[1] * num_beyond],
        ]
        self._inputs[rows].copy_(torch.from_numpy(np.array(told)), non_blocking=True)
        if (graph := self._graphs.get(shape)) is None:
            self._compute(*shape)
        else:
            graph.replay()
        return self._logits[: len(lengths)]

    @property
    def num_graphs(self) -> int:
        """The number of recorded shapes; 0 where steps are launched kernel by kernel."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drop all graphs, before the cache gives its memory back."""
        self._graphs.clear()

    def record(self) -> None:
        """Record a graph of every shape on a GPU. Where that fails, steps are launched as they are on a CPU."""
        if not self._can_record:
            return
        started_s = time.perf_counter()
        gc.collect()
        gc.disable()  # what is collected while a graph is recorded may free memory of the GPU, which would spoil it
        try:
            self._stream = self._stream or torch.cuda.Stream(self._cache.device)  # libraries keep memory for each
            pool = torch.cuda.graph_pool_handle()
            for rows in reversed(self._rows):  # the largest first: the others find room in its memory
                self._inputs[rows].copy_(torch.tensor([[0], [self._cache.num_positions - 1], [1]]))
                for width in self._widths:
                    self._graphs[rows, width] = self._recorded(rows, width, pool, self._stream)
        except RuntimeError as error:
            self._graphs.clear()
            self._can_record = False  # a failure may leave torch's allocator as if it went on
            logger.warning(
                "decode steps are launched kernel by kernel, which is slow, since no CUDA graph could be recorded: %s",
                str(error)[:300],
            )
            return
        finally:
            gc.enable()
        self._is_warm = True
        taken_s = time.perf_counter() - started_s
        logger.info("recorded decode steps of %d shapes in %.1f s", len(self._graphs), taken_s)

    def _recorded(self, rows: int, width: int, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            if not self._is_warm:  # kernels are loaded, and libraries take their memory, before
                self._compute(rows, width)
            stream.synchronize()
            # `torch.cuda.graph` would collect garbage each time; other threads may go on allocating meanwhile
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._compute(rows, width)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                with suppress(RuntimeError, AttributeError):  # before torch 2.12 that leaves the allocator recording
                    cast(Any, torch)._C._cuda_endAllocateToPool(self._cache.device.index, pool)
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def _compute(self, rows: int, width: int) -> None:
        ids, positions, lengths = self._inputs[rows]
        mask = length_mask(lengths, width, self._cache.dtype)
        step = DecodeStep.of(self._cache, positions, [Bucket(start=0, stop=rows, width=width, mask=mask)])
        hidden = self._decoder.hidden(ids, positions, step, unneeded=threading.Event())  # a graph runs to its end
        self._decoder.logits(hidden, out=self._logits[:rows])

    def _shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        rows = self._rows[bisect_left(self._rows, len(lengths))]
        return rows, self._widths[bisect_left(self._widths, max(lengths))]


def sizes(smallest: int, largest: int, *, with_middles: bool) -> list[int]:
    """The sizes that others are rounded up to: doublings, perhaps with the middle between two, and the largest.

    >>> sizes(1, 12, with_middles=False)
    [1, 2, 4, 8, 12]
    >>> sizes(128, 600, with_middles=True)
    [128, 192, 256, 384, 512, 600]
    """
    found: list[int] = []
    size = smallest
    while size < largest:
        found += [size, size + size // 2] if with_middles else [size]
        size *= 2
    return [*(one for one in found if one < largest), largest]
