"""The model thread, the only one that touches the model, its KV cache and the rows; and its ties to the event loop.

    any thread ──▶ commands ──▶ ┌─ drain: add, abort, pause, resume, swap ─┐
                                │  step:  a chunk of prefill, or           │──▶ answers (futures)
                                └─        one token for every row          ┘

Commands are obeyed between steps, so an interruption always falls on a token boundary, and the version stamped on a
token is the one that sampled it. The thread blocks on its queue while there is nothing to sample or while paused.

What happens to the rows that hold a slot (workload.py):

    pause abort      they are answered with what they have
    pause retract    they wait; after resume their prompt and sampled tokens are prefilled again
    pause in_place   they keep their slot and their KV
    pause wait       they run to their end, and then the pause is done; no other row begins
    swap             with `flush_cache` they wait, paused or not, because their KV belongs to the old weights
    release memory   they wait until the memory is there again

Nothing is lost while paused: new requests wait, and an abort answers at once with what was sampled. A command that
discards the rows' KV would waste the current step, so it makes the step give up instead of waiting for it.

`TokenStream` carries the tokens of one streamed request to the event loop; a slow reader gets everything gathered so
far as one chunk, and the model never waits. `ModelWeights` is what pushes see of the model: weights are read and proved
beside the model thread, and only the copy in place happens in it. `Metrics` tells Prometheus what the thread does.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from torch import Tensor

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.sampler import Matcher
from areal_agent.engine.embedded.weights import WeightLayout, take_weights
from areal_agent.engine.embedded.workload import Row, TokenSink, Workload, new_future
from areal_agent.engine.wire.control import EngineStats
from areal_agent.errors import EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.process import uninterrupted
from areal_agent.types import (
    GenerateRequest,
    GenerateResult,
    PauseMode,
    TokenChunk,
    TopLogprobs,
    VersionSpan,
    Weights,
    WeightVersion,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    action: Callable[[], Any]
    done: Future[Any]
    is_urgent: bool = False  # the current step need not finish

    def obey(self) -> None:
        """Run the command. A refusal is its answer; any other error ends the thread."""
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
        self._work = Workload(runner, version)
        self.metrics = Metrics(self._work, model_name=runner.model_path)
        self._runner = runner
        self._on_failure = on_failure  # called in the model thread when it dies of an error
        self._unneeded = runner.unneeded  # set it to give up the current step
        self._paused: PauseMode | None = None
        self._at_rest: list[Future[None]] = []  # pauses that wait for running rows to end
        self._at_end: list[Future[None]] = []  # waiters for the end of all work, whatever is paused meanwhile
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.Lock()  # orders the last command before the end of the thread
        self.is_closed = False  # the model thread has ended, or is about to
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------ from any thread

    def submit(
        self, request: GenerateRequest, on_token: TokenSink | None = None, matcher: Matcher | None = None
    ) -> Future[GenerateResult]:
        """Queue one request. The future fails with EngineRejected when its id is already in flight.

        `on_token` gets every token in the model thread, the last one before the future is done; it must not block.
        """
        row = Row(request=request, on_token=on_token, matcher=matcher)
        added = self._command(lambda: self._work.add(row))
        added.add_done_callback(lambda done: _pass_on_failure(done, row.answer))
        return row.answer

    def score(self, ids: Sequence[int], start: int, temperature: float) -> Future[list[float]]:
        """Compute the log-probabilities of given tokens (`ModelRunner.score`), between two steps, paused or not."""
        return self._command(lambda: self._runner.score(ids, start, temperature))

    def abort(self, request_id: str | None) -> Future[None]:
        """Answer one request, or all of them (None), with what it has. An unknown id is no error."""
        return self._command(lambda: self._work.abort(request_id))

    def abandon(self, request_id: str, answer: Future[GenerateResult]) -> Future[None]:
        """Abort the request that this answer belongs to, because its client is gone.

        If it is done already, a request of the same id is somebody else's and is left alone.
        """
        return self._command(lambda: None if answer.done() else self._work.abort(request_id))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling. Once the future is done, no token is sampled until `resume`."""
        if mode is PauseMode.WAIT:
            return self._wait_for(self._come_to_rest)
        return self._command(lambda: self._pause(mode), is_urgent=mode is not PauseMode.IN_PLACE)

    def resume(self) -> Future[None]:
        """Sample again."""
        return self._command(self._resume)

    def finish(self) -> Future[None]:
        """Sample to the end, paused or not. The future is done once nothing is left to sample."""
        return self._wait_for(self._go_on_to_the_end)

    def swap(self, weights: Mapping[str, Tensor], version: WeightVersion, *, flush_cache: bool) -> Future[None]:
        """Copy proved weights into the model. Every token sampled afterwards is stamped with `version`."""
        return self._command(lambda: self._work.swap(weights, version, flush_cache=flush_cache), is_urgent=flush_cache)

    def release_memory(self) -> Future[None]:
        """Free the memory of keys and values. No token is sampled until `resume_memory`."""
        return self._command(self._work.release_memory, is_urgent=True)

    def resume_memory(self) -> Future[None]:
        """Allocate the memory again. The future fails with EngineRejected when there is not enough; try again later."""
        return self._command(self._work.resume_memory)

    def stats(self) -> EngineStats:
        """The engine's work so far."""
        return EngineStats(
            num_running=len(self._work.slots),
            num_queued=len(self._work.waiting),
            busy_s=self._work.counts.busy_s,
            generated_tokens=self._work.counts.generated_tokens,
            weight_version=self._work.version,
        )

    def close(self) -> None:
        """Answer every request with what it has and end the thread. Harmless when repeated."""
        with self._lock:
            self._put(_Command(action=self._close, done=Future(), is_urgent=True))
        self._thread.join()

    def _command(self, action: Callable[[], T], *, is_urgent: bool = False) -> Future[T]:
        done: Future[T] = new_future()
        with self._lock:
            if self.is_closed:
                raise EngineUnreachable("the engine is ending and takes no further requests; start another one")
            self._put(_Command(action=action, done=done, is_urgent=is_urgent))
        return done

    def _wait_for(self, action: Callable[[Future[None]], None]) -> Future[None]:
        """Queue a command that is done later than it is obeyed. If the thread dies, its future fails as others do."""
        later = new_future()
        self._command(lambda: action(later)).add_done_callback(lambda obeyed: _pass_on_failure(obeyed, later))
        return later

    def _put(self, command: _Command) -> None:
        if command.is_urgent:
            self._unneeded.set()
        self._commands.put(command)

    # --------------------------------------------------------------------------------- in the model thread

    def _run(self) -> None:
        try:
            while not self.is_closed:
                self._drain()
                if self._can_step():
                    self._work.step()
        except Exception as error:  # the boundary of the thread: its death becomes an answer for everyone who waits
            logger.exception("the model thread failed")
            failure = EngineUnreachable(f"the engine failed: {error!r}; see its log")
            self._work.fail(failure)
            self._tell_that_it_rests()
            self._reject_further(failure)
            self._on_failure()

    def _drain(self) -> None:
        """Obey all queued commands; block for one while there is nothing to sample."""
        while not self.is_closed:
            if not self._work.has_work():
                self._tell_that_it_rests()
            try:
                command = self._commands.get(block=not self._can_step())
            except Empty:
                return
            if command.is_urgent:
                self._unneeded.clear()
            command.obey()
            del command  # free what it holds, such as a swap's weights, before waiting again

    def _can_step(self) -> bool:
        is_free = self._paused in (None, PauseMode.WAIT) and self._work.has_memory and not self.is_closed
        return is_free and self._work.has_work()

    def _come_to_rest(self, at_rest: Future[None]) -> None:
        self._at_rest.append(at_rest)
        self._paused = PauseMode.WAIT
        self._work.admits_new = False

    def _go_on_to_the_end(self, at_end: Future[None]) -> None:
        self._resume()
        self._at_end.append(at_end)

    def _tell_that_it_rests(self) -> None:
        _tell(self._at_rest)
        _tell(self._at_end)

    def _pause(self, mode: PauseMode) -> None:
        self._resume()
        self._paused = mode
        if mode is PauseMode.ABORT:
            self._work.abort(None)
        elif mode is PauseMode.RETRACT:
            self._work.retract()

    def _resume(self) -> None:
        self._paused = None
        self._work.admits_new = True
        _tell(self._at_rest)  # they wait for rows to end, which a resume makes pointless

    def _close(self) -> None:
        self._work.abort(None)
        self._tell_that_it_rests()
        self._reject_further(EngineUnreachable("the engine is ending; start another one"))

    def _reject_further(self, error: EngineUnreachable) -> None:
        with self._lock:
            self.is_closed = True
        while not self._commands.empty():
            self._commands.get().done.set_exception(error)


def _tell(waiting: list[Future[None]]) -> None:
    for one in waiting:
        one.set_result(None)
    waiting.clear()


def _pass_on_failure(done: Future[None], answer: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        answer.set_exception(error)


class TokenStream:
    """The tokens of one streamed request. `put` is called in the model thread, all else in the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens: deque[tuple[int, float, TopLogprobs, WeightVersion]] = deque()
        self._arrived = asyncio.Event()
        self._is_announced = False  # waking the loop costs a system call, so it is done once per chunk

    def put(self, token_id: int, logprob: float, top: TopLogprobs, version: WeightVersion) -> None:
        """Hand over one token. Runs in the model thread."""
        self._tokens.append((token_id, logprob, top, version))
        if not self._is_announced:
            self._is_announced = True
            self._loop.call_soon_threadsafe(self._arrived.set)

    def end(self) -> None:
        """Wake the reader: no token follows."""
        self._arrived.set()

    async def take(self) -> TokenChunk:
        """Wait for tokens or the end, and return all that came since the last call, perhaps none."""
        await self._arrived.wait()
        self._arrived.clear()
        self._is_announced = False  # cleared first, so that a token that comes from now on is announced
        tokens = [self._tokens.popleft() for _ in range(len(self._tokens))]
        token_ids, logprobs, tops, versions = zip(*tokens, strict=True) if tokens else ((), (), (), ())
        return TokenChunk(
            token_ids=token_ids,
            logprobs=logprobs,
            top_logprobs=tops if any(tops) else (),
            versions=VersionSpan.of_tokens(versions),
        )


class ModelWeights:
    """The model as a `pushes.PushTarget`: weights are read and proved in other threads while it samples."""

    def __init__(self, scheduler: Scheduler, layout: WeightLayout, device: torch.device) -> None:
        self._scheduler = scheduler
        self._layout = layout
        self._device = device

    @property
    def version(self) -> WeightVersion:
        return self._scheduler.stats().weight_version

    async def take(self, weights: Weights, *, needs_manifest: bool = True) -> Mapping[str, Tensor]:
        try:
            return await asyncio.to_thread(
                take_weights, weights, self._layout, self._device, needs_manifest=needs_manifest
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise WeightUpdateError(
                f"there is no memory to take the new weights beside those that serve: {str(error)[:200]}; leave more "
                "of it free (engine.leave_gib, --leave-gib, or fewer kv_tokens)"
            ) from error

    async def holds(self, taken: Mapping[str, Tensor]) -> bool:
        return await asyncio.to_thread(self._layout.holds, taken)

    async def swap(self, taken: Mapping[str, Tensor], version: WeightVersion, *, flush_cache: bool) -> None:
        """Swap the weights. Once queued, the swap happens even if the caller is cancelled, so it is always awaited."""
        await uninterrupted(asyncio.wrap_future(self._scheduler.swap(taken, version, flush_cache=flush_cache)))


WINDOW_S = 10.0
"""Seconds over which the rate is computed, or since the last reading, if that is longer."""


class Throughput:
    """The rate of a count that starts at 0 and only grows. Use it from one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._readings = deque([(now(), 0)])  # time and count; the first may be older than the window

    def rate(self, num_tokens: int) -> float:
        """Tokens per second over the window, given their number so far."""
        now_s = self._now()
        while len(self._readings) > 1 and self._readings[1][0] <= now_s - WINDOW_S:
            self._readings.popleft()
        since_s, before = self._readings[0]
        self._readings.append((now_s, num_tokens))
        return (num_tokens - before) / (now_s - since_s) if now_s > since_s else 0.0


class Metrics(Collector):
    """A workload's numbers for Prometheus, under SGLang's names where SGLang has one, so that its dashboards fit.

    Numbers read during a step may belong to two successive steps.
    """

    def __init__(self, work: Workload, *, model_name: str) -> None:
        self._work = work
        self._label = [model_name]
        self._throughput = Throughput()

    def collect(self) -> Iterator[Metric]:
        work, counts = self._work, self._work.counts
        used = work.num_tokens
        hit_rate = counts.cached_tokens / max(1, counts.prompt_tokens)
        rate = self._throughput.rate(counts.generated_tokens)
        for name, what, value in (
            ("sglang:num_running_reqs", "Requests that hold a slot", len(work.slots)),
            ("sglang:num_queue_reqs", "Requests that wait for a slot", len(work.waiting)),
            ("sglang:num_used_tokens", "Tokens of running requests", used),
            ("sglang:token_usage", "Their share of the room for keys and values", used / work.kv.num_tokens),
            ("sglang:max_total_num_tokens", "Room for keys and values, in tokens", work.kv.num_tokens),
            ("sglang:cache_hit_rate", "Share of prompt tokens that the prefix cache had", hit_rate),
            ("sglang:gen_throughput", "Sampled tokens a second, since last asked, or over 10 s if longer", rate),
            ("areal_agent:prefix_cache_tokens", "Tokens that the prefix cache holds", work.kv.prefixes.num_tokens),
        ):
            gauge = GaugeMetricFamily(name, what, labels=["model_name"])
            gauge.add_metric(self._label, value)
            yield gauge
        for name, what, value in (
            ("sglang:num_requests", "Requests that arrived", counts.requests),
            ("sglang:num_aborted_requests", "Requests that were aborted", counts.aborted_requests),
            ("sglang:num_retracted_requests", "Retractions for want of room", counts.retracted_requests),
            ("sglang:prompt_tokens", "Prompt tokens", counts.prompt_tokens),
            ("sglang:cached_tokens", "Of them, found in the prefix cache", counts.cached_tokens),
            ("sglang:generation_tokens", "Sampled tokens", counts.generated_tokens),
            ("areal_agent:busy_seconds", "Seconds in which a step was running", counts.busy_s),
        ):
            counter = CounterMetricFamily(name, what, labels=["model_name"])
            counter.add_metric(self._label, value)
            yield counter
        for name, what, latency in (
            ("sglang:time_to_first_token_seconds", "From arrival to the first token", counts.to_first_token),
            ("sglang:e2e_request_latency_seconds", "From arrival to the answer", counts.to_answer),
        ):
            histogram = HistogramMetricFamily(name, what, labels=["model_name"])
            histogram.add_metric(self._label, latency.buckets(), latency.sum_s)
            yield histogram
