"""A taskset of verifiers with a harness of its own, run by the package itself with a scripted model.

1. The rewards are named parts and their weighted sum is the reward; every sampled token is trained. 2. What fails
outside the model is `infra`. 3. A rollout that is cancelled ends. 4. What is refused.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_agent import ConfigError, Status, Trajectory
from areal_agent.tokens.records import token_records
from envs.verifiers.tasksets import load, solve
from tests.envs.doors import play_all

pytest.importorskip("verifiers.v1")

TASKSET = '''
import sys
from pathlib import Path
import verifiers.v1 as vf
from tests.envs.doors import wait_forever

PROGRAM = """
import json, sys, urllib.request
url, key, model, messages = *sys.argv[1:4], [{"role": "user", "content": sys.argv[4]}]
while True:
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    if said != "more":
        break
    more = "Go on." * (8000 if messages[0]["content"] == "4+1?" else 1)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
"""

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    async def setup(self, *given):
        if self.data.answer == "6":
            await wait_forever(Path(FIFO))

    @vf.reward(weight=1.0)
    async def right(self, trace):
        if trace.last_reply == "break":
            raise ConnectionError("the judge is away")
        return float(trace.last_reply.endswith(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace):
        return float(len(trace.last_reply) < 3)

class Config(vf.TasksetConfig):
    size: int = 6

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for a in range(self.config.size):
            yield Sum(Data(idx=a, prompt=f"{a}+1?", answer=str(a + 1)), self.config.task)

class Program(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        return await runtime.run_program([sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt], {})

__all__ = ["Sums", "Program"]
'''
SAID = {"0+1?": ["more", "1"], "1+1?": ["three"], "2+1?": ["break"], "3+1?": [], "4+1?": ["more"], "5+1?": []}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module of a taskset, as its package would install it."""
    path = tmp_path_factory.mktemp("taskset")
    (path / "areal_taskset.py").write_text(TASKSET.replace("FIFO", repr(str(path / "fifo"))))
    os.mkfifo(path / "fifo")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield path


def env(**taskset: Any) -> dict[str, Any]:
    return {"taskset": {"id": "areal-taskset", **taskset}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(scope="module")
def played(folder: Path) -> list[Trajectory]:
    """What became of the tasks, in the order of SAID."""
    tasks = [{"env": env(), "number": number} for number in range(len(SAID))]
    return asyncio.run(play_all(solve, tasks, SAID, folder / "fifo"))


def test_rewards_are_the_tasks_and_every_sampled_token_is_trained(played: list[Trajectory]) -> None:
    assert [(one.status, one.error) for one in played[:2]] == [(Status.COMPLETED, None)] * 2
    assert [one.rewards.final for one in played[:2]] == [1.5, 0.0]
    assert played[0].rewards.parts == {"right": 1.0, "short": 1.0}
    (record,) = token_records(played[0])
    assert (len(played[0].turns), int(record.loss_mask.sum())) == (2, played[0].num_sampled_tokens)
    assert played[0].logged["stop"] == "agent_completed"


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (2, Status.INFRA, "the judge is away"),
        (3, Status.INFRA, "could not finish the rollout"),
        (4, Status.COMPLETED, "None"),
        (5, Status.CANCELLED, "the run ended first"),
    ],
)
def test_how_a_rollout_ends(played: list[Trajectory], number: int, status: Status, said: str) -> None:
    assert (played[number].status, said in str(played[number].error)) == (status, True), played[number].error


def test_a_full_context_is_scored_by_the_package(played: list[Trajectory]) -> None:
    assert (played[4].rewards.final, played[4].logged["stop"], len(played[4].turns)) == (0.0, "context_length", 1)


def test_a_split_has_tasks_of_its_own() -> None:
    train, test = (load(split, 0, env(size=50)) for split in ("train", "test"))
    assert len(train) + len(test) == 50 and 0 < len(test) < 20
    assert {one["number"] for one in train}.isdisjoint(one["number"] for one in test)


def test_what_is_refused() -> None:
    for given, error in (
        ({"taskset": {"id": "areal-none"}}, "cannot load .*areal-none"),
        (env(sizes=1), "cannot load .*sizes"),
        ({"id": "user-sim", "taskset": env()["taskset"]}, "has the agents"),
    ):
        with pytest.raises(ConfigError, match=error):
            load("train", 0, given)
