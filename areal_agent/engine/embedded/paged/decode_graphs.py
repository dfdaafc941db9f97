"""Decode steps that were recorded once and are replayed: a GPU is not told each kernel anew (CUDA graphs).

A graph is of one number of rows and one width of their tables: both are padded up to the next size that there is one
for, and each is recorded when it is first wanted. Padding rows have one token, in nobody's page. Weights and pages are
read where they lie, so new weights that are copied in place need no new graph; memory that moved does. What a graph
answers with stays its own for as long as there is one: that is hidden states, for logits would take gigabytes.

Shapes: n rows, W pages of the longest one, E hidden size.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_agent.engine.embedded.paged.store import PageStore

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states `[n, E]` of the last token of each row: ids `[n]`, lengths `[n]`, tables `[n, W]`, all int32."""


class Recorder(Protocol):
    """Records what a function does with memory that stays where it is."""

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """What does it again, and the tensor that then holds the result. Raises RuntimeError."""
        ...

    def forget(self) -> None:
        """Nothing that was recorded is replayed any more."""
        ...


class CudaRecorder:
    """CUDA graphs; all share the memory of what they compute on the way."""

    def __init__(self) -> None:
        # One stream for all of them: libraries keep some 30 MiB for each stream that they were ever called on.
        self._side = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):  # which a capture that fails would stay on
            function()  # libraries set themselves up at a first call, which no graph may hold
            graph = torch.cuda.CUDAGraph()
            # Of this thread alone: another one may be taking new weights, which a capture of all would forbid.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                result = function()
        main.wait_stream(self._side)
        return graph.replay, result

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # torch refuses one whose graphs are all gone


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    num_rows: int
    width: int
    given: Tensor  # [n + n + n * W]: ids, lengths and tables in one piece, int32
    replay: Callable[[], object]
    hidden: Tensor  # [n, E]

    def give(self, ids: Sequence[int], lengths: Sequence[int], tables: NDArray[np.int32]) -> None:
        """By one copy to the device; of rows that there are not, one token in nobody's page."""
        given = np.zeros(len(self.given), dtype=np.int32)
        given_ids, given_lengths, given_tables = np.split(given, [self.num_rows, 2 * self.num_rows])
        given_ids[: len(ids)] = ids
        given_lengths[:] = 1
        given_lengths[: len(ids)] = lengths
        given_tables.reshape(self.num_rows, self.width)[: len(ids), : tables.shape[1]] = tables
        self.given.copy_(torch.from_numpy(given))


class DecodeGraphs:
    """Decode steps over pages. Use it from one thread."""

    def __init__(self, forward: Forward, recorder: Recorder, *, pages: PageStore) -> None:
        self._forward = forward
        self._recorder = recorder
        self._pages = pages
        self._row_sizes, self._page_sizes = sizes(pages.max_rows), sizes(pages.max_pages)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._is_refused = False

    def hidden(self, last_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """One more token for each of the first n slots; `lengths` count that token. Its hidden states, `[n, E]`, until
        the next call."""
        tables = self._pages.tables(lengths)
        graph = self._graph(len(last_ids), tables.shape[1])
        if graph is None:
            device = self._pages.device
            ids, lengths_ = (torch.tensor(one, dtype=torch.int32, device=device) for one in (last_ids, lengths))
            return self._forward(ids, lengths_, torch.from_numpy(tables).to(device))
        graph.give(last_ids, lengths, tables)
        graph.replay()
        return graph.hidden[: len(last_ids)]

    def forget(self) -> None:
        """The memory that they read is going to move."""
        self._graphs.clear()
        self._recorder.forget()

    def _graph(self, num_rows: int, width: int) -> _Graph | None:
        """Of the next size. None where this machine cannot: steps are then taken one by one."""
        size = (_next(self._row_sizes, num_rows), _next(self._page_sizes, width))
        if size not in self._graphs and not self._is_refused:
            try:
                self._graphs[size] = self._record(*size)
            except RuntimeError as error:
                logger.warning("decoding without CUDA graphs, which this machine refuses: %s", str(error)[:300])
                self._is_refused = True
        return self._graphs.get(size)

    def _record(self, num_rows: int, width: int) -> _Graph:
        given = torch.zeros((2 + width) * num_rows, dtype=torch.int32, device=self._pages.device)
        ids, lengths, tables = given.split([num_rows, num_rows, num_rows * width])
        lengths.fill_(1)
        replay, hidden = self._recorder.record(lambda: self._forward(ids, lengths, tables.view(num_rows, width)))
        return _Graph(num_rows=num_rows, width=width, given=given, replay=replay, hidden=hidden)


def sizes(most: int) -> list[int]:
    """For which there are graphs: powers of two and one and a half times those, so that a third at most is padding.

    >>> sizes(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    found = {most}
    power = 1
    while power < most:
        found.update(size for size in (power, power * 3 // 2) if size < most)
        power *= 2
    return sorted(found)


def _next(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
