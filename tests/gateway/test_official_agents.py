"""The official clients, each as a process of its own with a served gateway and the real ledger:

- openai 2 and 3 (chat completions; responses, by input and by previous id), anthropic, and openai-agents in its default
  call tools, one and two at once, whole and streamed: one chain, every sampled token is trained, the ledger verifies

openai 3, anthropic and openai-agents are in the environment that `make_environment.sh` makes; without it they skip.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.tokens.records import token_records
from areal_agent.types import GenerateRequest

from .conftest import OpenAgent

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
ANSWERS = (
    "<think>\nRome, then.\n</think>\n\n" + CALL % "Rome" + "<|im_end|>",
    "12 °C in Rome.\n<|im_end|>",
    "Both:\n" + CALL % "Oslo" + "\n" + CALL % "Bern" + "<|im_end|>",
    "<think>\nCompare.\n</think>\n\nEqual.<|im_end|>",
)
NEWEST = os.environ.get("AREAL_AGENT_CLIENTS_PYTHON")
OPENAI = ("openai_chat", "openai_responses", "openai_responses_by_id")
CLIENTS = [("ours", name) for name in OPENAI] + [
    ("newest", name) for name in (*OPENAI, "anthropic_messages", "openai_agents")
]


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=True)
    yield ledger
    await ledger.aclose()


@pytest.mark.parametrize(("environment", "name"), CLIENTS)
async def test_one_chain(open_agent: OpenAgent, ledger: Ledger, tmp_path: Path, environment: str, name: str) -> None:
    python = sys.executable if environment == "ours" else NEWEST
    if python is None:
        pytest.skip("set AREAL_AGENT_CLIENTS_PYTHON to the Python of tests/gateway/make_environment.sh")

    def script(request: GenerateRequest) -> list[int]:
        text = agent.world.renderer.detokenizer.text_of(request.input_ids)
        return agent.world.ids(ANSWERS[text.count("assistant\n") - 1])

    agent = await open_agent(script=script, journal=ledger.own, max_context_tokens=4000)
    program = Path(__file__).with_name("official_agents.py")
    process = await asyncio.create_subprocess_exec(
        python, program, name, f"{agent.world.url}/v1", agent.key, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert (process.returncode, output.decode()) == (0, "Equal.\n")
    await agent.reward(reward=1)
    await agent.end()
    trajectory = await ledger.trajectory(agent.id)
    chain = [turn.completions[0].id for turn in trajectory.turns]
    assert [turn.parent for turn in trajectory.turns] == [None, *chain[:-1]]
    assert [turn.fork_reason for turn in trajectory.turns] == [None] * len(ANSWERS)
    [record] = token_records(trajectory)
    assert record.loss_mask.sum() == trajectory.num_sampled_tokens > 0
    assert verify(tmp_path / "ledger.sqlite").violations == ()
