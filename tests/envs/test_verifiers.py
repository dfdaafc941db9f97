"""Environments of verifiers, played by the package itself with a scripted model.

All rollouts run at once. 1. The reward is the rubric's, its functions are named parts; every sampled token is trained;
tools are called. 2. What fails outside the model is `infra`, a full context is not. 3. A rollout that is cancelled
ends. 4. Signals stay ours. 5. What is refused.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_agent import ConfigError, Status, Trajectory
from areal_agent.testing import tool_call
from areal_agent.tokens.records import token_records
from envs.verifiers.tasks import load
from envs.verifiers.workflow import solve
from tests.envs.doors import play_all

pytest.importorskip("verifiers.legacy")

ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset
from pathlib import Path
from tests.envs.doors import CONTEXT, wait_forever

def said(completion):
    return completion[-1]["content"] or ""

def right(completion, answer):
    if said(completion) == "break":
        raise ConnectionError("the judge is away")
    return float(said(completion).endswith(answer))

def chars(completion):
    return len(said(completion))

def ranks(completions):
    return [0.0 for _ in completions]

def load_environment(size: int = 7, fifo: str = "", group: bool = False):
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        if a == 6:
            await wait_forever(Path(fifo))
        return "long " * CONTEXT if a == 4 else str(a + b)

    rows = [{"question": f"{number}+1?", "answer": str(number + 1)} for number in range(size)]
    rubric = vf.Rubric(funcs=[ranks] if group else [right, chars], weights=[1.0] if group else [1.0, 0.0])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=rubric, tools=[add], max_turns=4)
'''
SAID = {
    "0+1?": ["1"],
    "1+1?": [tool_call("add", a=1, b=1), "It is 2"],
    "2+1?": ["no"],
    "3+1?": ["break"],
    "4+1?": [tool_call("add", a=4, b=1), "5"],
    "5+1?": [],
    "6+1?": [tool_call("add", a=6, b=1)],
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module of an environment, as its package would install it."""
    path = tmp_path_factory.mktemp("environment")
    (path / "areal_sums.py").write_text(ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield path


@pytest.fixture(scope="module")
def played(folder: Path) -> list[Trajectory]:
    """What became of the rows, in the order of SAID."""
    os.mkfifo(folder / "fifo")
    args = {"fifo": str(folder / "fifo")}
    tasks = [task for split in ("train", "test") for task in load(split, 0, "areal-sums", {**args, "size": 40})]
    tasks.sort(key=lambda task: task["row"]["example_id"])
    return asyncio.run(play_all(solve, tasks[:7], SAID, folder / "fifo"))


def test_rewards_are_the_rubrics_and_every_sampled_token_is_trained(played: list[Trajectory]) -> None:
    assert [(one.status, one.error) for one in played[:3]] == [(Status.COMPLETED, None)] * 3
    assert [one.rewards.final for one in played[:3]] == [1.0, 1.0, 0.0]
    assert {name: played[1].rewards.parts[name] for name in ("right", "chars")} == {"right": 1.0, "chars": 7.0}
    for one, num_turns in zip(played[:3], (1, 2, 1), strict=True):
        (record,) = token_records(one)
        assert (len(one.turns), int(record.loss_mask.sum())) == (num_turns, one.num_sampled_tokens)


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (3, Status.INFRA, "the judge is away"),
        (4, Status.COMPLETED, "None"),
        (5, Status.INFRA, "no answer is left"),
        (6, Status.CANCELLED, "the run ended first"),
    ],
)
def test_how_a_rollout_ends(played: list[Trajectory], number: int, status: Status, said: str) -> None:
    assert (played[number].status, said in str(played[number].error)) == (status, True), played[number].error


def test_a_full_context_is_scored_by_the_package(played: list[Trajectory]) -> None:
    assert (played[4].rewards.final, len(played[4].turns)) == (0.0, 1)


def test_a_split_has_rows_of_its_own_and_signals_stay_ours() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train, test = (load(split, 0, "areal-sums", {"size": 50}) for split in ("train", "test"))
    assert len(train) + len(test) == 50 and 0 < len(test) < 20
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_is_refused() -> None:
    for name, args, error in (
        ("areal-none", {}, "cannot load 'areal-none'"),
        ("areal-sums", {"sizes": 1}, "unexpected keyword argument 'sizes'"),
        ("areal-sums", {"group": True}, "does not score one rollout by itself"),
    ):
        with pytest.raises(ConfigError, match=error):
            load("train", 0, name, args)
