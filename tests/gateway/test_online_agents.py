"""The agents of examples/online_rl with a real gateway, its ledger and a scripted engine:

1. a call that fails ends its rollout as an error: its siblings make up the group, and the next groups are played; 2. a
rollout that fails before its first call is ended, too; 3. a group that accepts no more sessions is skipped; 4. when
interrupted, they end every open session; 5. a key that the gateway refuses ends them with its message; 6. each group is
printed with its rewards; 7. the file needs openai and the standard library alone; 8. flags that are wrong, and a
gateway that has made no key yet, end it with what to do; 9. its tool runs sums and nothing else.
"""

import ast
import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_agent.engine.fake import Operation
from areal_agent.errors import EngineError
from areal_agent.gateway.online.consumer import Consumer
from areal_agent.gateway.online.wire import decode_lease
from areal_agent.ledger.ledger import Ledger
from examples.online_rl import agent
from examples.online_rl.agent import Agents, Refused

from .conftest import ADMIN_KEY, OpenWorld, World

GROUP_SIZE = 3


@dataclass(kw_only=True)
class Place:
    """A gateway with a trainer's side."""

    world: World
    consumer: Consumer

    def agents(self, kind: Callable[..., Agents] = Agents, key: str = ADMIN_KEY) -> Agents:
        return kind(self.world.url, key, GROUP_SIZE)


@pytest.fixture
async def open_place(open_world: OpenWorld, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=True)
    await ledger.begin_incarnation(None)
    consumer = await Consumer.open(ledger)

    async def open_it(**options: Any) -> Place:
        answers = ["hello world<|im_end|>"] * (2 * GROUP_SIZE)
        world = await open_world(*answers, journal=consumer, archive=ledger, consumer=consumer, **options)
        return Place(world=world, consumer=consumer)

    yield open_it
    await ledger.aclose()


class OneIsCut(Agents):
    """Its second rollout loses its connection before the first call."""

    num_begun = 0

    async def _solve(self, number: int, session: dict[str, Any]) -> float:
        self.num_begun += 1
        if self.num_begun == 2:
            raise ConnectionError("all attempts failed")
        return await super()._solve(number, session)


async def test_a_call_that_fails_costs_one_rollout(open_place: Callable[..., Any]) -> None:
    place: Place = await open_place()
    place.world.engine.fail_next(Operation.GENERATE, EngineError("the engine is being restarted"))
    agents = place.agents()
    await agents.play_forever(range(2))
    await agents.aclose()
    assert place.consumer.state().statuses == {"completed": 5, "error": 1}
    status, body = await place.world.call("/rl/lease", {"step": 1, "num_groups": 2})
    assert status == 200
    assert sorted(len(group.trajectories) for group in decode_lease(body).groups) == [2, 3]


async def test_a_rollout_that_is_cut_before_its_first_call(
    open_place: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    place: Place = await open_place()
    agents = place.agents(OneIsCut)
    await agents.play_forever(range(2))
    await agents.aclose()
    told = capsys.readouterr().err
    assert "-0: 2 of 3 rollouts are done, mean reward 0.00\n" in told
    assert "-1: 3 of 3 rollouts are done, mean reward 0.00\n" in told
    state = place.consumer.state()
    assert (state.statuses, state.num_running) == ({"completed": 5, "error": 1}, 0)


async def test_a_group_that_takes_no_more_is_passed_over(
    open_place: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    place: Place = await open_place()
    agents = place.agents()
    await agents.play_forever((0, 0, 1))
    await agents.aclose()
    assert "has its 3 session(s) already" in capsys.readouterr().err
    assert place.consumer.state().statuses == {"completed": 6}


async def test_what_is_open_is_ended_when_they_are_interrupted(open_place: Callable[..., Any]) -> None:
    place: Place = await open_place(is_stepped=True)
    agents = place.agents()
    playing = asyncio.create_task(agents.play_forever(range(2)))
    await place.world.engine.wait_for_requests(GROUP_SIZE)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await agents.aclose()
    state = place.consumer.state()
    assert (state.statuses, state.num_running) == ({"cancelled": 3}, 0)


async def test_a_key_that_is_refused_ends_them(open_place: Callable[..., Any]) -> None:
    place: Place = await open_place()
    agents = place.agents(key="sk-wrong")
    with pytest.raises(ExceptionGroup) as raised:
        await agents.play_forever(range(2))
    await agents.aclose()
    assert raised.group_contains(Refused, match="needs the gateway's admin key")


def test_the_file_needs_openai_and_the_standard_library_alone() -> None:
    tree = ast.parse(Path(agent.__file__).read_text())
    modules = {one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    modules |= {name.name for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names}
    assert {module.partition(".")[0] for module in modules} - sys.stdlib_module_names == {"openai"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"--key-file": "none"}, "--key-file none cannot be read: No such file or directory. A gateway makes the file"),
        ({"--gateway": "127.0.0.1:8000"}, "--gateway is '127.0.0.1:8000'; give a URL"),
        ({"--groups": "0"}, "--groups is 0; give at least 1"),
    ],
)
def test_a_wrong_flag_ends_it_with_what_to_do(
    flags: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--gateway": "http://127.0.0.1:1", "--key-file": __file__} | flags
    monkeypatch.setattr(sys, "argv", ["agent.py", *(word for flag in given.items() for word in flag)])
    with pytest.raises(SystemExit) as ended:
        agent.parse()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ('{"code": "print((348 + 27) * 191)"}', "71625"),
        ('{"code": "print(1 + 2"}', "SyntaxError: '(' was never closed"),
        ('{"code": "print(open(0))"}', agent.USAGE),
        ('{"code": "import os"}', agent.USAGE),
        ("[1", agent.USAGE),
    ],
)
def test_its_tool_runs_sums_and_nothing_else(arguments: str, output: str) -> None:
    assert agent.run_tool(arguments) == output
