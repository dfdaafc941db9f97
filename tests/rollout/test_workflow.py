"""What may be a workflow, and how plain functions run.

- Functions, closures, callable instances, import paths, objects with a method run (AReaL's form), and classes of
  which an instance can be made. A plain function runs in a thread, and may return a coroutine.
- Everything else is refused with its reason: a class that needs arguments, a value, a missing module, a wrong
  signature.
- What another process can import has a path; a closure, an instance and a function of the program itself have none.
- What a thread returns and raises arrives, SystemExit and StopIteration included; it sees its caller's context; a
  cancelled caller goes on at once, whatever the thread does.
"""

import asyncio
import contextvars
import re
import threading
from pathlib import Path

import pytest

from areal_agent import ConfigError
from areal_agent.rollout.workflow import import_path, load_workflow, run_in_thread
from envs.calculator import workflow as calculator


async def of_one_argument(task):
    return 1.0


def plain(task, rollout):
    return threading.current_thread().name


class Callable:
    async def __call__(self, task, rollout):
        return task["x"] + 1


class Agent:
    async def run(self, data, **kwargs):
        return {"data": data, **kwargs}


class PlainAgent:
    def run(self, data, **kwargs):
        return {"thread": threading.current_thread().name, **kwargs}


class AgentOfOneArgument:
    async def run(self, data):
        return 1.0


class NeedsArguments:
    def __init__(self, tool: str) -> None:
        self.tool = tool


class FakeRollout:
    anthropic_base_url, api_key, http_client = "http://gateway", "sk-1", "client"
    sync_http_client = "sync client"


async def test_functions_callables_and_what_hands_back_a_coroutine() -> None:
    async def closure(task, rollout):
        return task["x"] + 1

    for workflow in (closure, Callable(), Callable, lambda task, rollout: Callable()(task, rollout)):
        assert await load_workflow(workflow)({"x": 1}, None) == 2


async def test_agents_with_a_run_method_get_the_gateway() -> None:
    got = await load_workflow(Agent())({"x": 1}, FakeRollout())
    assert got == {"data": {"x": 1}, "base_url": "http://gateway", "api_key": "sk-1", "http_client": "client"}


async def test_plain_functions_and_agents_run_in_a_thread_agents_with_a_client_for_threads() -> None:
    assert await load_workflow(plain)({"x": 1}, None) == "workflow"
    got = await load_workflow(PlainAgent())({"x": 1}, FakeRollout())
    assert (got["thread"], got["http_client"]) == ("workflow", "sync client")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("json:dumps", "called with two arguments, (task, rollout)"),
        (of_one_argument, "called with two arguments, (task, rollout)"),
        (AgentOfOneArgument(), "write it as 'async def run(self, data, **kwargs)'"),
        ("json", "not of the form 'package.module:name'"),
        ("no_such_module:solve", "'no_such_module:solve' cannot be imported (ModuleNotFoundError"),
        ("json:solve", "'json:solve' cannot be imported (AttributeError: module 'json' has no attribute 'solve'"),
        (NeedsArguments, "is a class whose instances need arguments"),
        (3, "3 is a int; write it as 'async def solve(task, rollout)'"),
    ],
)
def test_everything_else_is_refused(source: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_workflow(source)


def test_import_paths() -> None:
    assert load_workflow("envs.calculator.workflow:solve") is calculator.solve
    assert import_path(calculator.solve) == "envs.calculator.workflow:solve"
    assert import_path("package.module:name") == "package.module:name"


async def _of_a_program(task, rollout):
    return 1.0


_of_a_program.__module__ = "__main__"


@pytest.mark.parametrize("source", [lambda task, rollout: 1.0, Agent(), Agent().run, _of_a_program])
def test_what_only_this_process_has_has_no_path(source: object) -> None:
    with pytest.raises(ConfigError, match=r"cannot be imported by another process.*rollout\.workers=0"):
        import_path(source)


who = contextvars.ContextVar("who", default="nobody")


async def test_what_it_returns() -> None:
    name, is_daemon = await run_in_thread(
        "s-1", lambda: (threading.current_thread().name, threading.current_thread().daemon)
    )
    assert (name, is_daemon) == ("s-1", True)


@pytest.mark.parametrize(
    ("raised", "arrives"),
    [(KeyError("answer"), KeyError), (SystemExit(3), SystemExit), (StopIteration(), RuntimeError)],
    ids=lambda value: str(value),
)
async def test_what_it_raises(raised: BaseException, arrives: type[BaseException]) -> None:
    def work() -> None:
        raise raised

    with pytest.raises(arrives):
        await run_in_thread("s-1", work)


async def test_it_sees_the_context_of_its_caller() -> None:
    who.set("the caller")
    assert await run_in_thread("s-1", who.get) == "the caller"


async def test_a_cancelled_caller_leaves_the_thread_behind() -> None:
    started, release, done = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        release.wait()
        done.set()

    waiting = asyncio.create_task(run_in_thread("s-1", work))
    await started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not done.is_set()
    release.set()
    await asyncio.to_thread(done.wait)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import json\nimport no_such_package.inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"needs_more\.py:2 needs the package 'no_such_package', which is"):
        load_workflow("needs_more:solve")
