"""What one model has to do: the rows in flight, and one step of work on them at a time.

    waiting ──admit──▶ filling ──▶ decoding ──▶ answered
       ▲                  └────┬───────┘
       └── retracted: slot and keys lost, tokens kept

Row i holds slot i. The first rows decode; of those after them, which are still prefilled in chunks, there is one at
most between two steps. A step is a chunk of prefill or one token for every decoding row, in turns, so that neither a
long prompt nor a long answer holds the other up.

What rows have of the room for keys and values comes first, the rest is kept for rows that begin alike. When the
decoding rows outgrow it, the last one goes back to wait. A step that is given up leaves its rows as they were
before. It knows no thread, no queue and no pause.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from areal_agent.engine.embedded.batch import SamplingBatch
from areal_agent.engine.embedded.counts import Counts
from areal_agent.engine.embedded.decoder import StepGivenUp
from areal_agent.engine.embedded.kv_store import Piece
from areal_agent.engine.embedded.model_runner import ModelRunner
from areal_agent.engine.embedded.row import Row
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable
from areal_agent.types import FinishReason, WeightVersion

CHUNK_TOKENS = 512
"""Tokens of one prefill step: enough for matrix products at full speed, few enough to stay in the CPU's caches."""

GPU_CHUNK_TOKENS = 2048
"""The same on a GPU, which is done with fewer tokens of a small model before it has been told the next kernels."""

TURN_TOKENS = 2048
"""Tokens that are prefilled before the decoding rows have their turn again."""

SIBLING_TOKENS = 16
"""Rows that go on with the same so many tokens wait for the first of them, and take what it has computed."""


class Workload:
    """The rows of one model. Only one thread may use it."""

    def __init__(self, runner: ModelRunner, version: WeightVersion) -> None:
        self.version = version
        self.kv_tokens = runner.kv.num_tokens
        self.counts = Counts()
        self.admits_new = True  # False: rows that have sampled nothing go on waiting
        self.has_memory = True  # for keys and values: without it no row gets a slot
        self._runner = runner
        self._kv = runner.kv
        self._chunk_tokens = chunk_tokens(runner.device)
        self._rows: dict[str, Row] = {}  # every row in flight
        self._waiting: deque[Row] = deque()
        self._slots: list[Row] = []  # row i holds slot i
        self._num_decoding = 0  # of `_slots`, from the front
        self._sampling: SamplingBatch | None = None  # of the decoding rows; None: they have changed
        self._prefilled_tokens = 0  # since the last decode step

    # ------------------------------------------------------------------------------------------------ rows

    @property
    def num_running(self) -> int:
        """Rows that hold a slot."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Rows that wait for one."""
        return len(self._waiting)

    @property
    def num_used_tokens(self) -> int:
        """Tokens whose keys and values rows hold, or will when they are prefilled."""
        return self._kv.num_used(self._lengths())

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the prefix cache holds."""
        return self._kv.num_kept

    def has_work(self) -> bool:
        return bool(self._slots) or self._has_candidate()

    def add(self, row: Row) -> None:
        """Queue a row. Raises EngineRejected when one of its id is in flight."""
        request_id = row.request.request_id
        if request_id in self._rows:
            raise EngineRejected(f"rid {request_id!r} is in flight already; make ids unique")
        self._rows[request_id] = row
        self._waiting.append(row)
        self.counts.requests += 1
        row.arrived_s = time.perf_counter()

    def abort(self, request_id: str | None) -> None:
        """Answer one row, or all of them, with what it has."""
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
        """Take every slot; the rows wait before all others, in their old order."""
        while self._slots:
            self._retract_last()

    def swap(self, weights: Mapping[str, Tensor], version: WeightVersion, *, flush_cache: bool) -> None:
        """Copy new weights into the model. Without `flush_cache` rows go on with the keys and values that they have."""
        if flush_cache:
            self.retract()
        for row in self._slots:
            row.is_mixed = True
        self._kv.forget()
        self._runner.load_weights(weights)
        self.version = version

    def release_memory(self) -> None:
        """Give the memory of keys and values back: rows wait with the tokens that they have."""
        self.retract()
        self._kv.forget()
        self._runner.release_memory()
        self.has_memory = False

    def resume_memory(self) -> None:
        """Take it again, if it was released; rows are computed anew. Raises EngineRejected when it is not there."""
        if not self.has_memory:
            self._runner.resume_memory()
            self.has_memory = True

    # ----------------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """A chunk of prefill, or one token for every decoding row."""
        started_s = time.perf_counter()
        pieces: Sequence[Piece] = ()
        if self._prefilled_tokens < TURN_TOKENS or not self._num_decoding:
            pieces = self._next_pieces()
        with contextlib.suppress(StepGivenUp):
            self._prefill(pieces) if pieces else self._decode()
        self.counts.busy_s += time.perf_counter() - started_s

    def _next_pieces(self) -> list[Piece]:
        """The next chunk: the row that is being filled, then rows that are admitted now, first come first served."""
        pieces = [self._piece(slot, self._chunk_tokens) for slot in range(self._num_decoding, len(self._slots))]
        num_left = self._chunk_tokens - sum(len(piece.ids) for piece in pieces)
        openings: set[bytes] = set()
        passed_over: list[Row] = []
        while num_left > 0 and self._may_admit():
            row = self._waiting.popleft()
            if self._should_wait_for_sibling(row, openings):
                passed_over.append(row)
                continue
            self._admit(row)
            pieces.append(self._piece(len(self._slots) - 1, num_left))
            num_left -= len(pieces[-1].ids)
        self._waiting.extendleft(reversed(passed_over))
        return pieces

    def _may_admit(self) -> bool:
        if not self._has_candidate() or len(self._slots) >= self._runner.num_slots:
            return False
        return not self._slots or self._kv.can_begin(self._waiting[0].all_ids(), self._lengths())

    def _has_candidate(self) -> bool:
        """Rows that have begun stand before those that have not."""
        return bool(self._waiting) and (self.admits_new or bool(self._waiting[0].token_ids))

    def _should_wait_for_sibling(self, row: Row, openings: set[bytes]) -> bool:
        """Whether a row admitted into this chunk goes on as this one does; it waits once."""
        if row.has_waited_for_sibling or not self._kv.always_keeps or not (openings or self._waiting):
            return False
        ids = row.all_ids()
        start = self._kv.num_known(ids)
        opening = ids[start : start + SIBLING_TOKENS]
        if len(opening) < SIBLING_TOKENS:
            return False
        row.has_waited_for_sibling = opening.tobytes() in openings
        openings.add(opening.tobytes())
        return row.has_waited_for_sibling

    def _admit(self, row: Row) -> None:
        """Give a row the next slot. Its last token is always computed."""
        num_known = self._kv.begin(row.all_ids(), self._lengths())
        self._slots.append(row)
        row.num_computed = num_known
        row.is_mixed = False
        if row.num_cached is None:
            row.num_cached = num_known
            self.counts.prompt_tokens += row.num_tokens
            self.counts.cached_tokens += num_known

    def _piece(self, slot: int, max_tokens: int) -> Piece:
        row = self._slots[slot]
        ids = row.all_ids()[row.num_computed : row.num_computed + max_tokens]
        return Piece(slot=slot, begin=row.num_computed, ids=ids)

    def _prefill(self, pieces: Sequence[Piece]) -> None:
        """Compute the pieces; rows that are complete then get their first token and decode from now on."""
        logits = self._runner.prefill(pieces)
        for piece in pieces:
            self._slots[piece.slot].num_computed += len(piece.ids)
            self._prefilled_tokens += len(piece.ids)
        complete = [row for row in self._slots[self._num_decoding :] if row.num_computed == row.num_tokens]
        for slot, row in enumerate(complete, start=self._num_decoding):
            self._keep(row, slot, row.num_tokens)
        self._num_decoding += len(complete)
        self._sampling = None
        if complete:
            self._sample(complete, logits[: len(complete)], self._gather(complete))
        if len(self._slots) > self._num_decoding:
            self._check_filling(self._slots[-1], logits[-1])

    def _check_filling(self, row: Row, logits: Tensor) -> None:
        """Of a long prompt the first chunk tells: aborted before the last one, it would leave its memory to others."""
        if not math.isfinite(logits.max().item()):
            self._refuse(row, self._not_finite(row, row.num_computed))
            self._start_over()

    def _decode(self) -> None:
        self._prefilled_tokens = 0
        while not self._kv.fit(self._lengths()):
            self._retract_last()
            self.counts.retracted_requests += 1
        rows = self._slots[: self._num_decoding]
        logits = self._runner.decode([row.token_ids[-1] for row in rows], [row.num_tokens for row in rows])
        self._sampling = self._sampling or self._gather(rows)
        self._sample(rows, logits, self._sampling)

    def _gather(self, rows: Sequence[Row]) -> SamplingBatch:
        return SamplingBatch(rows, vocab_size=self._runner.vocab_size, device=self._runner.device)

    def _sample(self, rows: Sequence[Row], logits: Tensor, sampling: SamplingBatch) -> None:
        """Give each row its next token, and answer those that it ends."""
        draws = sampling.sample(logits)
        self.counts.generated_tokens += len(rows)
        eos_token_ids, version = self._runner.eos_token_ids, self.version
        for row, token, logprob, top in zip(rows, draws.token_ids, draws.logprobs, draws.top_logprobs, strict=True):
            failure = self._failure(row, logprob)
            if failure is not None:
                self._refuse(row, failure)
                continue
            if not row.token_ids:
                self.counts.to_first_token.add(time.perf_counter() - row.arrived_s)
            row.append(token, logprob, top, version)
            reason = row.finish_reason(eos_token_ids)
            if reason is not None:
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
        """Why what was drawn for this row is no token of its answer."""
        if math.isnan(logprob):
            return self._not_finite(row, row.num_tokens)
        return None if row.matcher is None else row.matcher.failure()

    def _not_finite(self, row: Row, num_tokens: int) -> EngineUnreachable:
        return EngineUnreachable(
            f"the model gives no probabilities after {num_tokens} tokens of {row.request.request_id!r}, under "
            f"weight version {self.version}: its logits are not finite; push other weights"
        )

    def _start_over(self) -> None:
        """Compute all rows anew: keys and values that are not finite spoil others, even where they are masked."""
        self.retract()
        self._kv.forget()
        self._kv.wipe()

    def _take_out(self, row: Row) -> None:
        """Of wherever it is. Whoever calls this answers it: until then `fail` does, should this fail."""
        if row in self._slots:
            self._free(self._slots.index(row))
        else:
            self._waiting.remove(row)
        del self._rows[row.request.request_id]

    def _free(self, slot: int) -> None:
        """Keep what the row computed for others, and close the gap: slots stay dense, decoding rows first."""
        row = self._slots[slot]
        is_decoding = slot < self._num_decoding
        # The last token that was sampled has not been through the model.
        self._keep(row, slot, row.num_tokens - 1 if is_decoding else row.num_computed)
        if is_decoding:
            self._num_decoding -= 1
            self._sampling = None
            self._fill_gap(self._num_decoding, slot)
            slot = self._num_decoding
        self._fill_gap(len(self._slots) - 1, slot)
        self._drop_last()

    def _fill_gap(self, source: int, target: int) -> None:
        if source != target:
            row = self._slots[target] = self._slots[source]
            self._kv.move(source, target, row.num_tokens)

    def _retract_last(self) -> None:
        """The row in the last slot waits before all others; what it has computed is lost."""
        slot = len(self._slots) - 1
        row = self._slots[slot]
        if self._num_decoding > slot:
            self._num_decoding = slot
            self._sampling = None
        self._drop_last()
        self._waiting.appendleft(row)

    def _drop_last(self) -> None:
        self._slots.pop()
        self._kv.drop(len(self._slots))

    def _keep(self, row: Row, slot: int, num_tokens: int) -> None:
        """Keep the first tokens of a row for others, unless they are of several sets of weights."""
        if not row.is_mixed:
            self._kv.keep(slot, row.all_ids()[:num_tokens], self._lengths())

    def _lengths(self) -> list[int]:
        return [row.num_tokens for row in self._slots]


def chunk_tokens(device: torch.device) -> int:
    """Of one prefill step there.

    >>> chunk_tokens(torch.device("cuda")) // chunk_tokens(torch.device("cpu"))
    4
    """
    return CHUNK_TOKENS if device.type == "cpu" else GPU_CHUNK_TOKENS
