"""The model thread: the only one that touches the model, its KV cache and the rows.

    any thread ──▶ commands ──▶ ┌─ drain: add, abort, pause, resume, swap ─┐
                                │  step:  prefill waiting rows             │──▶ answers (futures)
                                └─ or     one token for every running row ─┘

Commands are obeyed between steps, so an interruption always falls on a token boundary, and the version stamped on a
token is the one that sampled it. The thread blocks on the queue while there is nothing to sample or while paused.

A row is *waiting* (no KV) or *running* (row i in slot i). What happens to the running ones:

    pause abort      answered with what they have
    pause retract    become waiting; after resume their prompt and sampled tokens are prefilled again
    pause in_place   keep their slot and their KV
    swap             become waiting if `flush_cache`, paused or not: their KV belongs to weights that are gone

Nothing is lost while paused: new requests wait, and an abort answers at once, with what was sampled.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch import Tensor

from areal_agent.engine.embedded.batch import SamplingBatch
from areal_agent.engine.embedded.model_runner import ModelRunner
from areal_agent.engine.embedded.row import Row, TokenSink
from areal_agent.engine.wire import EngineStats
from areal_agent.errors import EngineRejected, EngineUnreachable
from areal_agent.types import FinishReason, GenerateRequest, GenerateResult, PauseMode, WeightVersion

MAX_PREFILL_TOKENS = 4096
"""Tokens that one prefill packs together; a longer sequence is prefilled alone."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    action: Callable[[], Any]
    done: Future[Any]

    def obey(self) -> None:
        """Run it. A refusal is an answer; anything else ends the thread."""
        try:
            self.done.set_result(self.action())
        except EngineRejected as error:
            self.done.set_exception(error)
        except Exception as error:
            self.done.set_exception(EngineUnreachable(f"the engine failed: {error!r}; see its log"))
            raise


class Scheduler:
    """Continuous batching over one model. Its methods may be called from any thread; each returns a future."""

    def __init__(self, runner: ModelRunner, *, version: WeightVersion, on_failure: Callable[[], object]) -> None:
        self._runner = runner
        self._version = version
        self._on_failure = on_failure  # called from the model thread when it dies of an error
        self._paused: PauseMode | None = None
        self._rows: dict[str, Row] = {}  # every row in flight
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []  # row i holds slot i
        self._sampling: SamplingBatch | None = None  # of the running rows; None: the rows have changed
        self._may_prefill = True  # after a prefill it is the running rows' turn, while new rows gather
        self._busy_s = 0.0
        self._generated_tokens = 0
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.Lock()  # between the last command and the end of the thread
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------ from any thread

    def submit(self, request: GenerateRequest, on_token: TokenSink | None = None) -> Future[GenerateResult]:
        """Queue one request. The future fails with EngineRejected when its id is in flight already.

        `on_token` gets every token in the model thread, the last one before the future is done; it must not block.
        """
        row = Row.of(request, on_token)
        added = self._command(lambda: self._add(row))
        added.add_done_callback(lambda done: _pass_on_failure(done, row.answer))
        return row.answer

    def abort(self, request_id: str | None) -> Future[None]:
        """Answer one request, or all of them, with what it has. An unknown id is no error."""
        return self._command(lambda: self._abort(request_id))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling. Once the future is done, no token is sampled until `resume`."""
        return self._command(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Go on sampling."""
        return self._command(self._resume)

    def swap(self, weights: Mapping[str, Tensor], version: WeightVersion, *, flush_cache: bool) -> Future[None]:
        """Copy proved weights into the model; every token sampled afterwards bears `version`."""
        return self._command(lambda: self._swap(weights, version, flush_cache))

    def stats(self) -> EngineStats:
        """What it has done so far."""
        return EngineStats(
            num_running=len(self._running),
            num_queued=len(self._waiting),
            busy_s=self._busy_s,
            generated_tokens=self._generated_tokens,
            weight_version=self._version,
        )

    @property
    def is_alive(self) -> bool:
        """Whether the model thread still works."""
        return not self._is_closed

    def close(self) -> None:
        """Answer every request with what it has and end the thread. Harmless when done before."""
        with self._lock:
            self._commands.put(_Command(action=self._close, done=Future()))
        self._thread.join()

    def _command(self, action: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        with self._lock:
            if self._is_closed:
                raise EngineUnreachable("the engine is ending and takes no further requests; start another one")
            self._commands.put(_Command(action=action, done=done))
        return done

    # --------------------------------------------------------------------------------- in the model thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._drain()
                if self._can_step():
                    self._step()
        except Exception as error:  # the boundary of the thread: its end becomes an answer for everyone who waits
            logger.exception("the model thread failed")
            self._fail(error)
            self._on_failure()

    def _drain(self) -> None:
        """Obey all commands; wait for one while there is nothing to sample."""
        while not self._is_closed:
            try:
                command = self._commands.get(block=not self._can_step())
            except Empty:
                return
            command.obey()

    def _can_step(self) -> bool:
        return self._paused is None and bool(self._running or self._waiting) and not self._is_closed

    def _add(self, row: Row) -> None:
        request_id = row.request.request_id
        if request_id in self._rows:
            raise EngineRejected(f"rid {request_id!r} is in flight already; make ids unique")
        self._rows[request_id] = row
        self._waiting.append(row)

    def _abort(self, request_id: str | None) -> None:
        if request_id is None:
            rows = list(self._rows.values())
        else:
            rows = [self._rows[request_id]] if request_id in self._rows else []
        for row in rows:
            self._end(row, FinishReason.ABORT)

    def _pause(self, mode: PauseMode) -> None:
        self._paused = mode
        if mode is PauseMode.ABORT:
            self._abort(None)
        elif mode is PauseMode.RETRACT:
            self._retract()

    def _resume(self) -> None:
        self._paused = None

    def _swap(self, weights: Mapping[str, Tensor], version: WeightVersion, flush_cache: bool) -> None:
        if flush_cache:
            self._retract()
        self._runner.load_weights(weights)
        self._version = version

    def _retract(self) -> None:
        """Take every running row's slot; they wait before all others, in their old order."""
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        self._sampling = None
        self._may_prefill = True

    def _close(self) -> None:
        self._abort(None)
        self._reject_further(EngineUnreachable("the engine is ending; start another one"))

    def _fail(self, error: Exception) -> None:
        failure = EngineUnreachable(f"the engine failed: {error!r}; see its log")
        for row in self._rows.values():
            row.answer.set_exception(failure)
        self._rows.clear()
        self._reject_further(failure)

    def _reject_further(self, error: EngineUnreachable) -> None:
        with self._lock:
            self._is_closed = True
        while not self._commands.empty():
            self._commands.get().done.set_exception(error)

    # ----------------------------------------------------------------------------------------------- steps

    def _step(self) -> None:
        started_s = time.perf_counter()
        new_rows = self._take_prefill() if self._may_prefill or not self._running else []
        if new_rows:
            self._prefill(new_rows)
        else:
            self._decode()
        self._may_prefill = not new_rows
        self._busy_s += time.perf_counter() - started_s

    def _take_prefill(self) -> list[Row]:
        """The waiting rows that get a slot now, first come first served."""
        taken: list[Row] = []
        num_tokens = 0
        num_free = self._runner.num_slots - len(self._running)
        while self._waiting and len(taken) < num_free:
            num_tokens += self._waiting[0].num_tokens
            if taken and num_tokens > MAX_PREFILL_TOKENS:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _prefill(self, rows: Sequence[Row]) -> None:
        logits = self._runner.prefill([row.all_ids() for row in rows], first_slot=len(self._running))
        self._running.extend(rows)
        self._sampling = None
        self._sample(rows, logits, self._gather(rows))

    def _decode(self) -> None:
        rows = list(self._running)
        logits = self._runner.decode([row.token_ids[-1] for row in rows], [row.num_tokens for row in rows])
        self._sampling = self._sampling or self._gather(rows)
        self._sample(rows, logits, self._sampling)

    def _gather(self, rows: Sequence[Row]) -> SamplingBatch:
        return SamplingBatch(rows, vocab_size=self._runner.vocab_size, device=self._runner.device)

    def _sample(self, rows: Sequence[Row], logits: Tensor, sampling: SamplingBatch) -> None:
        """Give each row its next token, and answer those that it ends."""
        draws = sampling.sample(logits)
        self._generated_tokens += len(rows)
        for row, token, logprob, top in zip(rows, draws.token_ids, draws.logprobs, draws.top_logprobs, strict=True):
            row.append(token, logprob, top, self._version)
            reason = row.finish_reason(self._runner.eos_token_ids)
            if reason is not None:
                self._end(row, reason)

    def _end(self, row: Row, reason: FinishReason) -> None:
        """Answer a row and take it out of wherever it is."""
        del self._rows[row.request.request_id]
        if row in self._waiting:
            self._waiting.remove(row)
        else:
            self._free_slot(self._running.index(row))
        row.finish(reason)

    def _free_slot(self, slot: int) -> None:
        """The last row moves into the gap: slots stay dense."""
        last = self._running.pop()
        self._sampling = None
        if slot < len(self._running):
            self._running[slot] = last
            self._runner.move(len(self._running), slot, last.num_tokens)


def _pass_on_failure(done: Future[None], answer: Future[GenerateResult]) -> None:
    error = done.exception()
    if error is not None:
        answer.set_exception(error)
