"""A teacher that is a server, and the checks of any teacher.

- The embedded engine scores records, at each token's temperature, as the trainer does that loads the folder.
- vLLM's answers are read, and a temperature that it cannot apply is refused.
- Another tokenizer is refused: a token that is missing, has another id, or is cut in another way. So is a folder that
  is none, a tokenizer that cannot be read, and a server that is not there.
- A server that is away is waited for, and in the end the run fails with the remedy; one that refuses is named.
- A server is shown the key of the environment.
- A whole run learns from a server, with groups of one and rewards that are all alike, and says how far it is.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from areal_agent.algorithms.batching import collate, sample_of
from areal_agent.config import Config
from areal_agent.engine.address import KEY_VARIABLE
from areal_agent.engine.scoring import ScoringServer
from areal_agent.errors import ConfigError, EngineRejected, EngineUnreachable
from areal_agent.observe.metrics import read_metrics, step_rows
from areal_agent.run import Run
from areal_agent.run.preflight import check_teacher
from areal_agent.run.teacher import Teacher, open_teacher, require_same_vocabulary
from areal_agent.trainer.model import Policy
from areal_agent.types import TokenRecord
from tests.cluster.conftest import serving
from tests.engine.servers import serving_app
from tests.run.test_run import config, end, train
from tests.trainer.conftest import random_record

CPU = torch.device("cpu")


@pytest.fixture
def records() -> list[TokenRecord]:
    """Three, of which one was sampled at two temperatures and one has nothing to train."""
    rng = np.random.default_rng(0)
    first, second, third = (random_record(rng, f"s{number}", "g", 1.0) for number in range(3))
    is_later = second.loss_mask & (second.turn_index == 1)
    mixed = replace(second, temperatures=np.where(is_later, 0.5, second.temperatures).astype(np.float32))
    return [first, mixed, replace(third, loss_mask=np.zeros_like(third.loss_mask))]


def other_tokenizer(model: Path, folder: Path, change: Any) -> Path:
    """Copy a model with its tokenizer.json changed."""
    shutil.copytree(model, folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    change(told)
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return folder


async def test_a_server_and_a_folder_give_the_same_numbers(small_model, records):
    policy = Policy.load(small_model, CPU)
    samples = [sample_of(one) for one in records]
    with torch.no_grad():
        expected, _ = policy.logprobs_and_entropy(collate(samples, CPU))
    async with serving(small_model) as server:
        scorer = await ScoringServer.connect(server.base_url)
        found = await Teacher(scorer, wait_s=60, note=print).score(records)
        await scorer.aclose()
    assert [len(one) for one in found] == [one.num_loss_tokens for one in samples]
    assert np.concatenate(found) == pytest.approx(expected.numpy(), abs=1e-4)


class Vllm:
    """Scores a token by -id / 10, as vLLM tells it; the first `num_away` answers are failures."""

    def __init__(self, model: Path, num_away: int = 0) -> None:
        self.model, self.num_away = model, num_away
        self.bodies: list[dict[str, Any]] = []

    def serving(self) -> Any:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/inference/v1/generate", self.generate)
        return serving_app(app)

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": "m", "owned_by": "vllm", "root": str(self.model), "max_model_len": 512}
        return web.json_response({"data": [card]})

    async def generate(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        if len(self.bodies) <= self.num_away:
            return web.json_response({"error": {"message": "loading", "code": 503}}, status=503)
        ids = self.bodies[-1]["token_ids"]
        told = [{str(one): {"logprob": -one / 10, "rank": 1, "decoded_token": None}} for one in ids]
        choices = [{"index": 0, "token_ids": [1], "finish_reason": "length"}]
        return web.json_response({"choices": choices, "prompt_logprobs": [None, *told[1:]]})


async def test_a_server_of_vllm_is_asked_in_its_way_and_only_at_temperature_one(small_model, records):
    first = replace(records[0], temperatures=np.ones_like(records[0].temperatures))
    vllm = Vllm(small_model)
    async with vllm.serving() as url:
        scorer = await ScoringServer.connect(url)
        assert await scorer.model() == str(small_model)
        teacher = Teacher(scorer, wait_s=60, note=print)
        (found,) = await teacher.score([first])
        with pytest.raises(ConfigError, match=r"vllm, which scores tokens at temperature 1 only.* at 0.9; set rollout"):
            await teacher.score(records[:1])
        await scorer.aclose()
    assert found == pytest.approx(-first.token_ids[first.loss_mask] / 10)
    assert vllm.bodies[0]["sampling_params"] == {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    assert len(vllm.bodies) == 1


async def test_a_server_that_is_away_is_waited_for(small_model, records):
    first = replace(records[0], temperatures=np.ones_like(records[0].temperatures))
    notes: list[str] = []
    async with Vllm(small_model, num_away=3).serving() as url:
        scorer = await ScoringServer.connect(url)
        (found,) = await Teacher(scorer, wait_s=60, note=notes.append, retry_s=0).score([first])
        await scorer.aclose()
    assert len(found) == first.loss_mask.sum()
    waits, again = notes
    assert waits.startswith("the train step waits up to 60 s for its teacher: ") and "503: loading" in waits
    assert again == f"the teacher at {url} answers again"


async def test_a_server_that_stays_away_ends_the_run_with_the_remedy(small_model, records):
    async with Vllm(small_model).serving() as url:
        scorer = await ScoringServer.connect(url)
    teacher = Teacher(scorer, wait_s=0.01, note=print)
    first = replace(records[0], temperatures=np.ones_like(records[0].temperatures))
    with pytest.raises(EngineUnreachable, match=r"wait_s = 0.01 s: no answer to POST .*; start it again"):
        await teacher.score([first])
    await scorer.aclose()


async def test_a_refusal_names_the_teacher(small_model, records):
    async with serving(small_model, max_context_tokens=8) as server:
        scorer = await ScoringServer.connect(server.base_url)
        with pytest.raises(EngineRejected, match=r"the teacher at http://.* refuses to score [0-9]+ tokens: .*context"):
            await Teacher(scorer, wait_s=60, note=print).score(records[:1])
        await scorer.aclose()


async def test_a_servers_key_is_that_of_the_environment(small_model, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a key")
    async with serving(small_model, key="a key") as server:
        scorer = await ScoringServer.connect(server.base_url)
        assert await scorer.model() == str(small_model)
        await scorer.aclose()


def test_a_tokenizer_that_cannot_be_read_is_refused(small_model, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"tokenizer.json in '{tmp_path}' cannot be read: "):
        require_same_vocabulary(small_model, tmp_path)


def test_another_tokenizer_is_refused(small_model, tmp_path):
    def swap(told: Any) -> None:
        vocabulary = told["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    def rename(told: Any) -> None:
        told["model"]["vocab"]["@@"] = told["model"]["vocab"].pop("~")

    def cut(told: Any) -> None:
        told["model"]["merges"] = []

    for number, (change, reason) in enumerate(
        [
            (swap, "'a' is [0-9]+ in .* and is [0-9]+ there"),
            (rename, "'~' is .* is missing there"),
            (cut, "it cuts 'Naïve"),
        ]
    ):
        other = other_tokenizer(small_model, tmp_path / str(number), change)
        with pytest.raises(ConfigError, match=f"is not that of the policy: {reason}"):
            require_same_vocabulary(small_model, other)
    last = json.loads((small_model / "config.json").read_text())["vocab_size"] - 1
    assert require_same_vocabulary(small_model, small_model)[-1] == last


def taught(tmp_path: Path, policy: Path, **teacher: object) -> Config:
    return config(tmp_path, policy, group_size=1, algorithm={"teacher": teacher}, steps=2)


async def test_a_teacher_that_is_not_there_is_refused_before_anything_starts(small_model, tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm.teacher.model '/nowhere': there is no such folder"):
        check_teacher(taught(tmp_path, small_model, model="/nowhere"))
    (tmp_path / "bare").mkdir()
    shutil.copy(small_model / "config.json", tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"no tokenizer.json in .*bare"):
        check_teacher(taught(tmp_path, small_model, model=str(tmp_path / "bare")))
    async with Vllm(Path("/elsewhere")).serving() as url:
        with pytest.raises(ConfigError, match=r"no tokenizer.json in '/elsewhere'.*set algorithm.teacher.model"):
            async with open_teacher(taught(tmp_path, small_model, url=url), small_model, print):
                pass
    with pytest.raises(ConfigError, match=r"algorithm.teacher.url: no answer"):
        async with open_teacher(taught(tmp_path, small_model, url=url), small_model, print):
            pass


async def play(task: Any, rollout: Any) -> float:
    await rollout.client.chat.completions.create(model=rollout.model, messages=task["messages"])
    return 1.0


@pytest.mark.slow
async def test_a_whole_run_learns_from_a_server(tmp_path, small_model):
    teacher = AutoModelForCausalLM.from_pretrained(small_model)
    torch.manual_seed(1)
    for parameter in teacher.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    teacher.save_pretrained(tmp_path / "teacher")
    shutil.copy(small_model / "tokenizer.json", tmp_path / "teacher")
    async with serving(tmp_path / "teacher", max_context_tokens=256) as server:
        settings = taught(tmp_path, small_model, url=server.base_url)
        async with Run(settings, workflow=play) as run:
            await train(run, 2)
            await end(run)
    rows = step_rows(read_metrics(run.folder.metrics))
    assert [(row["step"], row["trainer/num_updates"], row["reward/mean"]) for row in rows] == [(1, 1, 1.0), (2, 1, 1.0)]
    assert all(row["trainer/distill_kl"] > 0.01 and row["trainer/seconds_teacher"] > 0 for row in rows)
