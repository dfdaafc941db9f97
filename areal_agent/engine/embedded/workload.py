"""The work of one model: the rows in flight, and one step of work on them at a time.

    waiting ──admit──▶ filling ──▶ decoding ──▶ answered
       ▲                  └────┬───────┘
       └── retracted: slot and keys lost, tokens kept

A `Row` is one request and what it has so far; row i holds slot i. The first rows decode. Of the rows after them, which
are still being prefilled in chunks, at most one is left between two steps. A step is a chunk of prefill or one token
for every decoding row, in turns, so that neither long prompts nor long answers hold up the others.

Room for the rows' keys and values comes first; the rest keeps prefixes for rows that begin alike. When the decoding
rows outgrow the room, the last one goes back to waiting. A step that is given up leaves its rows as they were.
"""

import contextlib
import math
import secrets
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_agent.engine.embedded.decoder import Piece, StepGivenUp
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.sampler import Draws, Matcher, Penalties, SamplingRows, biases_of, end_tokens, sample
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable
from areal_agent.types import FinishReason, GenerateRequest, GenerateResult, TopLogprobs, VersionSpan, WeightVersion

CHUNK_TOKENS = 512
"""Tokens of one prefill step: enough for matrix products at full speed, few enough to stay in the CPU's caches."""

GPU_CHUNK_TOKENS = 2048
"""Tokens of one prefill step on a GPU, which computes a small chunk faster than kernels can be launched."""

TURN_TOKENS = 2048
"""Prefilled tokens after which the decoding rows have their turn."""

SIBLING_TOKENS = 16
"""Rows whose next tokens agree for this length wait for the first of them, and reuse what it computed."""

TokenSink = Callable[[int, float, TopLogprobs, WeightVersion], None]
"""Called in the model thread with every token of a streamed request, its log-probability, the likeliest tokens there,
and the version that sampled it.
"""


def new_future() -> Future[Any]:
    """A future that only the model thread ends: it cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """A request in flight. Only the model thread touches it; others wait for `answer`."""

    request: GenerateRequest
    on_token: TokenSink | None = None
    matcher: Matcher | None = None  # of the grammar that constrains the answer
    prompt_ids: NDArray[np.int32] = field(init=False)
    seed: int = field(init=False)  # chosen here if the request has none
    answer: Future[GenerateResult] = field(default_factory=new_future)
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])  # empty when none were requested
    begun: list[tuple[WeightVersion, int]] = field(default_factory=list[tuple[WeightVersion, int]])  # span starts
    num_computed: int = 0  # tokens whose keys and values are in its slot, during prefill
    num_cached: int | None = None  # prompt tokens found in the prefix cache, when first prefilled
    arrived_s: float = field(default_factory=time.perf_counter)
    is_mixed: bool = False  # its keys and values come from more than one set of weights
    has_waited_for_sibling: bool = False

    def __post_init__(self) -> None:
        self.prompt_ids = np.frombuffer(array("i", self.request.input_ids), dtype=np.int32)
        seed = self.request.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed

    @property
    def num_tokens(self) -> int:
        """The number of prompt and sampled tokens."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def is_held_open(self) -> bool:
        """True while no end token may be sampled."""
        return len(self.token_ids) < self.request.sampling.min_tokens

    def all_ids(self) -> NDArray[np.int32]:
        """Prompt and sampled ids, which a prefill computes."""
        if not self.token_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.frombuffer(array("i", self.token_ids), dtype=np.int32)])

    def append(self, token_id: int, logprob: float, top: TopLogprobs, version: WeightVersion) -> None:
        """Keep a sampled token with the version that sampled it, and hand it out if the request is streamed."""
        if not self.begun or self.begun[-1][0] is not version:  # compared by identity: a swap may reuse the label
            self.begun.append((version, len(self.token_ids)))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if top:
            self.top_logprobs.append(top)
        if self.on_token is not None:
            self.on_token(token_id, logprob, top, version)

    def finish_reason(self, eos_token_ids: Set[int]) -> FinishReason | None:
        """The reason why the row ends at its last token, or None when it goes on."""
        sampling, last = self.request.sampling, self.token_ids[-1]
        if last in sampling.stop_token_ids or (last in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= sampling.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """Answer with what the row has."""
        ends = [*(start for _, start in self.begun[1:]), len(self.token_ids)]
        self.answer.set_result(
            GenerateResult(
                token_ids=tuple(self.token_ids),
                logprobs=tuple(self.logprobs),
                versions=tuple(
                    VersionSpan(version=version, start=start, end=end)
                    for (version, start), end in zip(self.begun, ends, strict=False)  # nothing sampled: no span
                ),
                finish_reason=reason,
                cached_tokens=self.num_cached or 0,
                top_logprobs=tuple(self.top_logprobs),
            )
        )


class SamplingBatch:
    """The sampling of these rows, in this order: adjust the logits, then draw. Make a new one when the rows change."""

    def __init__(self, rows: Sequence[Row], runner: ModelRunner) -> None:
        requests, vocab_size, device = [row.request for row in rows], runner.vocab_size, runner.device
        self._rows = rows
        self._vocab_size = vocab_size
        self._penalties = Penalties.of(requests, [row.token_ids for row in rows], vocab_size=vocab_size, device=device)
        self._biases = biases_of(requests, device)
        self._held_open = [
            (index, row, end_tokens(row.request, runner.eos_token_ids, device))
            for index, row in enumerate(rows)
            if row.is_held_open
        ]
        self._matchers = [row.matcher for row in rows]
        self._is_constrained = any(self._matchers)
        self._sampling = SamplingRows.of(
            [request.sampling for request in requests],
            [row.seed for row in rows],
            [request.num_top_logprobs for request in requests],
            vocab_size=vocab_size,
            device=device,
        )

    @torch.inference_mode()
    def sample(self, logits: Tensor) -> Draws:
        """Sample the next token of every row from logits `[n, V]`, which this changes."""
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._biases is not None:
            rows, tokens, values = self._biases
            logits.index_put_((rows, tokens), values, accumulate=True)
        for index, row, ends in self._held_open:
            if row.is_held_open:
                logits[index, ends] = float("-inf")
        if self._is_constrained:
            logits.masked_fill_(self._forbidden().to(logits.device), float("-inf"))
        draws = sample(logits, self._sampling, [row.num_tokens for row in self._rows])
        if self._penalties is not None:
            self._penalties.follow(draws.token_ids)
        for matcher, token_id in zip(self._matchers, draws.token_ids, strict=True):
            if matcher is not None:
                matcher.follow(token_id)
        return draws

    def _forbidden(self) -> Tensor:
        """A mask `[n, V]` of the tokens that the rows' grammars do not allow next."""
        free = np.ones(self._vocab_size, dtype=np.bool_)
        return torch.from_numpy(~np.stack([free if one is None else one.allowed() for one in self._matchers]))


BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Latency:
    """A histogram of durations, as Prometheus counts them. One thread adds; others may read.

    >>> latency = Latency()
    >>> latency.add(0.02), latency.add(7.0)
    (None, None)
    >>> latency.sum_s, latency.buckets()[:3], latency.buckets()[-1]
    (7.02, [('0.01', 0), ('0.03', 1), ('0.1', 1)], ('+Inf', 2))
    """

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)  # per bucket, not cumulative; the last one is unbounded

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """The upper bounds, each with the number of durations up to it."""
        return list(zip([*map(str, BOUNDS_S), "+Inf"], accumulate(self._counts), strict=True))


@dataclass(kw_only=True, slots=True)
class Counts:
    """Totals since the engine started. The model thread adds to them; others read."""

    busy_s: float = 0.0  # seconds in which a step was running
    requests: int = 0
    aborted_requests: int = 0
    retracted_requests: int = 0  # because the room was too small
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    generated_tokens: int = 0
    to_first_token: Latency = field(default_factory=Latency)  # measured from a request's arrival
    to_answer: Latency = field(default_factory=Latency)  # measured from arrival, without aborted requests


class Workload:
    """The rows of one model. Use it from one thread."""

    def __init__(self, runner: ModelRunner, version: WeightVersion) -> None:
        self.version = version
        self.counts = Counts()
        self.kv = runner.kv
        self.waiting: deque[Row] = deque()
        self.slots: list[Row] = []  # row i holds slot i
        self.num_tokens = 0  # prompt and sampled tokens of these rows
        self.admits_new = True  # False: rows that have sampled nothing keep waiting
        self.has_memory = True  # for keys and values; without it no row gets a slot
        self._runner = runner
        self._chunk_tokens = CHUNK_TOKENS if runner.device.type == "cpu" else GPU_CHUNK_TOKENS
        self._rows: dict[str, Row] = {}  # every row in flight
        self._num_decoding = 0  # the first rows of `slots`
        self._sampling: SamplingBatch | None = None  # of the decoding rows; None when they have changed
        self._prefilled_tokens = 0  # since the last decode step

    # ------------------------------------------------------------------------------------------------ rows

    def has_work(self) -> bool:
        return bool(self.slots) or self._has_candidate()

    def add(self, row: Row) -> None:
        """Queue a row. Raises EngineRejected when its id is already in flight."""
        request_id = row.request.request_id
        if request_id in self._rows:
            raise EngineRejected(f"rid {request_id!r} is in flight already; make ids unique")
        self._rows[request_id] = row
        self.waiting.append(row)
        self.counts.requests += 1

    def abort(self, request_id: str | None) -> None:
        """Answer one row, or all of them (None), with what it has."""
        if request_id is None:
            rows = list(self._rows.values())
        else:
            rows = [self._rows[request_id]] if request_id in self._rows else []
        for row in rows:
            self._end(row, FinishReason.ABORT)
            self.counts.aborted_requests += 1

    def fail(self, error: Exception) -> None:
        """Answer every row with an error."""
        for row in self._rows.values():
            row.answer.set_exception(error)
        self._rows.clear()

    def retract(self) -> None:
        """Take all slots back; their rows wait before all others, in their old order."""
        while self.slots:
            self._retract_last()

    def swap(self, weights: Mapping[str, Tensor], version: WeightVersion, *, flush_cache: bool) -> None:
        """Copy new weights into the model. Without `flush_cache`, rows keep the keys and values that they have."""
        if flush_cache:
            self.retract()
        for row in self.slots:
            row.is_mixed = True
        self.kv.prefixes.clear()
        self._runner.swap_in(weights)
        self.version = version

    def release_memory(self) -> None:
        """Free the memory of keys and values; rows wait and keep their tokens."""
        self.retract()
        self.kv.prefixes.clear()
        self._runner.release_memory()
        self.has_memory = False

    def resume_memory(self) -> None:
        """Allocate the memory again if it was released; rows are prefilled anew. Raises EngineRejected when there is
        none.
        """
        if not self.has_memory:
            self._runner.resume_memory()
            self.has_memory = True

    # ----------------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """Run one step: a chunk of prefill, or one token for every decoding row."""
        started_s = time.perf_counter()
        pieces: Sequence[Piece] = ()
        if self._prefilled_tokens < TURN_TOKENS or not self._num_decoding:
            pieces = self._next_pieces()
        with contextlib.suppress(StepGivenUp):
            self._prefill(pieces) if pieces else self._decode()
        self.counts.busy_s += time.perf_counter() - started_s

    def _next_pieces(self) -> list[Piece]:
        """The next chunk: the row being filled, then newly admitted rows, first come first served."""
        pieces = [self._piece(slot, self._chunk_tokens) for slot in range(self._num_decoding, len(self.slots))]
        num_left = self._chunk_tokens - sum(len(piece.ids) for piece in pieces)
        openings: set[bytes] = set()
        passed_over: list[Row] = []
        while num_left > 0 and self._may_admit():
            row = self.waiting.popleft()
            if self._should_wait_for_sibling(row, openings):
                passed_over.append(row)
                continue
            self._admit(row)
            pieces.append(self._piece(len(self.slots) - 1, num_left))
            num_left -= len(pieces[-1].ids)
        self.waiting.extendleft(reversed(passed_over))
        return pieces

    def _may_admit(self) -> bool:
        if not self._has_candidate() or len(self.slots) >= self._runner.num_slots:
            return False
        return not self.slots or self.kv.can_begin(self.waiting[0].all_ids(), self.num_tokens, len(self.slots))

    def _has_candidate(self) -> bool:
        """True when a row may begin. Rows that have begun stand before those that have not."""
        return bool(self.waiting) and (self.admits_new or bool(self.waiting[0].token_ids))

    def _should_wait_for_sibling(self, row: Row, openings: set[bytes]) -> bool:
        """Return whether a row admitted in this chunk begins as this one does. A row waits only once."""
        if row.has_waited_for_sibling or not self.kv.always_keeps or not (openings or self.waiting):
            return False
        ids = row.all_ids()
        start = self.kv.prefixes.match(ids).num_tokens
        opening = ids[start : start + SIBLING_TOKENS]
        if len(opening) < SIBLING_TOKENS:
            return False
        row.has_waited_for_sibling = opening.tobytes() in openings
        openings.add(opening.tobytes())
        return row.has_waited_for_sibling

    def _admit(self, row: Row) -> None:
        """Give a row the next slot. Its last token is always computed."""
        num_known = self.kv.begin(len(self.slots), row.all_ids(), self.num_tokens)
        self.slots.append(row)
        self.num_tokens += row.num_tokens
        row.num_computed = num_known
        row.is_mixed = False
        if row.num_cached is None:
            row.num_cached = num_known
            self.counts.prompt_tokens += row.num_tokens
            self.counts.cached_tokens += num_known

    def _piece(self, slot: int, max_tokens: int) -> Piece:
        row = self.slots[slot]
        ids = row.all_ids()[row.num_computed : row.num_computed + max_tokens]
        return Piece(slot=slot, begin=row.num_computed, ids=ids)

    def _prefill(self, pieces: Sequence[Piece]) -> None:
        """Compute the pieces. Rows that are complete then get their first token, and decode from now on."""
        logits = self._runner.prefill(pieces)
        for piece in pieces:
            self.slots[piece.slot].num_computed += len(piece.ids)
            self._prefilled_tokens += len(piece.ids)
        complete = [row for row in self.slots[self._num_decoding :] if row.num_computed == row.num_tokens]
        for slot, row in enumerate(complete, start=self._num_decoding):
            self._keep(row, slot, row.num_tokens)
        self._num_decoding += len(complete)
        self._sampling = None
        if complete:
            self._sample(complete, logits[: len(complete)], SamplingBatch(complete, self._runner))
        # A long prompt without finite logits is refused at once, before its memory is left to other rows.
        if len(self.slots) > self._num_decoding and not math.isfinite(logits[-1].max().item()):
            filling = self.slots[-1]
            self._refuse(filling, self._not_finite(filling, filling.num_computed))
            self._start_over()

    def _decode(self) -> None:
        self._prefilled_tokens = 0
        while not self.kv.fit(self.num_tokens):
            self._retract_last()
            self.counts.retracted_requests += 1
        rows = self.slots[: self._num_decoding]
        self._sampling = self._sampling or SamplingBatch(rows, self._runner)  # while a GPU is idle: its copies wait
        logits = self._runner.decode([row.token_ids[-1] for row in rows], [row.num_tokens for row in rows])
        self._sample(rows, logits, self._sampling)

    def _sample(self, rows: Sequence[Row], logits: Tensor, sampling: SamplingBatch) -> None:
        """Give each row its next token, and answer the rows that end with it."""
        draws = sampling.sample(logits)
        self.counts.generated_tokens += len(rows)
        eos_token_ids, version = self._runner.eos_token_ids, self.version
        ended: list[tuple[Row, FinishReason]] = []
        for row, token, logprob, top in zip(rows, draws.token_ids, draws.logprobs, draws.top_logprobs, strict=True):
            failure = self._failure(row, logprob)
            if failure is not None:
                self._refuse(row, failure)
                continue
            if not row.token_ids:
                self.counts.to_first_token.add(time.perf_counter() - row.arrived_s)
            row.append(token, logprob, top, version)
            self.num_tokens += 1
            reason = row.finish_reason(eos_token_ids)
            if reason is not None:
                ended.append((row, reason))
        for row, reason in reversed(ended):  # the last slot first, so that no row that ends is moved before
            self._end(row, reason)
        if any(map(math.isnan, draws.logprobs)):
            self._start_over()

    # ----------------------------------------------------------------------------------------------- slots

    def _end(self, row: Row, reason: FinishReason) -> None:
        """Answer a row with what it has."""
        self._take_out(row)
        if reason is not FinishReason.ABORT:
            self.counts.to_answer.add(time.perf_counter() - row.arrived_s)
        row.finish(reason)

    def _refuse(self, row: Row, failure: EngineError) -> None:
        """Answer a row with an error."""
        self._take_out(row)
        row.answer.set_exception(failure)

    def _failure(self, row: Row, logprob: float) -> EngineError | None:
        """The reason why the drawn token is not part of this row's answer, or None."""
        if math.isnan(logprob):
            return self._not_finite(row, row.num_tokens)
        return None if row.matcher is None else row.matcher.failure()

    def _not_finite(self, row: Row, num_tokens: int) -> EngineUnreachable:
        return EngineUnreachable(
            f"the model gives no probabilities after {num_tokens} tokens of {row.request.request_id!r}, under "
            f"weight version {self.version}: its logits are not finite; push other weights"
        )

    def _start_over(self) -> None:
        """Recompute all rows: keys and values that are not finite spoil others, even where they are masked."""
        self.retract()
        self.kv.prefixes.clear()
        self.kv.cache.wipe()

    def _take_out(self, row: Row) -> None:
        """Remove a row from its place. The caller answers it afterwards, so that `fail` does should this raise."""
        if row in self.slots:
            self._free(self.slots.index(row))
        else:
            self.waiting.remove(row)
        del self._rows[row.request.request_id]

    def _free(self, slot: int) -> None:
        """Keep what the row computed for others, and close the gap: slots stay dense, with decoding rows first."""
        row = self.slots[slot]
        is_decoding = slot < self._num_decoding
        # the last sampled token has not been through the model
        self._keep(row, slot, row.num_tokens - 1 if is_decoding else row.num_computed)
        self.num_tokens -= row.num_tokens
        if is_decoding:
            self._num_decoding -= 1
            self._sampling = None
            self._fill_gap(self._num_decoding, slot)
            slot = self._num_decoding
        self._fill_gap(len(self.slots) - 1, slot)
        self._drop_last()

    def _fill_gap(self, source: int, target: int) -> None:
        if source != target:
            row = self.slots[target] = self.slots[source]
            self.kv.cache.move(source, target, row.num_tokens)

    def _retract_last(self) -> None:
        """Send the row in the last slot back to wait before all others; what it computed is lost."""
        slot = len(self.slots) - 1
        row = self.slots[slot]
        self.num_tokens -= row.num_tokens
        if self._num_decoding > slot:
            self._num_decoding = slot
            self._sampling = None
        self._drop_last()
        self.waiting.appendleft(row)

    def _drop_last(self) -> None:
        self.slots.pop()
        self.kv.drop(len(self.slots))

    def _keep(self, row: Row, slot: int, num_tokens: int) -> None:
        """Keep a row's first tokens for others, unless several sets of weights computed them."""
        if not row.is_mixed:
            self.kv.keep(slot, row.all_ids()[:num_tokens], self.num_tokens)
