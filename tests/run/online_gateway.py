"""A gateway that stands alone, with ledger and consumer, before a scripted engine: what trainers elsewhere meet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from areal_agent.engine.fake import FakeEngine
from areal_agent.gateway.app import Gateway
from areal_agent.gateway.online.consumer import Consumer
from areal_agent.gateway.server import ServedGateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.tokens.renderer import Renderer

KEY = "sk-admin"


@dataclass(frozen=True, kw_only=True)
class OnlineSide:
    gateway: Gateway
    served: ServedGateway
    ledger: Ledger


@asynccontextmanager
async def open_online_side(model: Path, ledger_path: Path, answer: str) -> AsyncIterator[OnlineSide]:
    """The engine says `answer` to everything."""
    renderer = Renderer.load(model)
    ledger = await Ledger.open(ledger_path, create=True)
    await ledger.begin_incarnation(None)
    consumer = await Consumer.open(ledger)
    gateway = Gateway(
        sampler=FakeEngine(lambda request: renderer.ids_of(answer)),
        renderer=renderer,
        journal=consumer,
        model_name="model",
        admin_key=KEY,
        max_context_tokens=1000,
        vocab_size=renderer.vocab_size,
        archive=ledger,
        consumer=consumer,
    )
    served = await gateway.serve()
    yield OnlineSide(gateway=gateway, served=served, ledger=ledger)
    await served.aclose()
    await ledger.aclose()


async def play_rewarded(served: ServedGateway, group_id: str, **request: object) -> str:
    """Play one rewarded rollout of one turn; return its session."""
    async with aiohttp.ClientSession(served.base_url) as http:

        async def post(path: str, key: str, **body: object) -> dict[str, str]:
            async with http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        session = await post("/rl/start_session", KEY, task_id="t", group_id=group_id)
        key = session["api_key"]
        question = {"role": "user", "content": "What is 1 + 1?"}
        await post("/v1/chat/completions", key, model="default", messages=[question], **request)
        await post("/rl/set_reward", key, reward=0.1)
        await post("/rl/end_session", key, logged={"n": 1})
        return session["session_id"]
