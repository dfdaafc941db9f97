"""Failures and ends:

- a turn is in the journal before its answer is sent
- an agent that hangs up ends its engine request, and its partial answer is kept
- an answer that never reached its agent is recorded and marked as undelivered, also if only the end of its stream is
  lost; a delivered one is not
- a client that hangs up while its answer is sent causes no error, neither counted nor logged
- the end of a session aborts what is in flight and keeps its partial answer, masked from training
- an engine that does not answer an abort does not block the end; an engine that aborts by itself is an engine error
- a session that the journal fails to open does not remain; one whose client hangs up before it has the key is ended
- failures of engine, journal and route are error objects
- closing twice is harmless; a tokenizer of another model is refused
"""

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any

import openai
import pytest
from aiohttp import ClientSession, ServerDisconnectedError, web
from aiohttp.test_utils import TestServer

from areal_agent.errors import ConfigError, EngineError, EngineRejected, EngineUnreachable, LedgerError, RequestError
from areal_agent.gateway.app import Gateway
from areal_agent.gateway.chat import ChatRequest
from areal_agent.gateway.metrics import Counters
from areal_agent.gateway.server import error_boundary
from areal_agent.gateway.session import EndRequest, Session, StartRequest
from areal_agent.gateway.turn import Services
from areal_agent.tokens.records import token_records
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import FinishReason, PauseMode, SessionRecord, Status
from tests import histories

from .conftest import MemoryJournal, OpenAgent, OpenWorld


async def hang_up(call: "asyncio.Task[Any]") -> None:
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def test_a_turn_is_journaled_before_its_answer_leaves(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>")
    agent.world.journal.may_write.clear()
    call = asyncio.create_task(agent.post_chat())
    await agent.world.journal.is_writing.wait()
    assert (await agent.reward(reward=1))[0] == 200  # time enough for an answer
    assert not call.done()
    agent.world.journal.may_write.set()
    assert (await call)[0] == 200
    assert len(agent.turns) == 1


async def test_hanging_up_ends_the_engine_request_and_keeps_what_it_gave(open_agent: OpenAgent) -> None:
    agent = await open_agent("abc", is_stepped=True)
    call = await agent.under_way(agent.post_chat())
    assert agent.world.gateway.stats().num_engine_requests == 1
    agent.world.engine.step(2)
    await hang_up(call)
    await agent.world.journal.is_writing.wait()
    assert agent.world.engine.aborted_ids == [agent.world.engine.requests[0].request_id]
    assert agent.world.engine.num_in_flight == 0
    await agent.end(status="timeout")
    (completion,) = agent.world.journal.closed[agent.id].turns[0].completions
    assert (completion.token_ids, completion.finish_reason) == (tuple(agent.world.ids("ab")), FinishReason.ABORT)


async def test_hanging_up_before_the_answer_leaves_an_orphan(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>", "b<|im_end|>")
    delivered = await agent.ask("first")
    agent.world.journal.may_write.clear()
    agent.world.journal.is_writing.clear()
    call = asyncio.create_task(agent.post_chat())
    await agent.world.journal.is_writing.wait()
    await hang_up(call)
    ending = asyncio.create_task(agent.end(status="timeout"))
    agent.world.journal.may_write.set()
    await ending
    trajectory = agent.world.journal.closed[agent.id]
    orphan = trajectory.turns[1].completions[0].id
    assert trajectory.undelivered == (orphan,)
    assert trajectory.turns[0].completions[0].id == delivered.id
    trained = sum(int(record.loss_mask.sum()) for record in token_records(trajectory))
    assert trained == len(trajectory.turns[0].completions[0].token_ids)


async def test_a_stream_without_its_end_is_an_orphan(open_agent: OpenAgent) -> None:
    agent = await open_agent("ab<|im_end|>")
    agent.world.journal.may_write.clear()
    stream = await agent.ask(stream=True)
    await agent.world.journal.is_writing.wait()
    await stream.close()
    ending = asyncio.create_task(agent.end(status="timeout"))
    while (await agent.reward(reward=1))[0] == 200:  # until the end has begun
        pass
    agent.world.journal.may_write.set()
    await ending
    trajectory = agent.world.journal.closed[agent.id]
    assert trajectory.undelivered == (trajectory.turns[0].completions[0].id,)


async def test_what_was_delivered_is_no_orphan(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    await agent.ask()
    [_ async for _ in await agent.ask(stream=True)]
    await agent.client.completions.create(model="model", prompt="x")
    await agent.end()
    assert agent.world.journal.closed[agent.id].undelivered == ()
    assert len(agent.turns) == 3


async def test_the_end_keeps_partial_answers(open_agent: OpenAgent) -> None:
    agent = await open_agent("abcd", is_stepped=True)
    call = await agent.under_way(agent.post_chat(), 2)
    status, answer = await agent.end(status="timeout", error="too slow")
    assert (status, answer["num_sampled_tokens"]) == (200, 2)
    status, answer = await call
    assert (status, answer["error"]["code"]) == (409, "session_ended")
    trajectory = agent.world.journal.closed[agent.id]
    assert trajectory.turns[0].completions[0].finish_reason is FinishReason.ABORT
    assert not any(record.loss_mask.any() for record in token_records(trajectory))
    assert trajectory.error == "too slow"


async def test_no_answer_of_an_aborted_turn_is_trained(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>", "bcdefgh", is_stepped=True)
    call = await agent.under_way(agent.post_chat(n=2), num_requests=2)
    agent.world.engine.step(3)  # one answer is whole, the other is not
    await agent.end(status="timeout")
    assert (await call)[0] == 409
    trajectory = agent.world.journal.closed[agent.id]
    assert trajectory.num_sampled_tokens == 5
    assert not any(record.loss_mask.any() for record in token_records(trajectory))


async def test_an_end_without_partial_tokens_has_no_turn(open_agent: OpenAgent) -> None:
    agent = await open_agent("abcd", is_stepped=True)
    call = await agent.under_way(agent.post_chat())
    assert (await agent.end())[1]["num_turns"] == 0
    assert (await call)[0] == 409


class SlowToOpen(MemoryJournal):
    async def open_session(self, session: SessionRecord) -> None:
        self.is_writing.set()
        await self.may_write.wait()
        await super().open_session(session)


async def test_hanging_up_on_the_start_ends_the_session(open_world: OpenWorld) -> None:
    journal = SlowToOpen()
    world = await open_world(journal=journal)
    journal.may_write.clear()
    starting = asyncio.create_task(world.start(session_id="s"))
    await journal.is_writing.wait()
    await hang_up(starting)
    assert (await world.call("/rl/end_session", {}))[0] == 403  # the gateway has heard of it meanwhile
    journal.may_write.set()
    assert (await world.call("/rl/start_session", {"task_id": "t", "session_id": "s"}))[0] == 409
    await journal.has_closed.wait()
    assert journal.closed["s"].status is Status.CANCELLED
    assert world.gateway.stats().num_open_sessions == 0


async def test_hanging_up_on_the_end_does_not_stop_it(open_agent: OpenAgent) -> None:
    agent = await open_agent("a<|im_end|>")
    agent.world.journal.may_write.clear()
    chat = asyncio.create_task(agent.post_chat())
    await agent.world.journal.is_writing.wait()
    ending = asyncio.create_task(agent.end(status="cancelled"))
    while (await agent.reward(reward=1))[0] == 200:  # until the end has begun
        pass
    await hang_up(ending)
    agent.world.journal.may_write.set()
    await agent.world.journal.has_closed.wait()
    await chat
    assert len(agent.world.journal.closed[agent.id].turns) == 1


async def test_an_engine_that_aborts_by_itself_has_failed(open_agent: OpenAgent) -> None:
    agent = await open_agent("abcd", is_stepped=True)
    call = await agent.under_way(agent.post_chat(), 1)
    await agent.world.engine.pause(PauseMode.ABORT)
    assert (await call)[0] == 503
    assert agent.turns[0].completions[0].finish_reason is FinishReason.ABORT


class DeafEngine:
    """Answers nothing, aborts included."""

    def __init__(self) -> None:
        self.has_request = asyncio.Event()

    async def generate(self, request: object, on_chunk: object = None) -> Any:
        self.has_request.set()
        await asyncio.Event().wait()

    async def abort(self, request_id: str) -> None:
        await asyncio.Event().wait()


async def test_a_deaf_engine_does_not_hold_up_the_end(renderer: Renderer) -> None:
    engine, journal, ended = DeafEngine(), MemoryJournal(), list[Session]()
    record = histories.session("s")
    services = Services(
        sampler=engine,
        renderer=renderer,
        journal=journal,
        counters=Counters(),
        max_context_tokens=100,
        vocab_size=renderer.vocab_size,
        abort_grace_s=0.01,
    )
    session = Session(record, services=services, on_ended=ended.append, start=StartRequest(task_id="t"))
    await journal.open_session(record)
    body = {"model": "model", "messages": [{"role": "user", "content": "x"}]}
    call = session.begin(await session.place(ChatRequest.read(body).order()))
    await engine.has_request.wait()
    trajectory = await session.end(EndRequest.read({"status": "timeout"}))
    assert trajectory.turns == ()
    assert ended == [session]
    with pytest.raises(RequestError, match="accepts no more calls"):
        await call


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (EngineRejected("too long"), 400),
        (EngineUnreachable("gone"), 503),
        (EngineError("odd"), 502),
        (RuntimeError("a bug with a secret"), 500),
    ],
    ids=lambda value: str(value),
)
async def test_engine_failures_are_error_objects(open_agent: OpenAgent, failure: Exception, status: int) -> None:
    agent = await open_agent(script=[failure, failure, failure])
    answered, answer = await agent.post_chat()
    assert answered == status
    assert answer["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert "secret" not in answer["error"]["message"]
    with pytest.raises(openai.APIStatusError) as caught:
        await agent.ask(n=2)
    assert caught.value.status_code == status
    assert agent.world.gateway.stats().errors == {status: 2}
    assert caught.value.response.headers.get("Retry-After") == ("1" if status == 503 else None)
    assert agent.turns == []
    assert (await agent.end(status="infra"))[0] == 200


@pytest.mark.parametrize(
    ("path", "status", "remedy"),
    [("/v1/embeddings", 404, "GET /openapi.json lists every path"), ("/v1/chat/completions", 405, "only accepts POST")],
)
async def test_unknown_routes_are_error_objects(open_world: OpenWorld, path: str, status: int, remedy: str) -> None:
    world = await open_world()
    async with world.http.get(world.url + path) as response:
        assert (response.status, response.headers.get("Allow")) == (status, "POST" if status == 405 else None)
        message = (await response.json())["error"]["message"]
    assert path in message
    assert remedy in message


async def test_a_session_that_could_not_be_journaled_is_none(open_world: OpenWorld) -> None:
    world = await open_world()

    async def fail(session: object) -> None:
        raise LedgerError("disk full")

    world.journal.open_session = fail  # type: ignore[method-assign]
    status, _ = await world.call("/rl/start_session", {"task_id": "t", "session_id": "s1"})
    assert status == 500
    assert world.gateway.stats().num_open_sessions == 0


async def _answer_after_the_end(request: web.BaseRequest) -> web.StreamResponse:
    reply = web.StreamResponse()
    assert request.transport is not None
    request.transport.close()  # as the event loop does when it hears of the client's end
    await reply.prepare(request)
    await reply.write(b"too late")
    return reply


async def test_a_client_that_left_before_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    errors: Counter[int] = Counter()
    app = web.Application()
    app.router.add_get("/", error_boundary(_answer_after_the_end, errors))
    async with TestServer(app) as server, ClientSession() as client:
        with pytest.raises(ServerDisconnectedError):
            await client.get(server.make_url("/"))
    assert not errors
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_closing_twice_is_harmless(open_world: OpenWorld) -> None:
    world = await open_world()
    served = await world.gateway.serve()
    await served.aclose()
    await served.aclose()
    with pytest.raises(Exception, match=r"refused|connect"):
        await world.http.get(f"{served.base_url}/health")


def test_a_tokenizer_of_another_model_is_refused(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match="use the tokenizer of that model"):
        Gateway(
            sampler=DeafEngine(),
            renderer=renderer,
            journal=MemoryJournal(),
            model_name="model",
            admin_key="sk-admin",
            max_context_tokens=100,
            vocab_size=renderer.vocab_size - 1,
        )
