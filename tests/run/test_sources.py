"""A run's side of online RL: engines that are not ours, scripted, and a gateway that stands alone.

- The gateway finds out which kind of engine it stands before, and records what that sampled; it asks again where an
  answer breaks off. The trainer gives it weights in its own way.
- A config that names another kind than the server is refused, and so is a server that is no engine.
- A run has one name at gateways, whenever it is resumed. A new run undoes nothing of the one before, and logs in one
  line what it found; a resumed one has nothing to log.
- What agents played with the model's own weights before the first trainer came is leased; after other weights, dropped.
- A batch that does not come while nobody plays is logged once, with the numbers; what is dropped meanwhile is logged
  with its reason, and altered tokens with the remedy. The gateway tells where its ledger is.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_agent.config import Config
from areal_agent.engine.client import HttpEngine
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError
from areal_agent.gateway.__main__ import Standalone, open_standalone, parser
from areal_agent.gateway.server import ServedGateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.online import OnlineGateway
from areal_agent.run.sources import OnlineRollouts, connect_engine, take_over, trainer_name
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import VersionSpan, WeightVersion
from areal_agent.weights.channels import DiskChannel
from areal_agent.weights.push import push
from tests.engine.sglang import scripted as sglang
from tests.engine.vllm import scripted as vllm
from tests.run.online_gateway import KEY, open_online_side, play_rewarded

NEW = WeightVersion(step=4)


@dataclass(frozen=True, kw_only=True)
class Scripted:
    kind: str
    url: str
    server: Any


@pytest.fixture(params=[sglang, vllm], ids=["sglang", "vllm"])
async def engine(request: pytest.FixtureRequest, small_model: Path) -> AsyncIterator[Scripted]:
    module: ModuleType = request.param
    server = module.ScriptedServer(str(small_model))
    async with module.serving(server) as url:
        yield Scripted(kind="sglang" if module is sglang else "vllm", url=url, server=server)


def standalone_at(url: str, tokenizer: Path, ledger: Path) -> AbstractAsyncContextManager[Standalone]:
    words = ["--engine", url, "--tokenizer", str(tokenizer), "--ledger", str(ledger), "--model", "m"]
    return open_standalone(parser().parse_args([*words, "--port", "0", "--group-wait", "0"]), KEY)


async def play(url: str) -> tuple[str, str]:
    """A rollout of one question: its id, and the answer."""
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:

        async def call(path: str, key: str, **body: object) -> Any:
            answer = await http.post(path, headers={"Authorization": f"Bearer {key}"}, json=body)
            return answer.raise_for_status().json()

        session = await call("/rl/start_session", KEY, task_id="t")
        messages = [{"role": "user", "content": "1 + 1?"}]
        answer = await call("/v1/chat/completions", session["api_key"], model="m", messages=messages)
        await call("/rl/set_reward", session["api_key"], reward=1.0)
        await call("/rl/end_session", session["api_key"])
        return session["session_id"], answer["choices"][0]["message"]["content"]


async def test_a_gateway_records_what_it_sampled(engine: Scripted, small_model: Path, tmp_path: Path) -> None:
    ids = Renderer.load(small_model).ids_of("2<|im_end|>")
    engine.server.will_answer(list(ids))
    async with standalone_at(engine.url, small_model, tmp_path / "ledger.sqlite") as standalone:
        session_id, answer = await play(standalone.base_url)
        assert (standalone.backend, answer) == (engine.kind, "2")
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=False)
    (turn,) = (await ledger.trajectory(session_id)).turns
    await ledger.aclose()
    (completion,) = turn.completions
    assert completion.token_ids == tuple(ids)
    assert completion.versions == (VersionSpan(version=sglang.OLD, start=0, end=len(ids)),)


async def test_an_answer_that_breaks_off_is_sampled_again(engine: Scripted, small_model: Path, tmp_path: Path) -> None:
    engine.server.will_answer(list(Renderer.load(small_model).ids_of("2<|im_end|>")))
    engine.server.num_broken = 1
    async with standalone_at(engine.url, small_model, tmp_path / "ledger.sqlite") as standalone:
        assert (await play(standalone.base_url))[1] == "2"
    assert engine.server.num_broken == 0


async def test_a_trainer_gives_it_weights(engine: Scripted, small_model: Path, tmp_path: Path) -> None:
    parameters = dict(AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).named_parameters())
    client = await connect_engine(EngineConfig(url=engine.url))
    await push([client], DiskChannel(tmp_path, torch.float32).write(parameters), NEW)
    assert (await client.info()).weight_version == NEW
    await client.aclose()
    assert engine.server.label == str(NEW)


async def test_a_kind_may_be_named(engine: Scripted) -> None:
    section = {"url": engine.url, "backend": engine.kind}
    config = Config.parse({"engine": section, "rollout": {"gateway_url": "http://127.0.0.1:1"}})
    client = await connect_engine(config.engine)
    await client.aclose()


def test_how_servers_are_started_is_not_the_trainers() -> None:
    section = {"url": "http://127.0.0.1:2", "backend": "sglang", "python": "p"}
    with pytest.raises(ConfigError, match=r"engine\.python has no effect with rollout\.gateway_url"):
        Config.parse({"engine": section, "rollout": {"gateway_url": "http://127.0.0.1:1"}})


async def test_another_kind_than_the_servers_is_refused(engine: Scripted) -> None:
    other = "vllm" if engine.kind == "sglang" else "sglang"
    with pytest.raises(ConfigError, match=f"backend is .{other}., but the engine at engine.url = .* is {engine.kind}"):
        await connect_engine(EngineConfig.model_validate({"url": engine.url, "backend": other}))


async def test_a_model_that_is_not_here_is_named(engine: Scripted, small_model: Path, tmp_path: Path) -> None:
    gone = f"{tmp_path}/gone"
    engine.server.started_with = gone
    if engine.kind == "vllm":
        engine.server.card["root"] = gone
    with pytest.raises(ConfigError, match=r"engine\.url: .*gone.* cannot be read here"):
        await connect_engine(EngineConfig(url=engine.url))
    with pytest.raises(ConfigError, match=r"--engine http://127.*gone.* cannot be read here"):
        async with standalone_at(engine.url, small_model, tmp_path / "ledger.sqlite"):
            pass


async def test_nobody_is_there(unused_tcp_port: int, small_model: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(ConfigError, match=r"engine\.url: no answer"):
        await connect_engine(EngineConfig(url=url))
    with pytest.raises(ConfigError, match=f"--engine {url}: no answer"):
        async with standalone_at(url, small_model, tmp_path / "ledger.sqlite"):
            pass


@pytest.fixture
async def served(small_model: Path, tmp_path: Path) -> AsyncIterator[ServedGateway]:
    async with open_online_side(small_model, tmp_path / "gateway.sqlite", "2<|im_end|>") as side:
        yield side.served


async def publish_as(served: ServedGateway, trainer: str, step: int) -> None:
    """What another run has left behind."""
    client = OnlineGateway(served.base_url, KEY, trainer=trainer)
    await client.publish(step)
    await client.aclose()


async def test_a_run_has_one_name_whenever_it_is_resumed(tmp_path: Path) -> None:
    names: list[str] = []
    for run in ("a", "a", "b"):
        ledger = await Ledger.open(tmp_path / run, create=True)
        names.append(await trainer_name(ledger))
        await ledger.aclose()
    assert names[0] == names[1] != names[2]


async def test_a_new_run_says_what_it_found(served: ServedGateway, caplog: pytest.LogCaptureFixture) -> None:
    await publish_as(served, "run-a", 7)
    client = OnlineGateway(served.base_url, KEY, trainer="run-b")
    await take_over(client, "run-b", 0, WeightVersion())
    state = (await client.status()).state
    await client.aclose()
    assert (state.trainer, state.published) == ("run-b", 0)
    (line,) = caplog.messages
    assert "trainer run-a up to step 7: what was trained stays trained" in line


async def test_a_resumed_run_has_nothing_to_say(served: ServedGateway, caplog: pytest.LogCaptureFixture) -> None:
    await publish_as(served, "run-a", 7)
    client = OnlineGateway(served.base_url, KEY, trainer="run-a")
    await take_over(client, "run-a", 7, WeightVersion())
    await client.aclose()
    assert caplog.messages == []


async def lease_at_first(served: ServedGateway, engine_served: WeightVersion) -> tuple[list[str], dict[str, int]]:
    """Return what a new run leases of one rollout that was played before it came, and what was dropped."""
    await play_rewarded(served, "before")
    client = OnlineGateway(served.base_url, KEY, trainer="run-a")
    await take_over(client, "run-a", 0, engine_served)
    await client.publish(0, incarnation=1, batch_answers=1, max_staleness=0)
    batch, state = await client.lease(1, num_groups=1)
    await client.aclose()
    return [group.group_id for group in batch.groups] if batch else [], dict(state.drops)


async def test_what_was_played_before_the_first_trainer_is_trained(served: ServedGateway) -> None:
    assert await lease_at_first(served, WeightVersion()) == (["before"], {})


async def test_what_an_engine_of_others_weights_sampled_is_stale(served: ServedGateway) -> None:
    assert await lease_at_first(served, WeightVersion(incarnation=1)) == ([], {"stale": 1})


@dataclass(kw_only=True)
class Waiting:
    """A run that waits for its first batch, and what it tells."""

    rollouts: OnlineRollouts
    told: "asyncio.Queue[str]"

    async def line(self) -> str:
        """Ask for a batch until something is told."""
        taking = asyncio.create_task(self.rollouts.take(1))
        line = await self.told.get()
        for _ in range(3):  # the run asks on meanwhile
            await self.rollouts.gateway.status()
        taking.cancel()
        await asyncio.wait({taking})
        return line


@pytest.fixture
async def waiting(served: ServedGateway) -> AsyncIterator[Waiting]:
    told = asyncio.Queue[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.put_nowait(record.getMessage())

    values = {"batch_size": 2, "group_size": 4, "max_staleness": 0, "engine": {"url": "http://127.0.0.1:1"}}
    config = Config.parse(values | {"rollout": {"gateway_url": served.base_url}})
    client = OnlineGateway(served.base_url, KEY, trainer="run-a")
    rollouts = OnlineRollouts(
        config=config, engine=HttpEngine("http://127.0.0.1:1"), gateway=client, step=0, lease_wait_s=0.0
    )
    await rollouts.publish(WeightVersion())
    listener = Listener()
    logging.getLogger("areal_agent.run.sources").addHandler(listener)
    yield Waiting(rollouts=rollouts, told=told)
    logging.getLogger("areal_agent.run.sources").removeHandler(listener)
    await client.aclose()
    await rollouts.engine.aclose()


async def test_a_batch_that_does_not_come_is_told_once(waiting: Waiting) -> None:
    assert "0 answers wait there, and 8 more may start; a step takes 2 groups of 4" in await waiting.line()
    assert waiting.told.empty()


async def test_what_is_dropped_while_a_run_waits_is_told_with_the_remedy(
    waiting: Waiting, served: ServedGateway
) -> None:
    for group_id in ("a", "b"):
        await play_rewarded(served, group_id, top_p=0.5)
    line = await waiting.line()
    assert "no batch for step 1 yet; the gateway dropped rollouts: 2 altered" in line
    assert "rollout.sampling_override=true" in line


async def test_the_ledger_of_an_online_run_is_its_gateways(waiting: Waiting, tmp_path: Path) -> None:
    await waiting.rollouts.stats()
    assert waiting.rollouts.ledger_elsewhere == str((tmp_path / "gateway.sqlite").resolve())
