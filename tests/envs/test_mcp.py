"""The tools of a real MCP server, in a process of its own, played by a scripted model.

1. its tools are called and their texts read; 2. errors of the model and of tools, and time-outs, are text; 3. a server
that dies or is none is `infra`; 4. what a workflow raises inside comes out as it is, also a cancellation;
5. a server inherits no keys.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_agent import ConfigError, Reject, Status, Trajectory
from areal_agent.testing import play, tool_call
from envs.mcp.tools import open_tools
from envs.mcp.workflow import solve

pytest.importorskip("mcp")

SERVER = '''
import asyncio, os
from mcp.server import MCPServer
server = MCPServer("calculator")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    raise ValueError("out of paper")

@server.tool()
async def sleep() -> str:
    await asyncio.sleep(60)

@server.tool()
def variables() -> str:
    return ", ".join(os.environ)

@server.tool()
def die() -> str:
    os._exit(1)

server.run()
'''


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    server = {"command": sys.executable, "args": [str(path)], "env": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    return {"messages": [{"role": "user", "content": "2 + 3?"}], "answer": 5, "server": server}


def texts_of(trajectory: Trajectory) -> list[str]:
    return [one["content"] for turn in trajectory.turns for one in turn.request_delta if one["role"] == "tool"]


def test_tools_are_called_and_faults_are_text(task: dict[str, Any]) -> None:
    calls = [tool_call("add", a=2, b="x"), tool_call("no"), tool_call("fail"), tool_call("add", a=2, b=3)]
    trajectory = play(solve, task, *calls, "It is 5.")
    assert (trajectory.status, trajectory.error, trajectory.rewards.final) == (Status.COMPLETED, None, 1.0)
    texts = texts_of(trajectory)
    assert [text.startswith("Error: ") for text in texts] == [True, True, True, False]
    assert texts[2:] == ["Error: Error executing tool fail", "5"]
    late = play(solve, task | {"call_s": 0.2}, tool_call("sleep"), "It is 5.")
    assert texts_of(late) == ["Error: sleep did not answer within 0.2 s"]


@pytest.mark.parametrize("change", [{}, {"server": {"command": "/bin/false"}}, {"server": {"command": "/no/where"}}])
def test_a_server_that_dies_or_is_none_is_not_the_models_failure(task: dict[str, Any], change: dict[str, Any]) -> None:
    trajectory = play(solve, task | change, tool_call("die"), "It is 5.")
    assert (trajectory.status, trajectory.error is None) == (Status.INFRA, False)
    assert "the MCP server" in str(trajectory.error)


async def test_a_server_inherits_no_key(task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_AGENT_ENGINE_KEY", "secret")
    async with open_tools(task["server"]) as tools:
        names = (await tools.call("variables", "{}")).split(", ")
    assert ({"PATH", "PYTHONPATH"} <= set(names), "AREAL_AGENT_ENGINE_KEY" in names) == (True, False)


async def test_what_is_raised_inside_comes_out(task: dict[str, Any]) -> None:
    with pytest.raises(Reject):
        async with open_tools(task["server"]):
            raise Reject("enough")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0), open_tools(task["server"]):
            await asyncio.Event().wait()
    with pytest.raises(ConfigError, match="give its url, or its command with args and env"):
        async with open_tools({"cmd": "x"}):
            pass
