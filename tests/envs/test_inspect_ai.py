"""inspect_ai tasks, played by the package's own `eval` with a scripted model.

All rollouts run at once. 1. The reward is the first score, and all scores are named parts; every sampled token is
trained; tools are called. 2. What fails outside the model is `infra`, a full context is not; a first score that says
nothing is no reward. 3. A rollout that is cancelled interrupts its sample. 4. The command `inspect eval` needs no more
than a session. 5. What is refused.
"""

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_agent import ConfigError, Rollout, Status, Trajectory
from areal_agent.testing import play, tool_call
from areal_agent.tokens.records import token_records
from envs.inspect_ai.tasks import load
from envs.inspect_ai.workflow import solve
from tests.envs.doors import CONTEXT, play_all, wait_forever

pytest.importorskip("inspect_ai")
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, mean, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

HERE = f"{__name__}:arithmetic"
SAID = {
    "0+1?": ["1"],
    "1+1?": [tool_call("add", a=1, b=1), "It is 2"],
    "2+1?": ["no"],
    "3+1?": ["unclear"],
    "4+1?": ["nothing"],
    "5+1?": ["break"],
    "6+1?": [tool_call("add", a=6, b=1)],
    "7+1?": [tool_call("add", a=7, b=1), "8"],
    "8+1?": [],
    "9+1?": [tool_call("add", a=9, b=1)],
}


@tool
def add(fifo: str) -> Any:
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One number.
            b: The other.
        """
        if a == 6:
            os._exit(1)
        if a == 9:
            await wait_forever(Path(fifo))
        return "long " * CONTEXT if a == 7 else str(a + b)

    return execute


@scorer(metrics=[accuracy()])
def right() -> Any:
    async def score(state: Any, target: Any) -> Score:
        said = state.output.completion
        if said == "break":
            raise RuntimeError("the judge is away")
        values = {"unclear": "unclear", "nothing": math.nan}
        return Score(value=values.get(said, "C" if said.endswith(target.text) else "I"))

    return score


@scorer(metrics={"*": [mean()]})
def lengths() -> Any:
    async def score(state: Any, target: Any) -> Score:
        return Score(value={"chars": len(state.output.completion), "turns": len(state.messages) // 2})

    return score


@task
def arithmetic(size: int = 10, fifo: str = "") -> Any:
    samples = [Sample(input=f"{number}+1?", target=str(number + 1)) for number in range(size)]
    return Task(dataset=samples, solver=[use_tools(add(fifo)), generate()], scorer=[right(), lengths()])


async def command(given: dict[str, Any], rollout: Rollout) -> float:
    """Return the accuracy that `inspect eval` finds."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "AREAL_BASE_URL": rollout.base_url, "AREAL_API_KEY": rollout.api_key, "PYTHONPATH": paths}
    options = ["-T", "size=1", "--log-dir", given["folder"], "--log-format", "json", "--display", "none"]
    asked = [f"{Path(__file__).name}@arithmetic", "--model", f"openai-api/areal/{rollout.model}", *options]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inspect_ai", "eval", *asked), env=env, cwd=Path(__file__).parent
    )
    assert await process.wait() == 0
    (log,) = await asyncio.to_thread(lambda: Path(given["folder"]).glob("*.json"))
    return json.loads(log.read_text())["results"]["scores"][0]["metrics"]["accuracy"]["value"]


@pytest.fixture(scope="module")
def fifo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fifo") / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def played(fifo: Path) -> list[Trajectory]:
    """What became of the samples, in the order of SAID."""
    return asyncio.run(play_all(solve, load("train", 0, HERE, {"fifo": str(fifo)}), SAID, fifo))


def test_scores_are_rewards_and_every_sampled_token_is_trained(played: list[Trajectory]) -> None:
    assert [(one.status, one.error) for one in played[:3]] == [(Status.COMPLETED, None)] * 3
    assert [one.rewards.final for one in played[:3]] == [1.0, 1.0, 0.0]
    assert played[1].rewards.parts == {"right": 1.0, "lengths/chars": 7.0, "lengths/turns": 2.0}
    for one, num_turns in zip(played[:3], (1, 2, 1), strict=True):
        (record,) = token_records(one)
        assert (len(one.turns), int(record.loss_mask.sum())) == (num_turns, one.num_sampled_tokens)


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (3, Status.MISSING_REWARD, "gave no reward"),
        (4, Status.MISSING_REWARD, "gave no reward"),
        (5, Status.INFRA, "the judge is away"),
        (6, Status.INFRA, "died without an answer"),
        (7, Status.COMPLETED, "None"),
        (8, Status.INFRA, "InternalServerError"),
        (9, Status.CANCELLED, "the run ended first"),
    ],
)
def test_how_a_rollout_ends(played: list[Trajectory], number: int, status: Status, said: str) -> None:
    assert (played[number].status, said in str(played[number].error)) == (status, True), played[number].error


def test_a_full_context_is_scored_by_the_package(played: list[Trajectory]) -> None:
    assert (played[7].rewards.final, len(played[7].turns)) == (0.0, 1)


def test_the_command_needs_no_more_than_a_session(tmp_path: Path) -> None:
    trajectory = play(command, {"folder": str(tmp_path)}, "It is 1")
    assert (trajectory.error, trajectory.rewards.final, len(trajectory.turns)) == (None, 1.0, 1)


def test_a_split_has_samples_of_its_own() -> None:
    train, test = (load(split, 0, HERE, {"size": 50}) for split in ("train", "test"))
    assert len(train) + len(test) == 50 and 0 < len(test) < 20


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("no.such:task", {}, "ModuleNotFoundError.*give MODULE:FUNCTION"),
        (HERE, {"sizes": 1}, "unexpected keyword argument 'sizes'"),
        (f"{__name__}:right", {}, "a function with @task returns"),
    ],
)
def test_what_is_refused(name: str, args: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load("train", 0, name, args)
