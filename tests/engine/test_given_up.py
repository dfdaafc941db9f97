"""A command that discards the keys and values of all rows does not wait for the current step:

- a prefill chunk or a decode step is given up: it samples nothing, and the rows go on from where they were
- an abort of all, and the end of the engine, answer with the tokens from before that step
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.scheduler import Scheduler
from areal_agent.types import FinishReason, PauseMode, WeightVersion
from tests.engine.conftest import DEADLINE_S, MAX_CONTEXT

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)
TOLERANCE = 1e-4


class Held:
    """A ModelRunner that blocks in one step until that is unneeded, and only then begins to compute."""

    def __init__(self, runner: ModelRunner, held_step: int) -> None:
        self._runner = runner
        self._held_step = held_step
        self._num_steps = 0
        self.has_begun = threading.Event()

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

    def prefill(self, *args):
        self._stand()
        return self._runner.prefill(*args)

    def decode(self, *args):
        self._stand()
        return self._runner.decode(*args)

    def _stand(self) -> None:
        self._num_steps += 1
        if self._num_steps == self._held_step:
            self.has_begun.set()
            assert self._runner.unneeded.wait(DEADLINE_S)


@pytest.fixture
def hold(tiny):
    """Start a model thread and hold it in a step. The first prefills all prompts; each samples one token per row."""

    @contextmanager
    def holding(held_step: int):
        held = Held(ModelRunner(str(tiny), device="cpu", num_slots=8, max_context_tokens=MAX_CONTEXT), held_step)
        scheduler = Scheduler(held, version=OLD, on_failure=lambda: None)
        try:
            yield scheduler, held
        finally:
            scheduler.close()

    return holding


def submit_together(scheduler: Scheduler, requests) -> list[Future]:
    """Submit requests that are all queued when the first step begins."""
    scheduler.pause(PauseMode.IN_PLACE)
    answers = [scheduler.submit(request) for request in requests]
    scheduler.resume()
    return answers


TAKES_ALL: dict[str, Callable[[Scheduler, Held, object], Future]] = {
    "retract": lambda scheduler, *_: scheduler.pause(PauseMode.RETRACT),
    "swap": lambda scheduler, _, other: scheduler.swap(load_file(other / "model.safetensors"), NEW, flush_cache=True),
    "release": lambda scheduler, *_: scheduler.release_memory(),
}


@pytest.mark.parametrize("held_step", [1, 5])
@pytest.mark.parametrize("takes_all", TAKES_ALL)
def test_the_step_under_way_is_given_up_and_rows_go_on(takes_all, held_step, tiny, other, hold, ask, truth):
    requests = [ask(number, prompt_length=5 + 4 * number) for number in range(3)]
    with hold(held_step) as (scheduler, held):
        answers = submit_together(scheduler, requests)
        assert held.has_begun.wait(DEADLINE_S)
        TAKES_ALL[takes_all](scheduler, held, other).result(DEADLINE_S)
        scheduler.resume_memory()
        scheduler.resume()
        results = [answer.result(DEADLINE_S) for answer in answers]
    num_old = held_step - 1 if takes_all == "swap" else 12
    for request, result in zip(requests, results, strict=True):
        assert result.versions[-1].end == 12
        assert sum(span.end - span.start for span in result.versions if span.version == OLD) == num_old
        old = truth(tiny).logprobs(request.input_ids, result.token_ids)
        new = truth(other).logprobs(request.input_ids, result.token_ids)
        assert result.logprobs == pytest.approx([*old[:num_old], *new[num_old:]], abs=TOLERANCE)


@pytest.mark.parametrize("held_step", [1, 5])
@pytest.mark.parametrize("end", [lambda scheduler: scheduler.pause(PauseMode.ABORT), Scheduler.close])
def test_an_end_answers_with_the_tokens_from_before_that_step(end, held_step, tiny, hold, ask, truth):
    requests = [ask(number) for number in range(3)]
    with hold(held_step) as (scheduler, held):
        answers = submit_together(scheduler, requests)
        assert held.has_begun.wait(DEADLINE_S)
        end(scheduler)
        results = [answer.result(DEADLINE_S) for answer in answers]
    for request, result in zip(requests, results, strict=True):
        assert (len(result.token_ids), result.finish_reason) == (held_step - 1, FinishReason.ABORT)
        truth(tiny).check(request, result)
