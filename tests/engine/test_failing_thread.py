"""A model thread that dies in the middle of a step:

- everybody who waits for its commands gets an error, also pauses that wait for rows to end, and a drain
- a row that was just being answered is answered, too
"""

import threading

import pytest

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.scheduler import Scheduler
from areal_agent.engine.embedded.workload import Row, Workload
from areal_agent.errors import EngineUnreachable
from areal_agent.types import PauseMode, WeightVersion
from tests.engine.conftest import DEADLINE_S


@pytest.fixture
def runner(tiny) -> ModelRunner:
    return ModelRunner(str(tiny), device="cpu", num_slots=4, max_context_tokens=128)


class Dying:
    """A ModelRunner whose first prefill blocks until it is told to fail."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.has_begun, self.may_fail = threading.Event(), threading.Event()

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

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
def test_who_waits_for_a_command_is_told(command, runner, ask):
    dying = Dying(runner)
    scheduler = Scheduler(dying, version=WeightVersion(), on_failure=lambda: None)
    answer = scheduler.submit(ask(1))
    assert dying.has_begun.wait(DEADLINE_S)
    waiting = COMMANDS[command](scheduler)
    dying.may_fail.set()
    for one in (answer, waiting):
        assert isinstance(one.exception(DEADLINE_S), EngineUnreachable)
    scheduler.close()


class Full:
    """A ModelRunner, and its own SlotStore, that runs out of memory once it is full."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.kv = self
        self.is_full = False

    def __getattr__(self, name: str):
        return getattr(self._runner, name) if hasattr(self._runner, name) else getattr(self._runner.kv, name)

    def keep(self, *args: object) -> None:
        if self.is_full:
            raise RuntimeError("can't allocate memory")
        self._runner.kv.keep(*args)


def test_a_row_that_was_being_answered_is_told(runner, ask):
    full = Full(runner)
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
