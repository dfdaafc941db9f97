"""Codex and Claude Code, the real programs, each as a process of its own with a served gateway and the real ledger:

- one that reads, edits and runs a file by its own tools, streamed, one call a turn and two, on the template of every
  model family: one chain, every sampled token is trained, the ledger verifies, and it asks no other host for anything
- nothing that it sent is refused, and all of it is in the ledger's prompts: instructions, tools, the task, and what
  its tools returned, in the order of the calls

They skip without the programs, which `examples/cli_agent/fetch.sh` fetches.
"""

import asyncio
import json
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.records import token_records
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ForkReason, GenerateRequest, JsonObject
from examples.cli_agent.workflow import COMMAND, PROVIDER, SETTINGS
from tests.gateway.conftest import OpenWorld
from tests.tokens.conftest import FAMILIES, TEMPLATES, train_tokenizer
from tests.tokens.test_real_templates import FORGETFUL, MODELS

VERSIONS = {"claude": "2.1.332", "codex": "0.171.0"}
BILLING = "x-anthropic-billing-header"  # the block of Claude Code that no model reads
IN_EVERY_RUN = ("qwen35", "gpt_oss")

Said = tuple[str, Sequence[ToolCall]]


@dataclass(frozen=True, kw_only=True)
class Cli:
    """How a CLI is started, and what a model says to it that finds a wrong sign in `sum.py`."""

    command: tuple[str, ...]
    variables: dict[str, str]
    answers: tuple[Said, ...]


def claude(url: str, folder: Path) -> Cli:
    def call(name: str, **arguments: str) -> ToolCall:
        return ToolCall(name=name, arguments=arguments)

    read = call("Read", file_path=str(folder / "sum.py"))
    edit = call("Edit", file_path=str(folder / "sum.py"), old_string="1 - 2", new_string="1 + 2")
    lost = call("Read", file_path=str(folder / "mul.py"))  # its error is sent before the results of the calls before it
    return Cli(
        command=("claude", "-p", "Mend sum.py", "--tools", "Bash,Edit,Read", "--allowedTools", "Bash,Edit,Read"),
        variables={"ANTHROPIC_BASE_URL": url, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        answers=(  # the edit comes back with `replace_all: false`
            ("", [read]),
            ("The sign.", [edit]),
            ("", [read, call("Bash", command="cat sum.py", description="Look again"), lost]),
        ),
    )


def codex(url: str, folder: Path) -> Cli:
    def run(command: str) -> ToolCall:
        return ToolCall(name="exec_command", arguments={"cmd": command})

    settings = (*SETTINGS, "analytics.enabled=false", "model_providers.own=" + PROVIDER.format(f"{url}/v1"))
    options = (word for one in settings for word in ("-c", one))
    return Cli(
        command=(*COMMAND, *options, "-m", "model", "Mend sum.py"),
        variables={},
        answers=(
            ("", [run("cat sum.py")]),
            ("The sign.", [run("sed -i s/-/+/ sum.py")]),
            ("", [run("python3 sum.py"), run("cat sum.py")]),
        ),
    )


REWRITING = ("deepseek_r1",)
"""Its template writes the second call of a conversation as if it belonged to the first answer."""


KEYS = ("Authorization", "x-api-key", "Content-Type")


@dataclass(kw_only=True)
class Wire:
    """What a CLI has in the place of a network: it reaches `gateway` alone, and what it says is kept."""

    url: str
    gateway: str = ""
    bodies: list[Any] = field(default_factory=list[Any])  # of the requests that the gateway answered
    refused: list[str] = field(default_factory=list[str])  # by the gateway, or because they were for another host


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async def carry(request: web.BaseRequest) -> web.StreamResponse:
        if f"http://{request.host}" != wire.url:
            wire.refused.append(f"{request.method} {request.host}")
            return web.Response(status=403)
        data, headers = await request.read(), {name: request.headers[name] for name in KEYS if name in request.headers}
        async with http.request(request.method, wire.gateway + request.path, data=data, headers=headers) as answer:
            if answer.status != 200:
                wire.refused.append(await answer.text())
                return web.Response(status=answer.status, text=wire.refused[-1], content_type="application/json")
            wire.bodies.append(json.loads(data))
            response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    server = await asyncio.get_running_loop().create_server(web.Server(carry), "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    wire = Wire(url=f"http://{host}:{port}")
    async with server, aiohttp.ClientSession() as http:
        yield wire


def blocks(body: Any) -> list[JsonObject]:
    """Return what a request of either protocol has, in order, each with its `role` if it has one, and its `words`."""
    messages = [{"role": "system", "content": body.get("system", [])}, *(body.get("messages") or body["input"])]
    found: list[JsonObject] = []
    for message in messages:
        content = message.get("content", [message])  # an item that is no message is a block itself
        for block in [{"text": content}] if isinstance(content, str) else content:
            words = block.get("text") or block.get("output") or block.get("content") or ""  # a text, or a result
            if not isinstance(words, str):
                words = "".join(part["text"] for part in words)
            found.append({"role": message.get("role"), "words": words.strip()} | block)
    return [block for block in found if not block["words"].startswith(BILLING)]


def place(text: str, prompt: str) -> int:
    """Return where a text is in a prompt, as it is or as JSON; -1 if it is not there."""
    return max(prompt.find(text), prompt.find(json.dumps(text, ensure_ascii=False)[1:-1]))


def misplaced(body: Any, prompt: str) -> list[str]:
    """Return what a request has after the model's last answer and `prompt` lacks, and results before earlier ones."""
    sent = blocks(body)
    is_ours = [block["role"] == "assistant" or block.get("type") in ("function_call", "reasoning") for block in sent]
    new = sent[max((index for index, it_is in enumerate(is_ours) if it_is), default=-1) + 1 :]
    calls = {block.get("call_id") or block.get("id"): index for index, block in enumerate(sent) if is_ours[index]}
    results = [block for block in new if "tool_use_id" in block or "call_id" in block]
    results.sort(key=lambda block: calls[block.get("call_id") or block.get("tool_use_id")])
    places = [place(block["words"], prompt) for block in results]
    lost = [block["words"] for block in new if place(block["words"], prompt) < 0]
    return lost or [
        block["words"] for block, here, after in zip(results, places, places[1:], strict=False) if here > after
    ]


def model_of(family: str) -> Renderer:
    file = TEMPLATES / ("real" if family in MODELS else "") / f"{family}.jinja"
    return Renderer(train_tokenizer(file.read_text().removesuffix("\n"), (FAMILIES | MODELS)[family]))


@pytest.mark.parametrize("cli", [claude, codex])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.full] * (name not in IN_EVERY_RUN)) for name in FAMILIES | MODELS]
)
async def test_one_chain(
    open_world: OpenWorld, ledger: Ledger, wire: Wire, tmp_path: Path, family: str, cli: Callable[[str, Path], Cli]
) -> None:
    programs = os.environ.get("AREAL_AGENT_CLIS")
    if programs is None:
        name = cli.__name__
        pytest.skip(f"run examples/cli_agent/fetch.sh {name}@{VERSIONS[name]} DIR and set AREAL_AGENT_CLIS to DIR")
    home, folder = tmp_path / "home", tmp_path / "work"
    for one in (home, folder):
        one.mkdir()
    (folder / "sum.py").write_text("print(1 - 2)\n")
    played, model = cli(wire.url, folder), model_of(family)

    def script(request: GenerateRequest) -> list[int]:
        content, calls = (*played.answers, ("It prints 3.", ()))[len(world.engine.requests)]
        thinking = model.answer_format.thinking
        opened = model.split_opened(model.text_of(request.input_ids, has_ended=False))[1]
        thinks = thinking and (not opened or thinking.is_open(opened))
        text = model.answer_format.format(content, calls, reasoning="Hm." if thinks else None)
        if thinking and opened:
            text = text.removeprefix(thinking.opening)
        return model.ids_of(text + model.end_texts[-1 if calls else 0])

    options: dict[str, Any] = {"model": model, "vocab_size": model.vocab_size, "max_context_tokens": 200_000}
    world = await open_world(script=script, journal=ledger.own, **options)
    wire.gateway = world.url
    agent = await world.start(model_aliases=["*"])
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "KEY": agent.key,  # Codex's; the next is Claude Code's
        "ANTHROPIC_API_KEY": agent.key,
        "HTTP_PROXY": wire.url,
        "HTTPS_PROXY": wire.url,
        "NO_PROXY": "127.0.0.1",
    }
    process = await asyncio.create_subprocess_exec(
        *played.command, env=variables | played.variables, cwd=folder, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    printed, errors = (data.decode() for data in await process.communicate())
    assert wire.refused == []
    assert (process.returncode, printed) == (0, "It prints 3.\n"), errors
    assert (folder / "sum.py").read_text() == "print(1 + 2)\n"
    assert (await agent.reward(reward=1))[0] == 200
    await agent.end()
    trajectory = await ledger.trajectory(agent.id)
    assert trajectory.rewards.total == 1
    prompts = [model.text_of(turn.new_prompt_ids, has_ended=False) for turn in trajectory.turns]
    tools = [tool["name"] for tool in wire.bodies[0]["tools"] if not tool.get("defer_loading")]
    assert [name for name in tools if name not in prompts[0]] == []
    assert [misplaced(body, prompt) for body, prompt in zip(wire.bodies, prompts, strict=True)] == [[]] * 4
    chain = [turn.completions[0].id for turn in trajectory.turns]
    if family not in REWRITING:
        assert [turn.parent for turn in trajectory.turns] == [None, *chain[:-1]]
    reasons = {None} | ({ForkReason.TEMPLATE_STRIPS_THINKING} if family in (*FORGETFUL, "deepseek") else set())
    reasons |= {ForkReason.TEMPLATE_REWRITES_HISTORY} if family in REWRITING else set()
    assert {turn.fork_reason for turn in trajectory.turns} <= reasons
    records = token_records(trajectory)
    assert sum(record.loss_mask.sum() for record in records) == trajectory.num_sampled_tokens > 0
    assert world.gateway.stats().history_mismatches == 0
    assert verify(tmp_path / "ledger.sqlite").violations == ()
