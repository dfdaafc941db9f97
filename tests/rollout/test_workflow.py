"""What may be a workflow: 1. functions, closures, callable instances and import paths; 2. objects with an async run
(AReaL's form); 3. everything else is refused by name: a plain function, a class, a missing module or name, a wrong
signature."""

import pytest

from areal_agent import ConfigError
from areal_agent.rollout.workflow import load_workflow


async def solve(task, rollout):
    return task["x"]


def plain(task, rollout):
    return 1.0


class Callable:
    async def __call__(self, task, rollout):
        return task["x"] + 1


class Agent:
    async def run(self, data, **kwargs):
        return {"data": data, **kwargs}


class FakeRollout:
    base_url, api_key, http_client = "http://gateway/v1", "sk-1", "client"


async def test_functions_and_closures() -> None:
    async def closure(task, rollout):
        return task["x"] * 2

    assert await load_workflow(solve)({"x": 1}, None) == 1
    assert await load_workflow(closure)({"x": 1}, None) == 2


async def test_callable_instances() -> None:
    assert await load_workflow(Callable())({"x": 1}, None) == 2


async def test_import_paths() -> None:
    workflow = load_workflow("envs.calculator.workflow:solve")
    assert workflow.__name__ == "solve"


async def test_agents_with_a_run_method_get_the_gateway() -> None:
    got = await load_workflow(Agent())({"x": 1}, FakeRollout())
    assert got == {"data": {"x": 1}, "base_url": "http://gateway/v1", "api_key": "sk-1", "http_client": "client"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (plain, "not a coroutine; write it as 'async def solve"),
        ("json:dumps", "'json:dumps' is a plain function, not a coroutine"),
        ("json", "not of the form 'package.module:name'"),
        ("no_such_module:solve", "importing 'no_such_module' failed: ModuleNotFoundError"),
        ("json:solve", "module 'json' has no 'solve'"),
        (Callable, "is a class; give an instance"),
        (3, "is a int, not a coroutine"),
    ],
)
def test_everything_else_is_refused(source: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_workflow(source)


def test_a_wrong_signature_is_refused() -> None:
    async def solve(task):
        return 1.0

    with pytest.raises(ConfigError, match=r"called with two arguments, \(task, rollout\)"):
        load_workflow(solve)
