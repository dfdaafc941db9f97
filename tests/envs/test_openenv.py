"""Servers of OpenEnv, the package's own and one with tools, in a process of their own, played by a scripted model.

1. the sum of the rewards is the reward; a refused action is text; 2. tools are found and called, and faults are text;
3. a step without a reward, in all of an episode, is no reward; 4. a server that dies, is late, loses a session or
is none is `infra`; 5. what is refused.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_agent import ConfigError, Status, Trajectory
from areal_agent.testing import play, tool_call
from envs.openenv.tasks import load
from envs.openenv.workflow import solve
from tests.envs.doors import serving

openenv: Any = pytest.importorskip("openenv")

SERVERS = '''
import asyncio, os, uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
from server.app import app as echo

class Adder(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server = FastMCP("adder")
        for tool in (self.add, self.die, self.sleep, self.hang_up):
            server.tool(tool)
        super().__init__(server)

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def die(self) -> None:
        os._exit(1)

    async def sleep(self) -> None:
        await asyncio.Event().wait()

    def hang_up(self):
        return "goodbye"

    def reset(self, seed=None, **options):
        return Observation(metadata={"secret": seed})

    def _step_impl(self, action, **options):
        raise NotImplementedError

    async def step_async(self, action, **options):
        seen = await super().step_async(action, **options)
        if isinstance(seen, CallToolObservation) and seen.error is None and action.arguments:
            seen.reward, seen.done = 0.75, action.arguments["a"] == 7
        return seen

class Away(Adder):
    async def _async_list_tools(self):
        raise OSError("the server of the tools is away")

both = FastAPI()
both.mount("/echo", echo)
both.mount("/adder", create_fastapi_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=8))
both.mount("/one", create_fastapi_app(Adder, CallToolAction, CallToolObservation))
both.mount("/away", create_fastapi_app(Away, CallToolAction, CallToolObservation))

async def app(scope, receive, send):
    async def sending(message):
        await send(message)
        if "goodbye" in str(message.get("text")):
            await send({"type": "websocket.close"})
    await both(scope, receive, sending)

uvicorn.run(app, port=0)
'''


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of both servers. /echo is the one that `openenv init` makes."""
    folder = tmp_path_factory.mktemp("servers")
    template = Path(openenv.__path__[0]) / "cli/templates/openenv_env"
    for path in (path for path in template.rglob("*.py") if path.parent.name == "server" or path.stem == "models"):
        text = path.read_text()
        for old, new in (("__ENV_CLASS_NAME__", "Echo"), ("__ENV_TITLE_NAME__", "Echo"), ("__ENV_NAME__", "echo")):
            text = text.replace(old, new)
        target = folder / str(path.relative_to(template)).replace("__ENV_NAME__", "echo")
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    with serving(folder, SERVERS) as url:
        yield url


def texts(trajectory: Trajectory, role: str) -> list[str]:
    return [one["content"] for turn in trajectory.turns for one in turn.request_delta if one["role"] == role]


def test_the_sum_of_the_rewards_is_the_reward(url: str) -> None:
    task = load("train", 0, f"{url}/echo", field="message", prompt="Say it.", max_turns=2)[0]
    trajectory = play(solve, task, "four", "twelve chars")
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, None)
    assert trajectory.rewards.final == pytest.approx(1.4)
    first, second = texts(trajectory, "user")
    assert first.startswith("Say it.\n\n") and "Echo environment ready!" in first and '"four"' in second
    refused = play(solve, task | {"field": "massage"}, "four", "five")
    assert refused.status is Status.MISSING_REWARD
    assert "Error: " in texts(refused, "user")[1]
    no_tools = play(solve, task | {"field": None}, "four")
    assert no_tools.status is Status.ERROR
    assert "/echo has no tools; name the field of its action as `field`" in str(no_tools.error)


def test_tools_are_called_and_faults_are_text(url: str) -> None:
    task = load("test", 0, f"{url}/adder", prompt="Add.")[0]
    calls = [tool_call("no"), tool_call("add", a=1, b="x"), tool_call("add", a=2, b=3), tool_call("add", a=7, b=3)]
    trajectory = play(solve, task, *calls)
    assert (trajectory.status, trajectory.error, trajectory.rewards.final) == (Status.COMPLETED, None, 1.5)
    said = texts(trajectory, "tool")
    assert [text.startswith("Error: ") for text in said] == [True, True, False]
    assert (said[2], "secret" in str(trajectory.turns)) == ("5", False)
    assert play(solve, task, "I am done.").status is Status.MISSING_REWARD


@pytest.mark.parametrize(
    ("place", "tool", "said"),
    [
        ("/one", "sleep", "TimeoutError"),
        ("/one", "add", "CAPACITY_REACHED"),  # which has one session, and that still sleeps
        # the client would go on in another session, or finds that the server has closed this one
        ("/adder", "hang_up", "the connection was lost|ConnectionClosedOK"),
        ("/away", "add", "cannot list its tools: the server of the tools is away"),
        ("/nowhere", "add", "ConnectionError: Failed to connect"),
        ("/adder", "die", "no close frame received"),  # the last: then there is no server
        ("/adder", "add", "ConnectionError: Failed to connect"),
    ],
)
def test_a_server_that_fails_is_not_the_models_failure(url: str, place: str, tool: str, said: str) -> None:
    task = load("train", 0, url + place, step_s=1.0)[0]
    trajectory = play(solve, task, tool_call(tool), tool_call("add", a=7, b=3))
    assert trajectory.status is Status.INFRA
    assert re.search(f"the OpenEnv server {url}{place} .*({said})", str(trajectory.error))


def test_what_is_refused() -> None:
    for args, message in (
        ({"url": "localhost"}, "url is 'localhost'"),
        ({"size": 0}, "size is 0"),
        ({"split": "dev"}, "split is 'dev'; valid: 'train', 'test'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(**{"split": "train", "seed": 0, "url": "http://x", **args})
