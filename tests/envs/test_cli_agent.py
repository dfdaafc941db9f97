"""The CLI agent's example: the real Codex in a container without a network, before a real gateway and ledger (slow).

1. A scripted model solves the task by Codex's tools: reward 1, one chain of exact tokens, the ledger verifies; 2. an
episode whose context is full is judged as it is; 3. one whose engine fails has the status `infra`; 4. with the
example's config, one train step of a random model with a context of 32,768 tokens is done (full).

They skip without Docker, or without the image that `examples/cli_agent/make_image.sh` makes.
"""

import json
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from areal_agent.errors import SandboxError
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.models.recipe import RECIPE, train_tokenizer
from areal_agent.models.tiny import make_model
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.tokens.records import token_records
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Status, Trajectory
from envs.terminal.tasks import load
from examples.cli_agent.workflow import solve
from sandboxes.containers.engine import Engine
from tests.commands import run
from tests.envs.stage import END, open_stage, told
from tests.gateway.conftest import TEMPLATE

pytestmark = pytest.mark.slow

EXAMPLE = Path("examples/cli_agent")
IMAGE = "areal-agent-codex:0.171.0"
CONTEXT = 32768


@pytest.fixture(autouse=True)
async def _image() -> None:
    try:
        async with aclosing(await Engine.connect()) as engine:
            if await engine.find_image(IMAGE) is None:
                pytest.skip(f"there is no image {IMAGE}: run {EXAMPLE}/make_image.sh, which needs npm")
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a Qwen3 with random weights, room for Codex's prompt, and a template that tells of the tools."""
    folder = tmp_path_factory.mktemp("random_model")
    tokenizer = train_tokenizer((path.read_text() for path in Path("docs").glob("*.md")), vocab_size=2000)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    recipe = replace(RECIPE, hidden_size=32, intermediate_size=64, num_heads=2, head_dim=16, max_context_tokens=CONTEXT)
    torch.manual_seed(0)
    make_model(tokenizer, recipe).save_pretrained(folder)
    return folder


async def played(model: Path, ledger_path: Path, *texts: str, context: int = CONTEXT) -> Trajectory:
    """One episode in which the model says these texts."""
    [task] = load("train", 0, 1, folder=str(EXAMPLE / "tasks"))
    async with (
        aclosing(await Ledger.open(ledger_path, create=True)) as ledger,
        open_stage(Renderer.load(model), task, ledger=ledger, max_context_tokens=context) as play,
    ):
        trajectory = await play(solve, *texts, backend="docker", timeout_s=300.0, max_tokens=2000)
    assert verify(ledger_path).violations == ()
    return trajectory


def exec_command(cmd: str) -> str:
    """A call of Codex's tool that runs a command."""
    call = json.dumps({"name": "exec_command", "arguments": {"cmd": cmd}})
    return f"<tool_call>\n{call}\n</tool_call>{END}"


async def test_a_scripted_model_solves_the_task_by_codex(random_model: Path, tmp_path: Path) -> None:
    solution = (EXAMPLE / "tasks/roman/solution/solve.sh").read_text()
    texts = (exec_command("cat roman.py"), exec_command(solution), exec_command("python3 roman.py 1994"), f"Done.{END}")
    trajectory = await played(random_model, tmp_path / "ledger.sqlite", *texts)
    assert (trajectory.status, trajectory.rewards.final) == (Status.COMPLETED, 1.0), trajectory
    read, written, printed = told(trajectory)
    assert "raise NotImplementedError" in read
    assert "Process exited with code 0" in written
    assert printed.endswith("MCMXCIV\n")
    assert trajectory.turns[0].parent is None
    for before, after in pairwise(trajectory.turns):
        assert (after.parent, after.fork_reason) == (before.completions[0].id, None)
    [record] = token_records(trajectory)
    assert record.loss_mask.sum() == trajectory.num_sampled_tokens > 0
    assert trajectory.logged["codex"] == "ok"


async def test_a_context_that_is_full_ends_the_episode(random_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    trajectory = await played(random_model, path, exec_command("seq 3000"), context=9_500)
    assert (trajectory.status, trajectory.rewards.final, len(trajectory.turns)) == (Status.COMPLETED, 0.0, 1)
    assert "ran out of room" in trajectory.logged["printed"]


async def test_an_engine_that_fails_is_not_the_models_fault(random_model: Path, tmp_path: Path) -> None:
    trajectory = await played(random_model, tmp_path / "ledger.sqlite", exec_command("true"))
    assert (trajectory.status, len(trajectory.turns)) == (Status.INFRA, 1)


@pytest.mark.full
def test_one_train_step(random_model: Path, tmp_path: Path) -> None:
    small = (
        f"model={random_model}", f"run_dir={tmp_path / 'run'}", "steps=1", "batch_size=1", "group_size=2",
        "rollout.max_concurrent=2", "rollout.max_tokens=64", "engine.max_running_requests=2", "eval.num_tasks=0",
        "algorithm.advantage=examples.custom_loss.loss:against_half",  # all rewards are 0: a group's would be too
    )  # fmt: skip
    done = run("areal_agent.train", "--config", str(EXAMPLE / "cli_agent.yaml"), *small)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 1), summary
    [row] = step_rows(read_metrics(tmp_path / "run/metrics.jsonl"))
    assert row["trainer/grad_norm"] > 0
    assert verify(tmp_path / "run/ledger.sqlite").violations == ()
