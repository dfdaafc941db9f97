"""The workflows of docs/frameworks.md, each in a process and environment of its own (those of our openai in this
process), with a served gateway, a scripted engine and the real ledger:

- tool results come back, it gets the last answer, it makes as many chains as the page says, for the reasons said there,
  every sampled token is trained, and the ledger verifies
- the page's table names every section, with the versions that are tried
"""

import asyncio
import gc
import json
import os
import re
import runpy
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.tokens.records import token_records
from tests.gateway.conftest import Agent, OpenAgent

from .environments import ENVIRONMENTS, Environment
from .play import Rollout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
PROGRAMS = dict(re.findall(r"^## ([\w-]+)\n(?:(?!^## )[^\n]*\n)*?```python\n(.*?)^```$", PAGE, re.M | re.S))
ROWS = {name: row for row, name in re.findall(r"^(\| \[([\w-]+)\]\(#.*)$", PAGE, re.M)}

TASK = {"questions": ["Weather in Rome?", "And in Oslo and Bern?"], "answer": "Equal."}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
ANSWERS = (
    "<think>\nRome, then.\n</think>\n\n" + CALL % "Rome" + "<|im_end|>",
    "Twelve.\n<|im_end|>",
    "Both:\n" + CALL % "Oslo" + "\n" + CALL % "Bern" + "<|im_end|>",
    "<think>\nCompare.\n</think>\n\nEqual.<|im_end|>",
)
HANDOFF = '<tool_call>\n{"name": "transfer_to_forecaster", "arguments": {}}\n</tool_call><|im_end|>'
FINAL = '\n{"name": "final_answer", "arguments": {"answer": "%s"}}\n</tool_call><|im_end|>'
REPORT = '{"city": "%s", "text": "%s"}'
OBJECT = " %s}\n</tool_call><|im_end|>"
OTHER_ANSWERS = {
    "openai-agents-handoff": (HANDOFF, *ANSWERS),
    "smolagents": (
        "Rome, then.\n<code>\nprint(weather('Rome'))\n</code><|im_end|>",
        "<code>\nfinal_answer('Twelve.')\n</code><|im_end|>",
        "Both:\n<code>\nprint(weather('Oslo'), weather('Bern'))\n</code><|im_end|>",
        "<code>\nfinal_answer('Equal.')\n</code><|im_end|>",
    ),
    "smolagents-tools": (  # a call is forced: its opening is in the prompt
        ANSWERS[0].partition("<tool_call>")[2],
        FINAL % "Twelve.",
        ANSWERS[2].partition("<tool_call>")[2],
        FINAL % "Equal.",
    ),
    "instructor": (  # so is its name
        OBJECT % REPORT % ("Rome", "warm"),
        OBJECT % REPORT % ("Rome", "12 °C in Rome"),
        OBJECT % f'{{"tasks": [{REPORT}, {REPORT}]}}' % ("Oslo", "12 °C in Oslo", "Bern", "12 °C in Bern"),
    ),
}
"""For workflows that ask the model for something else: what it says there."""
RESULTS = ("12 °C in Rome", "12 °C in Oslo", "12 °C in Bern")
OTHER_RESULTS = {"instructor": RESULTS[:1]}  # only a wrong report is sent back
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}


Solve = Callable[[Path, Agent], Awaitable[str]]  # a workflow's file, solved for an agent; returns what it printed
WORKFLOWS = [
    pytest.param(environment, name, id=name, marks=pytest.mark.full if environment.is_full else pytest.mark.slow)
    for environment in ENVIRONMENTS
    for name in environment.frameworks
]


@pytest.mark.parametrize(("environment", "name"), WORKFLOWS)
async def test_a_workflow(
    open_agent: OpenAgent, ledger: Ledger, tmp_path: Path, environment: Environment, name: str
) -> None:
    if not environment.is_made:
        pytest.skip(f"there is no environment with {name}: tests/clients/run {name} makes it")

    async def solve(workflow: Path, agent: Agent) -> str:
        process = await asyncio.create_subprocess_exec(
            *(environment.python, Path(__file__).with_name("play.py"), workflow, json.dumps(TASK)),
            *(f"{agent.world.url}/v1", agent.key, "default"),
            env=os.environ | OFFLINE,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        return output.decode()

    await play(name, solve, open_agent, ledger, tmp_path)


@pytest.mark.parametrize("name", ["openai", "openai-responses", "openai-by-id"])
async def test_with_the_openai_installed_here(open_agent: OpenAgent, ledger: Ledger, tmp_path: Path, name: str) -> None:
    async def solve(workflow: Path, agent: Agent) -> str:
        rollout = Rollout(f"{agent.world.url}/v1", agent.key, "default")
        answer, before = str(await runpy.run_path(str(workflow))["solve"](TASK, rollout)), asyncio.all_tasks()
        gc.collect()  # openai's client closes itself then, in a task: the page's workflows leave it to that
        await asyncio.gather(*(asyncio.all_tasks() - before))
        return answer

    await play(name, solve, open_agent, ledger, tmp_path)


async def play(name: str, solve: Solve, open_agent: OpenAgent, ledger: Ledger, tmp_path: Path) -> None:
    answers = OTHER_ANSWERS.get(name, ANSWERS)
    agent = await open_agent(*answers, journal=ledger.own, max_context_tokens=32000)
    workflow = tmp_path / "workflow.py"
    workflow.write_text(PROGRAMS[name])
    assert (await solve(workflow, agent)).split()[-1:] == ["1.0"]
    await agent.reward(reward=1)
    await agent.end()
    prompts = [agent.world.renderer.detokenizer.text_of(one.input_ids) for one in agent.world.engine.requests]
    results = OTHER_RESULTS.get(name, RESULTS)
    assert [result for result in results if not any(result in prompt for prompt in prompts)] == []
    trajectory = await ledger.trajectory(agent.id)
    assert len(trajectory.turns) == len(answers)
    forks = [str(turn.fork_reason) for turn in trajectory.turns if turn.fork_reason is not None]
    records = token_records(trajectory)
    assert (len(records), forks) == chains_of(name)
    assert sum(record.loss_mask.sum() for record in records) == trajectory.num_sampled_tokens > 0
    assert verify(tmp_path / "ledger.sqlite").violations == ()


def chains_of(name: str) -> tuple[int, list[str]]:
    """Return what the page's table says: the number of chains, and why each turn that begins one did not continue."""
    num_chains, *reasons = re.findall(r"\w+", ROWS[name].split("|")[-2])
    return int(num_chains), reasons


def test_the_table_names_every_section_and_its_versions() -> None:
    pins = {name: environment.packages for environment in ENVIRONMENTS for name in environment.frameworks}
    assert ROWS.keys() == PROGRAMS.keys() == pins.keys()
    ours = (ROOT / "constraints.txt").read_text().split()
    for name, packages in pins.items():
        named = [one.strip().replace(" ", "==") for one in ROWS[name].split("|")[2].split(",")]
        assert [one for one in named if one not in {re.sub(r"\[.*\]", "", pin) for pin in (*packages, *ours)}] == []
