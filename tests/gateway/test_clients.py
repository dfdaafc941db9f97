"""The official clients with a gateway, the real ledger, and a scripted or the embedded engine:

- chats whole and streamed, several answers, tools, stop texts, raw responses and plain completions, by the asynchronous
  and the synchronous client: each turn continues what it repeats, every exact sampled token is trained once, and
  `ledger verify` finds no error
- both engines: the stream equals the record
- `parse`: a class as the response format gives an object of it, which may be echoed unchanged
- prompt tokens that the embedded engine had in its cache are reported, whole and streamed
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify
from areal_agent.tokens.records import token_records
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Distribution, GenerateRequest, Trajectory, WeightVersion

from .conftest import Agent, OpenAgent, OpenWorld, World

TOOLS: list[Any] = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
ANSWERS = (
    'let me see <tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call><|im_end|>',
    "hello world<|im_end|>",
    '<tool_call>{"name": "python", "arguments": {"code": "<|im_end|>',
)


class Verdict(BaseModel):
    is_right: bool


@pytest.fixture
async def embedded(small_model: Path, open_world: OpenWorld, ledger: Ledger) -> AsyncIterator[World]:
    """Start a gateway before the embedded engine with a random model."""
    async with serving(small_model) as engine:
        info = await engine.info()
        yield await open_world(
            journal=ledger.own,
            engine=engine,
            model=Renderer.load(small_model),
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
            has_grammar=info.has_grammar,
        )


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[HttpEngine]:
    runner = ModelRunner(str(folder), device="cpu", num_slots=8, max_context_tokens=512)
    server = await EngineServer.start(runner, version=WeightVersion(step=3))
    engine = HttpEngine(server.base_url)
    yield engine
    await engine.aclose()
    await server.aclose()


async def play(agent: Agent) -> list[str]:
    """Play an agent that uses many parameters. Return the ids of the answers that continue each other."""
    chat = agent.client.chat.completions
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}]
    ids: list[str] = []
    for number in range(4):
        options = {"model": "model", "messages": messages, "tools": TOOLS, "max_tokens": 12}
        if number % 2:
            message = await streamed(await chat.create(**options, stream=True, stream_options={"include_usage": True}))
        else:
            raw = await chat.with_raw_response.create(**options, logprobs=True, top_logprobs=1)
            assert raw.headers["content-type"] == "application/json"
            reply = raw.parse()
            message = {"id": reply.id} | reply.choices[0].message.model_dump(exclude_none=True)
        ids.append(message.pop("id"))
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in message.get("tool_calls") or ()
        ] or [{"role": "user", "content": f"and {number}?"}]
    await chat.create(model="model", messages=messages, n=2, max_tokens=8, stop=["e", "\n"])
    await chat.create(model="model", messages=messages, tools=TOOLS, tool_choice="required", max_tokens=8, top_p=0.9)
    await agent.client.completions.create(model="model", prompt=["one", "two"], max_tokens=6, temperature=0.7)
    await asyncio.to_thread(ask_synchronously, agent)
    return ids


def ask_synchronously(agent: Agent) -> None:
    with OpenAI(base_url=agent.world.url + "/v1", api_key=agent.key, max_retries=0) as client:
        question: Any = [{"role": "user", "content": "hi"}]
        reply = client.chat.completions.create(model="model", messages=question, max_tokens=8)
        more = [*question, reply.choices[0].message, {"role": "user", "content": "again"}]
        texts = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(model="model", messages=more, stream=True, max_tokens=8)
        ]
        assert len(texts) > 1


async def streamed(stream: AsyncIterator[Any]) -> dict[str, Any]:
    """Put a message together from its chunks, as an agent does."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, Any] = {}
    async for chunk in stream:
        message["id"] = chunk.id
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    piece.index, {"id": piece.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
    return message | ({"tool_calls": list(calls.values())} if calls else {})


async def check(agent: Agent, ledger: Ledger, tmp_path: Path, ids: list[str]) -> None:
    assert (await agent.reward(reward=1))[0] == 200
    assert (await agent.end())[0] == 200
    trajectory = await ledger.trajectory(agent.id)
    parents = {turn.completions[0].id: turn.parent for turn in trajectory.turns}
    assert [parents[one] for one in ids] == [None, *ids[:-1]]
    assert trajectory.undelivered == ()
    assert num_trained(trajectory) == sum(
        len(one.token_ids)
        for turn in trajectory.turns
        for one in turn.completions
        if one.distribution is Distribution.EXACT
    )
    assert verify(tmp_path / "ledger.sqlite").violations == ()


def num_trained(trajectory: Trajectory) -> int:
    return sum(int(record.loss_mask.sum()) for record in token_records(trajectory))


async def test_a_scripted_engine(open_agent: OpenAgent, ledger: Ledger, tmp_path: Path) -> None:
    def script(request: GenerateRequest) -> list[int]:
        return agent.world.ids(ANSWERS[len(request.input_ids) % len(ANSWERS)])

    agent = await open_agent(script=script, journal=ledger.own)
    await check(agent, ledger, tmp_path, await play(agent))


async def test_the_embedded_engine(embedded: World, ledger: Ledger, tmp_path: Path) -> None:
    agent = await embedded.start()
    await check(agent, ledger, tmp_path, await play(agent))


async def test_the_embedded_engine_streams_what_it_records(embedded: World, ledger: Ledger) -> None:
    agent = await embedded.start()
    question: Any = [{"role": "user", "content": "hi"}]
    options = {"model": "model", "messages": question, "seed": 5, "max_tokens": 24}
    told = await streamed(await agent.client.chat.completions.create(**options, stream=True))
    whole = await agent.client.chat.completions.create(**options)
    assert told["content"] == whole.choices[0].message.content
    await agent.end()
    first, second = (turn.completions[0] for turn in (await ledger.trajectory(agent.id)).turns)
    assert first.token_ids == second.token_ids
    assert [span.version for span in first.versions] == [WeightVersion(step=3)]


async def test_the_embedded_engine_answers_in_the_form_of_a_class(
    embedded: World, ledger: Ledger, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    agent, renderer = await embedded.start(), embedded.renderer
    question: Any = [{"role": "user", "content": "is it right?"}]
    spaces = [id for id in range(renderer.vocab_size) if renderer.detokenizer.text_of([id]).isspace()]
    reply = await agent.client.chat.completions.parse(
        model="model",
        messages=question,
        response_format=Verdict,
        logit_bias={str(id): -100 for id in spaces},  # of which JSON takes any number, and a random model gives many
    )
    message = reply.choices[0].message
    assert isinstance(message.parsed, Verdict)
    echo: Any = message.model_dump(exclude_none=True, warnings="none")
    again = await agent.ask([*question, echo, {"role": "user", "content": "sure?"}], max_tokens=4)
    await check(agent, ledger, tmp_path, [reply.id, again.id])


async def test_the_embedded_engine_tells_what_it_had_in_its_cache(embedded: World) -> None:
    agent = await embedded.start()
    first = await agent.ask("hi", max_tokens=4)
    again = await agent.ask("hi", max_tokens=4)
    *_, streamed = [
        chunk
        async for chunk in await agent.ask("hi", max_tokens=4, stream=True, stream_options={"include_usage": True})
    ]
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in (first, again, streamed)]
    assert cached == [0, first.usage.prompt_tokens - 1, first.usage.prompt_tokens - 1]


async def test_a_hang_up_frees_the_embedded_engine(embedded: World, ledger: Ledger) -> None:
    agent = await embedded.start()
    stream = await agent.ask(stream=True, max_tokens=400, logit_bias={"2": -100})
    await anext(aiter(stream))
    await stream.close()
    await agent.end(status="timeout")
    assert embedded.gateway.stats().num_engine_requests == 0
    assert num_trained(await ledger.trajectory(agent.id)) == 0
