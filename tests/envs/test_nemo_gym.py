"""A resources server of NeMo Gym, the package's own example with tools that fail, played by a scripted model.

The package asks for Python 3.13; its servers also run on ours. 1. The example's own row is played to its reward, whose
components are named parts; rollouts have sessions of their own. 2. Faults of calls are text. 3. What fails outside the
model is `infra`, and a missing score is no reward. 4. What is refused.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from areal_agent import ConfigError, Status
from areal_agent.testing import play, tool_call
from envs.nemo_gym.tasks import load
from envs.nemo_gym.workflow import solve
from tests.envs.doors import serving

SERVER = """
import asyncio, os, uvicorn
from omegaconf import OmegaConf  # first: nemo_gym moves the folder that both are in to the end of sys.path
from fastapi.responses import JSONResponse
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.judge import JudgeError
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt import app as example

class Counter(example.StatefulCounterResourcesServer):
    def setup_webserver(self):
        app = super().setup_webserver()
        for tool in (self.die, self.sleep, self.boom, self.proxy):
            app.post(f"/{tool.__name__}")(tool)
        return app

    async def die(self):
        os._exit(1)

    async def sleep(self):
        await asyncio.Event().wait()

    async def boom(self):
        raise KeyError("no such shelf")

    async def proxy(self):
        return JSONResponse("nobody is there", status_code=502)

    async def verify(self, request: example.Request, body: example.StatefulCounterVerifyRequest):
        if body.expected_count == -1:
            raise JudgeError("the judge is away")
        judged = (await super().verify(request, body)).model_dump()
        if body.expected_count == -2:
            return {**judged, "reward": None}
        if body.expected_count == -3:
            raise KeyError("a broken verifier")
        return {**judged, "reward_components": {"num_items": len(body.response.output)}}

here = {"host": "127.0.0.1", "port": 1}
server = Counter(
    config=example.StatefulCounterResourcesServerConfig(**here, name="counter", entrypoint="app.py", domain="agent"),
    server_client=ServerClient(head_server_config=BaseServerConfig(**here), global_config_dict=OmegaConf.create({})),
)
app = server.setup_webserver()
server.setup_exception_middleware(app)
uvicorn.run(app, port=0)
"""
ADD = tool_call("increment_counter", count=3)
GET = tool_call("get_counter_value")
FAILING = ("die", "sleep", "boom", "proxy")
ROW = '{"responses_create_params": {"input": "1+1?"}}'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if find_spec("nemo_gym") is None:
        pytest.skip("nemo_gym is not installed")
    with serving(tmp_path_factory.mktemp("server"), SERVER) as url:
        yield url


@pytest.fixture(scope="module")
def task(url: str) -> dict[str, Any]:
    """The first row of the example's own data: the counter starts at 3, and has to be 6."""
    found = find_spec("resources_servers.example_session_state_mgmt")
    assert found and found.submodule_search_locations
    data = Path(found.submodule_search_locations[0]) / "data/example.jsonl"
    task = load("train", 0, url, train=str(data), call_s=1.0)[0]
    tools = [{"type": "function", "name": name, "parameters": {}, "strict": True} for name in FAILING]
    task["row"]["responses_create_params"]["tools"] += tools
    return task


def test_the_example_is_played_to_its_reward(task: dict[str, Any]) -> None:
    right = play(solve, task, ADD, GET, "It is 6.")
    assert (right.status, right.error, right.rewards.final) == (Status.COMPLETED, None, 1.0)
    assert right.rewards.parts["num_items"] == 5.0  # two calls, their results, a message
    assert [one["content"] for one in right.turns[2].request_delta if one["role"] == "tool"] == ['{"count":6}']
    assert play(solve, task, ADD, ADD, "It is 9.").rewards.final == 0.0
    assert play(solve, task | {"max_turns": 1}, ADD).rewards.final == 1.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (tool_call("boom"), "no such shelf"),
        (tool_call("sleep"), "Error: it did not answer within 1 s"),
        (tool_call("verify"), "Error: there is no tool 'verify'"),
    ],
)
def test_faults_of_calls_are_text(task: dict[str, Any], call: str, said: str) -> None:
    trajectory = play(solve, task, call, ADD, "It is 6.")
    assert (trajectory.status, trajectory.error, trajectory.rewards.final) == (Status.COMPLETED, None, 1.0)
    (text,) = [one["content"] for one in trajectory.turns[1].request_delta if one["role"] == "tool"]
    assert said in text


@pytest.mark.parametrize(
    ("row", "answers", "status", "said"),
    [
        ({"expected_count": -1}, ["6"], Status.INFRA, "could not judge the rollout: the judge is away"),
        ({"expected_count": -2}, ["6"], Status.MISSING_REWARD, "gave no reward"),
        ({"expected_count": -3}, ["6"], Status.INFRA, "/verify with 500: "),
        ({"initial_count": "x"}, ["6"], Status.INFRA, "/seed_session with 422: "),
        ({}, [tool_call("proxy"), "6"], Status.INFRA, "/proxy with 502: "),
        ({}, [tool_call("die"), "6"], Status.INFRA, "is gone at http"),  # the last: then there is no server
        ({}, ["6"], Status.INFRA, "is gone at http"),
    ],
)
def test_how_a_rollout_ends(
    task: dict[str, Any], row: dict[str, Any], answers: list[str], status: Status, said: str
) -> None:
    trajectory = play(solve, task | {"row": task["row"] | row}, *answers)
    assert (trajectory.status, said in str(trajectory.error)) == (status, True), trajectory.error


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text, args, message in (
        ("{}", {}, "rows.jsonl:1 is no row of NeMo Gym"),
        (f"{ROW}\n\n[1]", {}, "rows.jsonl:3 is no row"),
        (ROW, {"train": None}, "there is no file for the split 'train'; give train"),
        (ROW, {"train": "no.jsonl"}, "train is 'no.jsonl', which cannot be read"),
        (ROW, {"url": "localhost:1"}, "url is 'localhost:1'"),
        (ROW, {"max_turns": 0}, "max_turns is 0"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load("train", 0, **{"url": "http://x", "train": str(path), **args})
    path.write_text(ROW.replace("{", '{"said": "two\u2028lines", ', 1))  # a line ends with \n alone
    assert len(load("train", 0, url="http://x", train=str(path))) == 1
