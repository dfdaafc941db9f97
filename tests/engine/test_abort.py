"""An abort always answers with what was sampled, and frees what the request held:

- while running, queued, retracted, and frozen in place
- of an unknown id; sglang/test_contract.py has similar ids
- while its grammar is compiled: by its id, and of all requests
- by cancelling `generate`, and by a client that just disconnects, streamed or not
- a client that leaves after its answer or its refusal ends no other request with that id
"""

import asyncio
import logging
import threading
from typing import Any

import aiohttp
import pytest

from areal_agent.engine.embedded.sampler import Grammars
from areal_agent.engine.wire import control, generate
from areal_agent.errors import EngineRejected
from areal_agent.types import FinishReason, PauseMode


async def test_of_a_running_request(tiny, served, ask, truth):
    request = ask(1, max_tokens=400)
    answer = await served.under_way(request, num_steps=6)
    for name in ("nobody", request.request_id):  # an unknown id is no error
        await served.gate.meanwhile(served.engine.abort(name))
    result = await answer
    assert (await served.engine.stats()).num_running == 0
    assert result.finish_reason is FinishReason.ABORT
    assert 6 <= len(result.token_ids) < 400
    assert result.logprobs == pytest.approx(truth(tiny).logprobs(request.input_ids, result.token_ids), abs=1e-4)


async def test_of_a_queued_request(tiny, serve, ask):
    async with serve(tiny, num_slots=1) as served:
        served.gate.shut()
        running = asyncio.create_task(served.engine.generate(ask(1, max_tokens=300)))
        await served.gate.steps(2)
        queued = asyncio.create_task(served.engine.generate(ask(2)))
        await served.gate.meanwhile(served.until(lambda stats: stats.num_queued == 1))
        await served.gate.meanwhile(served.engine.abort(ask(2).request_id))
        result = await queued
        served.gate.open()
        assert len((await running).token_ids) == 300
    assert (result.finish_reason, result.token_ids, result.versions) == (FinishReason.ABORT, (), ())


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_of_an_interrupted_request_while_paused(mode, served, ask):
    request = ask(1, max_tokens=400)
    answer = await served.under_way(request, num_steps=6)
    await served.gate.meanwhile(served.engine.pause(mode))
    await served.engine.abort(request.request_id)
    result = await answer  # answered although still paused
    assert result.finish_reason is FinishReason.ABORT
    assert len(result.token_ids) >= 6


class SlowGrammars(Grammars):
    """Grammars that are compiled when a test says so, and constrain nothing."""

    def __init__(self) -> None:
        super().__init__(None, None, vocab_size=0)
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()

    def matcher(self, kind: str, text: str) -> Any:
        self.is_asked.set()
        self.may_answer.wait(60)
        return None


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_of_all", [False, True])
async def test_while_its_grammar_is_compiled(is_of_all, is_streamed, tiny, serve, ask):
    grammars, request = SlowGrammars(), ask(1, regex="a+")
    async with serve(tiny, grammars=grammars) as served, aiohttp.ClientSession(served.engine.base_url) as session:
        await served.engine.pause(PauseMode.RETRACT)  # so that no token is sampled before the abort is obeyed
        answer = asyncio.create_task(served.engine.generate(request, (lambda _: None) if is_streamed else None))
        await asyncio.to_thread(grammars.is_asked.wait)
        body = {"abort_all": True} if is_of_all else {"rid": request.request_id}
        async with session.post(control.ABORT_REQUEST, json=body) as response:
            assert response.status == 200
        grammars.may_answer.set()
        result = await answer
    assert (result.finish_reason, result.token_ids) == (FinishReason.ABORT, ())


@pytest.mark.parametrize("on_chunk", [(), (lambda _: None,)], ids=["whole", "streamed"])
async def test_by_cancelling_generate_frees_the_slot(on_chunk, served, ask):
    answer = await served.under_way(ask(1, max_tokens=400), *on_chunk, num_steps=3)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await served.gate.meanwhile(served.until(lambda stats: stats.num_running == 0))
    assert (await served.engine.stats()).generated_tokens < 400


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_by_disconnecting_frees_the_slot_and_is_no_failure(is_streamed, served, ask, caplog):
    async with aiohttp.ClientSession(served.engine.base_url) as session:
        served.gate.shut()
        body = generate.encode_request(ask(1, max_tokens=400), is_streamed=is_streamed)
        call = asyncio.create_task(session.post(generate.GENERATE, json=body))
        await served.gate.steps(3)
        if is_streamed:
            response = await call
            assert (await response.content.readany()).startswith(b"data: {")
            response.close()
        call.cancel()  # closes the connection and sends nothing
        await served.gate.meanwhile(served.until(lambda stats: stats.num_running == 0))
        assert (await served.engine.stats()).generated_tokens < 400
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_of_all_requests(served, ask):
    async with aiohttp.ClientSession() as session:
        served.gate.shut()
        answers = [asyncio.create_task(served.engine.generate(ask(i, max_tokens=400))) for i in range(3)]
        await served.gate.meanwhile(served.until(lambda stats: stats.num_running == 3))
        url = served.engine.base_url + control.ABORT_REQUEST
        await served.gate.meanwhile(session.post(url, json={"abort_all": True}))
        results = await asyncio.gather(*answers)
    assert {result.finish_reason for result in results} == {FinishReason.ABORT}


def test_who_leaves_with_a_duplicate_does_not_end_the_first_request(tiny, schedule, ask):
    with schedule(tiny) as (scheduler, _):
        scheduler.pause(PauseMode.RETRACT)
        first = scheduler.submit(ask(1))
        duplicate = scheduler.submit(ask(1))
        scheduler.abandon(ask(1).request_id, duplicate).result()
        scheduler.resume()
        assert first.result().finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineRejected, match="in flight already"):
        duplicate.result()


def test_who_leaves_with_its_answer_does_not_end_the_next_request_of_that_id(tiny, schedule, ask):
    with schedule(tiny) as (scheduler, _):
        answered = scheduler.submit(ask(1))
        answered.result()
        scheduler.pause(PauseMode.RETRACT)
        again = scheduler.submit(ask(1))
        scheduler.abandon(ask(1).request_id, answered).result()
        scheduler.resume()
        assert again.result().finish_reason is FinishReason.LENGTH


def test_who_leaves_before_its_answer_ends_the_request(tiny, schedule, ask):
    with schedule(tiny) as (scheduler, _):
        scheduler.pause(PauseMode.RETRACT)
        answer = scheduler.submit(ask(1))
        scheduler.abandon(ask(1).request_id, answer)
        assert answer.result().finish_reason is FinishReason.ABORT
