"""Servers of the real package, in processes of their own, played by a scripted model.

1. the package's own echo server: the sum of the rewards is the reward; 2. tools are found and called, and faults are
text; 3. a step without a reward, in all of an episode, is no reward; 4. a server that dies, is late or none is
`infra`; 5. what is no task is refused.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_agent import ConfigError, Status, Trajectory
from areal_agent.testing import play, tool_call
from envs.openenv.tasks import load
from envs.openenv.workflow import solve

openenv: Any = pytest.importorskip("openenv")

TOOLS = '''
import os, time
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Adder(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server = FastMCP("adder")
        server.tool(self.add)
        server.tool(self.die)
        server.tool(self.sleep)
        super().__init__(server)

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def die(self) -> None:
        os._exit(1)

    def sleep(self) -> None:
        time.sleep(5)

    def reset(self, seed=None, **options):
        return Observation(metadata={"secret": seed})

    def _step_impl(self, action, **options):
        raise NotImplementedError

    async def step_async(self, action, **options):
        seen = await super().step_async(action, **options)
        if isinstance(seen, CallToolObservation) and seen.error is None and action.arguments:
            seen.reward, seen.done = 0.75, action.arguments["a"] == 7
        return seen

app = create_fastapi_app(Adder, CallToolAction, CallToolObservation, max_concurrent_envs=8)
'''


@contextmanager
def serving(folder: Path, app: str) -> Iterator[str]:
    command = [sys.executable, "-m", "uvicorn", app, "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                yield found[1]
                break
        else:
            pytest.fail("".join(said))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server that `openenv init` makes."""
    folder = tmp_path_factory.mktemp("echo")
    template = Path(openenv.__path__[0]) / "cli/templates/openenv_env"
    for path in (path for path in template.rglob("*.py") if path.parent.name == "server" or path.stem == "models"):
        text = path.read_text()
        for old, new in (("__ENV_CLASS_NAME__", "Echo"), ("__ENV_TITLE_NAME__", "Echo"), ("__ENV_NAME__", "echo")):
            text = text.replace(old, new)
        target = folder / str(path.relative_to(template)).replace("__ENV_NAME__", "echo")
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    with serving(folder, "server.app:app") as url:
        yield url


@pytest.fixture
def adder(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "adder.py").write_text(TOOLS)
    with serving(tmp_path, "adder:app") as url:
        yield url


def texts(trajectory: Trajectory, role: str) -> list[str]:
    return [one["content"] for turn in trajectory.turns for one in turn.request_delta if one["role"] == role]


def test_the_sum_of_the_rewards_is_the_reward(echo: str) -> None:
    task = load("train", 0, echo, field="message", prompt="Say it.", max_turns=2)[0]
    trajectory = play(solve, task, "four", "twelve chars")
    assert (trajectory.status, trajectory.error) == (Status.COMPLETED, None)
    assert trajectory.rewards.final == pytest.approx(1.4)
    first, second = texts(trajectory, "user")
    assert first.startswith("Say it.\n\n") and "Echo environment ready!" in first and '"four"' in second
    refused = play(solve, task | {"field": "massage"}, "four", "five")
    assert refused.status is Status.MISSING_REWARD
    assert "Error: " in texts(refused, "user")[1]


def test_tools_are_called_and_faults_are_text(adder: str) -> None:
    task = load("test", 0, adder, prompt="Add.")[0]
    calls = [tool_call("no"), tool_call("add", a=1, b="x"), tool_call("add", a=2, b=3), tool_call("add", a=7, b=3)]
    trajectory = play(solve, task, *calls)
    assert (trajectory.status, trajectory.error, trajectory.rewards.final) == (Status.COMPLETED, None, 1.5)
    faults = [text.startswith("Error: ") for text in texts(trajectory, "tool")]
    assert (faults, "secret" in str(trajectory.turns)) == ([True, True, False], False)
    assert play(solve, task, "I am done.").status is Status.MISSING_REWARD


@pytest.mark.parametrize(
    ("tool", "changes"), [("sleep", {"step_s": 1.0}), ("die", {}), ("", {"url": "http://[::1]:9"})]
)
def test_a_server_that_fails_is_not_the_models_failure(adder: str, tool: str, changes: dict[str, Any]) -> None:
    trajectory = play(solve, load("train", 0, adder)[0] | changes, tool_call(tool), "Done.")
    assert trajectory.status is Status.INFRA
    assert "the OpenEnv server http://" in str(trajectory.error)


def test_what_is_no_task_is_refused() -> None:
    for args, message in (({"url": "localhost"}, "url is 'localhost'"), ({"url": "http://x", "size": 0}, "size is 0")):
        with pytest.raises(ConfigError, match=message):
            load("train", 0, **args)
