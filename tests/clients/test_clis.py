"""Codex and Claude Code, the real programs, each as a process of its own with a served gateway and the real ledger:

- one that reads, edits and runs a file by its own tools, streamed, one call a turn and two: one chain, every sampled
  token is trained, the ledger verifies, and it asks no other host for anything

They skip without the programs, which `examples/cli_agent/fetch.sh` fetches.
"""

import asyncio
import json
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.tokens.records import token_records
from areal_agent.types import GenerateRequest
from examples.cli_agent.workflow import COMMAND, PROVIDER, SETTINGS
from tests.gateway.conftest import OpenWorld

VERSIONS = {"claude": "2.1.197", "codex": "0.169.0"}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True, kw_only=True)
class Cli:
    """How a CLI is started, and what a model says to it that finds a wrong sign in `sum.py`."""

    command: tuple[str, ...]
    variables: dict[str, str]
    answers: tuple[str, ...]


def claude(url: str, folder: Path) -> Cli:
    file = str(folder / "sum.py")
    edit = call("Edit", file_path=file, old_string="1 - 2", new_string="1 + 2")  # comes back with `replace_all: false`
    run = call("Bash", command="python3 sum.py", description="Run it")
    return Cli(
        command=("claude", "-p", "Mend sum.py", "--tools", "Bash,Edit,Read", "--allowedTools", "Bash,Edit,Read"),
        variables={"ANTHROPIC_BASE_URL": url, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        answers=(call("Read", file_path=file), f"The sign.\n{edit}", f"{run}\n{call('Read', file_path=file)}"),
    )


def codex(url: str, folder: Path) -> Cli:
    read, run = call("exec_command", cmd="cat sum.py"), call("exec_command", cmd="python3 sum.py")
    settings = (*SETTINGS, "analytics.enabled=false", "model_providers.own=" + PROVIDER.format(f"{url}/v1"))
    options = (word for one in settings for word in ("-c", one))
    return Cli(
        command=(*COMMAND, *options, "-m", "model", "Mend sum.py"),
        variables={},
        answers=(read, f"The sign.\n{call('exec_command', cmd='sed -i s/-/+/ sum.py')}", f"{run}\n{read}"),
    )


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=True)
    yield ledger
    await ledger.aclose()


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """Where programs look for other hosts: a proxy that reaches none, and keeps what it was asked for."""

    url: str
    asked: list[str]


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    asked: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        yield Proxy(url=f"http://{host}:{port}", asked=asked)


@pytest.mark.parametrize("cli", [claude, codex])
async def test_one_chain(
    open_world: OpenWorld, ledger: Ledger, proxy: Proxy, tmp_path: Path, cli: Callable[[str, Path], Cli]
) -> None:
    programs = os.environ.get("AREAL_AGENT_CLIS")
    if programs is None:
        name = cli.__name__
        pytest.skip(f"run examples/cli_agent/fetch.sh {name}@{VERSIONS[name]} DIR and set AREAL_AGENT_CLIS to DIR")
    home, folder = tmp_path / "home", tmp_path / "work"
    for one in (home, folder):
        one.mkdir()
    (folder / "sum.py").write_text("print(1 - 2)\n")

    def script(request: GenerateRequest) -> list[int]:
        text = world.renderer.detokenizer.text_of(request.input_ids)
        return world.ids((*played.answers, "It prints 3.")[text.count("<|im_start|>assistant\n") - 1] + "<|im_end|>")

    world = await open_world(script=script, journal=ledger.own, max_context_tokens=200_000)
    agent = await world.start(model_aliases=["*"])
    played = cli(world.url, folder)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "KEY": agent.key,  # Codex's; the next is Claude Code's
        "ANTHROPIC_API_KEY": agent.key,
        "HTTP_PROXY": proxy.url,
        "HTTPS_PROXY": proxy.url,
        "NO_PROXY": "127.0.0.1",
    }
    process = await asyncio.create_subprocess_exec(
        *played.command, env=variables | played.variables, cwd=folder, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    printed, errors = (data.decode() for data in await process.communicate())
    assert (process.returncode, printed) == (0, "It prints 3.\n"), errors
    assert (folder / "sum.py").read_text() == "print(1 + 2)\n"
    assert proxy.asked == []
    await agent.reward(reward=1)
    await agent.end()
    trajectory = await ledger.trajectory(agent.id)
    chain = [turn.completions[0].id for turn in trajectory.turns]
    assert [turn.parent for turn in trajectory.turns] == [None, *chain[:-1]]
    assert [turn.fork_reason for turn in trajectory.turns] == [None] * 4
    [record] = token_records(trajectory)
    assert record.loss_mask.sum() == trajectory.num_sampled_tokens > 0
    assert world.gateway.stats().history_mismatches == 0
    assert verify(tmp_path / "ledger.sqlite").violations == ()
