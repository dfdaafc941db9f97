"""A command that discards the keys and values of all rows does not wait for the current step:

- a prefill chunk or a decode step is given up: it samples nothing, and the rows go on from where they were
- an abort of all, and the end of the engine, answer with the tokens from before that step
- when the thread dies in the middle of a step, everybody who waits for its commands gets an error, also pauses that
  wait for rows to end, and a drain; a row that was just being answered is answered, too
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pytest
from safetensors.torch import load_file

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.scheduler import Scheduler
from areal_agent.engine.embedded.workload import Row, Workload
from areal_agent.errors import EngineUnreachable
from areal_agent.types import FinishReason, PauseMode, WeightVersion
from tests.engine.conftest import DEADLINE_S, Wrapped, both_ways

fixed_shapes = both_ways

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)
TOLERANCE = 1e-4


class Held(Wrapped):
    """It blocks in one step until that is unneeded, and only then begins to compute.

    The first step prefills all prompts; each samples one token per row.
    """

    def __init__(self, runner: ModelRunner, held_step: int) -> None:
        super().__init__(runner)
        self._held_step = held_step
        self._num_steps = 0
        self.has_begun = threading.Event()

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
def test_the_step_under_way_is_given_up_and_rows_go_on(takes_all, held_step, tiny, other, schedule, ask, truth):
    requests = [ask(number, prompt_length=5 + 4 * number) for number in range(3)]
    with schedule(tiny, partial(Held, held_step=held_step)) as (scheduler, held):
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
def test_an_end_answers_with_the_tokens_from_before_that_step(end, held_step, tiny, schedule, ask, truth):
    requests = [ask(number) for number in range(3)]
    with schedule(tiny, partial(Held, held_step=held_step)) as (scheduler, held):
        answers = submit_together(scheduler, requests)
        assert held.has_begun.wait(DEADLINE_S)
        end(scheduler)
        results = [answer.result(DEADLINE_S) for answer in answers]
    for request, result in zip(requests, results, strict=True):
        assert (len(result.token_ids), result.finish_reason) == (held_step - 1, FinishReason.ABORT)
        truth(tiny).check(request, result)


class Dying(Wrapped):
    """Its first prefill blocks until it is told to fail."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.has_begun, self.may_fail = threading.Event(), threading.Event()

    def prefill(self, pieces):
        self.has_begun.set()
        assert self.may_fail.wait(DEADLINE_S)
        raise RuntimeError("an illegal memory access was encountered")


COMMANDS = {
    "abort": lambda scheduler: scheduler.abort(None),
    "pause": lambda scheduler: scheduler.pause(PauseMode.IN_PLACE),
    "pause that waits": lambda scheduler: scheduler.pause(PauseMode.WAIT),
    "drain": Scheduler.finish,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_who_waits_for_a_command_is_told(command, tiny, schedule, ask):
    with schedule(tiny, Dying) as (scheduler, dying):
        answer = scheduler.submit(ask(1))
        assert dying.has_begun.wait(DEADLINE_S)
        waiting = COMMANDS[command](scheduler)
        dying.may_fail.set()
        for one in (answer, waiting):
            assert isinstance(one.exception(DEADLINE_S), EngineUnreachable)


class Full(Wrapped):
    """It is its own SlotStore, too, and runs out of memory once it is full."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.kv = self
        self.is_full = False

    def __getattr__(self, name: str):
        return getattr(self._runner, name) if hasattr(self._runner, name) else getattr(self._runner.kv, name)

    def keep(self, *args: object) -> None:
        if self.is_full:
            raise RuntimeError("can't allocate memory")
        self._runner.kv.keep(*args)


def test_a_row_that_was_being_answered_is_told(tiny, ask):
    full = Full(ModelRunner(str(tiny), device="cpu", num_slots=4, max_context_tokens=128))
    work = Workload(full, WeightVersion())
    row = Row(request=ask(1, max_tokens=3))
    work.add(row)
    work.step()
    full.is_full = True
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        while work.has_work():
            work.step()
    work.fail(EngineUnreachable("the engine failed"))
    assert isinstance(row.answer.exception(0), EngineUnreachable)
