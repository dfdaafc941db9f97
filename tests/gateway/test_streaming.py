"""Streamed chat completions, by the official client:

- tokens are sent as they are sampled: the role, then content, and the finish reason when the journal has the turn
- the usage chunk comes last, and only when asked for; answers to one request are told apart by their index
- reasoning is sent in pieces, a tool call whole, a malformed one as text; a later request repeats what was streamed
- while a call is held back, and before the first token, events that mean nothing new leave, in every protocol
- text is held back only where it may be a stop text or the beginning of a character
- log-probabilities and token ids are sent with their text and add up to those of the record
- a client that hangs up stops the engine: what was sampled is recorded, and masked; if it hangs up after a whole call,
  the answer ends there, and a request that continues it makes it delivered, also if only the stream's end was lost
- a failure in the middle, or the end of the session, is an event; before the first token it is a status, for a while
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from areal_agent.engine.fake import Operation
from areal_agent.errors import EngineRejected, EngineUnreachable
from areal_agent.gateway.bodies import Limits
from areal_agent.tokens.records import token_records
from areal_agent.types import FinishReason

from .conftest import QUESTION, Agent, OpenAgent, OpenWorld, World
from .raw import address

TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'


async def whole(stream: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in stream]


def step_to_the_end(world: World) -> None:
    """Sample token by token."""
    while world.engine.step(1):
        pass


async def next_content(stream: AsyncIterator[Any]) -> str:
    """Return the next text that is sent."""
    while True:
        delta = (await anext(stream)).choices[0].delta
        if delta.content:
            return delta.content


async def test_tokens_leave_as_they_are_sampled(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc<|im_end|>", is_stepped=True)
    asking = await agent.under_way(agent.ask(stream=True), 1)
    stream = aiter(await asking)
    first = await anext(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert await next_content(stream) == "a"
    for letter in "bc":
        agent.world.engine.step(1)
        assert await next_content(stream) == letter
    agent.world.engine.step(1)
    last = await anext(stream)
    assert last.choices[0].finish_reason == "stop"
    assert last.id == first.id == agent.turns[0].completions[0].id
    assert await whole(stream) == []


async def test_the_turn_is_in_the_journal_before_the_finish(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc<|im_end|>")
    agent.world.journal.may_write.clear()
    stream = aiter(await agent.ask(stream=True))
    assert [await next_content(stream) for _ in "abc"] == ["a", "b", "c"]
    await agent.world.journal.is_writing.wait()
    finish = asyncio.ensure_future(anext(stream))
    assert (await agent.reward(reward=1))[0] == 200  # time enough for a chunk
    assert not finish.done()
    agent.world.journal.may_write.set()
    assert (await finish).choices[0].finish_reason == "stop"


async def test_usage_comes_last_when_asked_for(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc<|im_end|>", "abc<|im_end|>")
    *chunks, last = await whole(await agent.ask(stream=True, stream_options={"include_usage": True}))
    assert last.choices == []
    assert last.usage.completion_tokens == len(agent.world.ids("abc<|im_end|>"))
    assert last.usage.prompt_tokens == len(agent.world.engine.requests[0].input_ids)
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in await whole(await agent.ask(stream=True)))


async def test_answers_are_told_apart_by_their_index(open_agent: OpenAgent) -> None:
    agent = await open_agent("ab<|im_end|>", "cd<|im_end|>", is_stepped=True)
    asking = await agent.under_way(agent.ask(stream=True, n=2), num_requests=2)
    for _ in range(3):
        agent.world.engine.step(1)
    stream = await asking
    texts, ends = {0: "", 1: ""}, {}
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert sorted(texts.values()) == ["ab", "cd"]
    assert ends == {0: "stop", 1: "stop"}
    assert [one.id for one in agent.turns[0].completions] == [f"{chunk.id}-0", f"{chunk.id}-1"]


async def test_reasoning_leaves_in_pieces_and_a_call_whole(open_agent: OpenAgent) -> None:
    agent = await open_agent(
        f"<think>\nwell, so\n</think>\n\nhm {CALL}{CALL}<|im_end|>", "done<|im_end|>", is_stepped=True
    )
    asking = await agent.under_way(agent.ask(QUESTION, stream=True, tools=TOOLS))
    step_to_the_end(agent.world)
    chunks = await whole(await asking)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")]
    assert "".join(reasoning) == "well, so"
    assert len(reasoning) > 1
    assert "".join(delta.content or "" for delta in deltas) == "hm"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    calls = [call.model_dump() for delta in deltas for call in delta.tool_calls or []]
    assert [call.pop("index") for call in calls] == [0, 1]
    assert [call["function"] for call in calls] == [{"name": "python", "arguments": '{"code": "1"}'}] * 2
    ids = {call["id"] for call in calls}
    assert len(ids) == 2
    echo = {"role": "assistant", "content": "hm", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
    again = asyncio.create_task(agent.ask([*QUESTION, echo, *results], tools=TOOLS))
    await agent.world.engine.wait_for_requests(2)
    agent.world.engine.step(100)
    await again
    assert agent.turns[1].parent == agent.turns[0].completions[0].id


@pytest.mark.parametrize("rest", [", oops</tool_call>", "}", ""])
async def test_a_malformed_call_is_text(open_agent: OpenAgent, rest: str) -> None:
    malformed = f'<tool_call>{{"name": "python", "arguments": {{"code": "1"}}{rest}'
    agent = await open_agent(f"{malformed}<|im_end|>", "b<|im_end|>")
    chunks = await whole(await agent.ask(QUESTION, tools=TOOLS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == malformed
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert agent.world.gateway.stats().malformed_tool_calls == 1
    more = [*QUESTION, {"role": "assistant", "content": malformed}, {"role": "user", "content": "?"}]
    await agent.ask(more, tools=TOOLS)
    assert agent.turns[1].parent == agent.turns[0].completions[0].id


async def test_a_stream_that_holds_a_call_back_says_that_it_is_alive(open_world: OpenWorld) -> None:
    world = await open_world(*[f"{CALL}<|im_end|>"] * 2, is_stepped=True, limits=Limits(keep_alive_s=0.1))
    watched, patient = await world.start(), await world.start()
    asking = asyncio.create_task(patient.ask(tools=TOOLS, stream=True, timeout=httpx.Timeout(5, read=1)))
    question = {"model": "model", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True}
    body = json.dumps(question).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {watched.key}\r\n"
    reader, writer = await asyncio.open_connection(*address(world.url))
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await world.engine.wait_for_requests(2)
    world.engine.step(3)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    for _ in range(15):  # longer than the other client waits for a byte
        assert b'"tool_calls"' not in await reader.readuntil(b'"delta":{}')
    step_to_the_end(world)
    rest = await reader.readuntil(b"[DONE]")
    assert rest.count(b'"tool_calls":[') == 1
    (delta,) = [delta for chunk in await whole(await asking) if (delta := chunk.choices[0].delta).tool_calls]
    assert delta.tool_calls[0].function.arguments == '{"code": "1"}'
    writer.close()


@pytest.mark.parametrize(
    ("path", "asked", "idle"),
    [
        ("chat/completions", {"messages": QUESTION}, b'"delta":{}'),
        ("completions", {"prompt": "x"}, b'"text":""'),
        ("messages", {"messages": QUESTION, "max_tokens": 9}, b'event: ping\ndata: {"type":"ping"}'),
        ("responses", {"input": "x"}, b"event: response.in_progress"),
    ],
)
async def test_a_stream_begins_without_a_token(open_world: OpenWorld, path: str, asked: Any, idle: bytes) -> None:
    world = await open_world("a<|im_end|>", is_stepped=True, limits=Limits(keep_alive_s=0.05))
    agent = await world.start()
    headers = {"Authorization": f"Bearer {agent.key}"}
    body = {"model": "model", "stream": True, **asked}
    async with world.http.post(f"{world.url}/v1/{path}", json=body, headers=headers) as reply:
        assert reply.status == 200
        text = b""
        while text.count(idle) < 3:
            text += await reply.content.readline()
        assert world.engine.num_in_flight == 1
        step_to_the_end(world)
        assert b'"a"' in await reply.content.read()


async def test_only_what_may_be_a_stop_text_is_held_back(open_agent: OpenAgent) -> None:
    agent = await open_agent("aQbé", is_stepped=True)
    asking = await agent.under_way(agent.ask(stream=True, stop="QQ", max_tokens=100))
    contents = list[str]()
    agent.world.engine.step(1)
    stream = aiter(await asking)
    for _ in range(len(agent.world.ids("Qb"))):
        agent.world.engine.step(1)
    for _ in range(2):
        contents.append(await next_content(stream))
    assert "".join(contents) == "aQb"
    agent.world.engine.step(100)
    assert await next_content(stream) == "é"


async def test_a_stop_text_ends_the_stream(open_agent: OpenAgent) -> None:
    agent = await open_agent("a\n\nbcdefgh<|im_end|>", "z<|im_end|>", is_stepped=True)
    asking = await agent.under_way(agent.ask(QUESTION, stream=True, stop=["\n\n"]), 4)
    chunks = await whole(await asking)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert agent.world.engine.aborted_ids == [agent.world.engine.requests[0].request_id]
    (completion,) = agent.turns[0].completions
    assert completion.token_ids == tuple(agent.world.ids("a\n\n"))
    assert completion.finish_reason is FinishReason.STOP
    more = [*QUESTION, {"role": "assistant", "content": "a"}, {"role": "user", "content": "y"}]
    again = asyncio.create_task(agent.ask(more))
    await agent.world.engine.wait_for_requests(2)
    agent.world.engine.step(10)
    await again
    assert agent.turns[1].parent == completion.id


async def test_tokens_and_their_log_probabilities_leave_with_the_text(open_agent: OpenAgent) -> None:
    agent = await open_agent("aé🙂b<|im_end|>", is_stepped=True)
    call = agent.ask(stream=True, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
    asking = await agent.under_way(call)
    step_to_the_end(agent.world)
    chunks = await whole(await asking)
    (turn,) = agent.turns
    (completion,) = turn.completions
    rows = [row for chunk in chunks if chunk.choices[0].logprobs for row in chunk.choices[0].logprobs.content]
    assert [row.logprob for row in rows] == list(completion.logprobs[:-1])
    assert bytes(byte for row in rows for byte in row.bytes).decode() == "aé🙂b"
    assert all(len(row.top_logprobs) == 2 for row in rows)
    assert tuple(chunks[0].prompt_token_ids) == turn.new_prompt_ids
    token_ids = [id_ for chunk in chunks for id_ in getattr(chunk.choices[0], "token_ids", [])]
    assert tuple(token_ids) == completion.token_ids


async def test_who_hangs_up_stops_the_engine(open_agent: OpenAgent) -> None:
    agent = await open_agent("abcdef<|im_end|>", is_stepped=True)
    asking = await agent.under_way(agent.ask(stream=True), 2)
    stream = await asking
    chunks = aiter(stream)
    assert [await next_content(chunks) for _ in "ab"] == ["a", "b"]
    await stream.close()
    await agent.world.journal.is_writing.wait()
    assert (await agent.end(status="timeout"))[1]["num_turns"] == 1
    trajectory = agent.world.journal.closed[agent.id]
    (completion,) = trajectory.turns[0].completions
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids == tuple(agent.world.ids("ab"))
    assert not any(record.loss_mask.any() for record in token_records(trajectory))
    assert agent.world.engine.num_in_flight == 0


async def read_a_call(agent: Agent) -> dict[str, Any]:
    """Ask, read up to the first call, and hang up. Return the answer as far as it came."""
    content, stream = "", await agent.ask(QUESTION, tools=TOOLS, stream=True)
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        if delta.tool_calls:
            await stream.close()
            calls = [call.model_dump(exclude={"index"}) for call in delta.tool_calls]
            return {"role": "assistant", "content": content, "tool_calls": calls}
    raise AssertionError("no call came")


def after(answer: Any) -> list[Any]:
    return [*QUESTION, answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "1"}]


@pytest.mark.parametrize("goes_on", [True, False])
async def test_an_answer_may_end_with_the_call_after_which_its_reader_hung_up(
    open_agent: OpenAgent, goes_on: bool
) -> None:
    agent = await open_agent(f"so {CALL} and {CALL} more<|im_end|>", "ok<|im_end|>", is_stepped=True)
    sampled = agent.world.ids(f"so {CALL}")
    agent.world.engine.hang_next(Operation.ABORT)
    answer = await (await agent.under_way(read_a_call(agent), len(sampled) + 3))
    going_on = asyncio.create_task(agent.ask(after(answer), tools=TOOLS)) if goes_on else None
    for _ in range(3):
        assert (await agent.reward(reward=1))[
            0
        ] == 200  # time enough to be placed, before there is an answer to continue
    agent.world.engine.recover()
    if going_on:
        await agent.world.engine.wait_for_requests(2)
        agent.world.engine.step(10)
        await going_on
        assert agent.turns[1].parent == agent.turns[0].completions[0].id
    await agent.end(status="timeout")
    trajectory = agent.world.journal.closed[agent.id]
    completion = trajectory.turns[0].completions[0]
    assert (completion.token_ids, completion.finish_reason) == (tuple(sampled), FinishReason.STOP)
    assert trajectory.undelivered == (() if goes_on else (completion.id,))
    [record] = token_records(trajectory)
    assert record.loss_mask.sum() == (trajectory.num_sampled_tokens if goes_on else 0)


async def test_an_answer_that_is_continued_was_delivered(open_agent: OpenAgent) -> None:
    agent = await open_agent(f"{CALL}<|im_end|>", "ok<|im_end|>")
    agent.world.journal.may_write.clear()
    answer = await read_a_call(agent)
    await agent.world.journal.is_writing.wait()
    going_on = asyncio.create_task(agent.ask(after(answer), tools=TOOLS))
    agent.world.journal.may_write.set()
    await going_on
    await agent.end()
    trajectory = agent.world.journal.closed[agent.id]
    assert [turn.parent for turn in trajectory.turns] == [None, trajectory.turns[0].completions[0].id]
    assert trajectory.undelivered == ()


async def test_a_failure_in_the_middle_is_an_event(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc<|im_end|>")
    agent.world.engine.die_after(2)
    stream = aiter(await agent.ask(stream=True))
    await next_content(stream)
    with pytest.raises(openai.APIError, match="died") as caught:
        await whole(stream)
    assert caught.value.code == "engine_failed"
    assert agent.world.gateway.stats().errors == {503: 1}
    assert agent.turns == []


async def test_the_end_of_the_session_is_an_event(open_agent: OpenAgent) -> None:
    agent = await open_agent("abcdef", is_stepped=True)
    asking = await agent.under_way(agent.ask(stream=True), 1)
    stream = aiter(await asking)
    assert await next_content(stream) == "a"
    assert (await agent.end())[1]["num_sampled_tokens"] == 1
    with pytest.raises(openai.APIError, match="accepts no more calls"):
        await whole(stream)


@pytest.mark.parametrize(
    ("failure", "status"), [(EngineUnreachable("gone"), 503), (EngineRejected("no"), 400)], ids=["gone", "refused"]
)
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_before_the_first_token_a_failure_is_a_status(
    open_world: OpenWorld, failure: Exception, status: int, tool_choice: Any
) -> None:
    world = await open_world(script=[failure])
    with pytest.raises(openai.APIStatusError) as caught:
        await (await world.start()).ask(stream=True, tools=TOOLS, tool_choice=tool_choice)
    assert caught.value.status_code == status
    assert world.gateway.stats().errors == {status: 1}


async def test_a_failure_after_a_long_wait_is_an_event(open_world: OpenWorld) -> None:
    world = await open_world("a<|im_end|>", is_stepped=True, limits=Limits(keep_alive_s=0.05))
    stream = aiter(await (await world.start()).ask(stream=True))
    assert (await anext(stream)).choices[0].delta.role == "assistant"
    world.engine.die_after(0)
    with pytest.raises(openai.APIError, match="died"):
        await whole(stream)


async def test_before_the_first_token_a_fault_is_a_status(open_agent: OpenAgent) -> None:
    agent = await open_agent(max_context_tokens=20)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await agent.ask("long " * 30, stream=True)
