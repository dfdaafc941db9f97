"""Whatever a workflow does ends as a status, over a real gateway and a scripted engine.

1. what it raises, exits with or returns; 2. what it logs, of any kind and size; 3. a session that it ends itself;
4. an agent of AReaL's kind runs unmodified;
5. a plain function runs in a thread, with a client of its own kind; when its time is up its next call is refused.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import openai
import pytest
import pytest_asyncio

from areal_agent import Reject, SandboxError, Status, Task
from areal_agent.engine.fake import FakeEngine
from areal_agent.gateway.app import Gateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.context import SharedResources
from areal_agent.rollout.runner import RolloutRunner, RolloutSpec, open_clients
from areal_agent.rollout.workflow import load_workflow
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import SessionPurpose

SPEC = RolloutSpec(session_id="s-1", group_id="g", task=Task(id="t", data={}), seed=1, purpose=SessionPurpose.TRAIN)


@pytest_asyncio.fixture
async def make_runner(tmp_path: Path, small_model: Path) -> AsyncGenerator:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite", create=True)
    await ledger.begin_incarnation(0)
    renderer = Renderer.load(small_model)
    gateway = Gateway(
        sampler=FakeEngine(lambda request: (70, renderer.end_token_id)),
        renderer=renderer,
        journal=ledger.own,
        model_name="m",
        admin_key="admin",
        max_context_tokens=256,
        vocab_size=renderer.vocab_size,
    )
    served = await gateway.serve("127.0.0.1", 0)
    async with open_clients() as clients, SharedResources() as shared:

        def make(workflow) -> RolloutRunner:
            return RolloutRunner(
                workflow,
                gateway_url=served.base_url,
                admin_key="admin",
                model="m",
                clients=clients,
                shared=shared,
                max_concurrent=4,
                timeout_s=120.0,
                sampling={"max_tokens": 8},
                sandbox={},
            )

        yield make, ledger
    await served.aclose()
    await ledger.aclose()


async def ask(rollout) -> None:
    await rollout.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


class OwnEnd(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("wrong \ud800"), Status.ERROR),
        (SystemExit(3), Status.ERROR),
        (KeyboardInterrupt(), Status.ERROR),
        (OwnEnd("gone"), Status.ERROR),
        (TimeoutError("of its own"), Status.ERROR),
        (Reject("x" * 100_000), Status.REJECTED),
        (SandboxError("no sandbox"), Status.INFRA),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_it_raises(make_runner, error: BaseException, status: Status) -> None:
    async def raising(task, rollout):
        await ask(rollout)
        raise error

    make, ledger = make_runner
    assert await make(raising).run(SPEC) is status
    assert (await ledger.trajectory("s-1")).error


@pytest.mark.parametrize(
    ("returned", "status"),
    [
        (1, Status.COMPLETED),
        (None, Status.MISSING_REWARD),
        (float("nan"), Status.ERROR),
        ("1.0", Status.ERROR),
        ({"no-such-completion": 1.0}, Status.ERROR),
    ],
)
async def test_what_it_returns(make_runner, returned: object, status: Status) -> None:
    async def returning(task, rollout):
        await ask(rollout)
        return returned

    make, _ = make_runner
    assert await make(returning).run(SPEC) is status


async def test_one_that_never_calls_the_model_is_an_error(make_runner) -> None:
    async def silent(task, rollout):
        return 1.0

    make, ledger = make_runner
    assert await make(silent).run(SPEC) is Status.ERROR
    assert "never called" in (await ledger.trajectory("s-1")).error


def nested(depth: int) -> object:
    return [] if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize("value", [2**70, "\ud800", nested(400), "x" * 40_000_000, {1: object()}], ids=range(5))
async def test_what_it_logs(make_runner, value: object) -> None:
    async def logging_it(task, rollout):
        await ask(rollout)
        rollout.log(value=value)
        return 1.0

    make, ledger = make_runner
    assert await make(logging_it).run(SPEC) is Status.COMPLETED
    assert "value" in (await ledger.trajectory("s-1")).logged


async def test_much_that_it_logs(make_runner) -> None:
    async def logging_it(task, rollout):
        await ask(rollout)
        rollout.log(**{f"value_{number}": "x" * 900_000 for number in range(60)})
        return 1.0

    make, ledger = make_runner
    assert await make(logging_it).run(SPEC) is Status.COMPLETED
    assert len((await ledger.trajectory("s-1")).logged) == 60


class AgentOfArealsKind:
    """As AReaL's examples write it: its own client, made from what it is given."""

    async def run(self, data, **extra_kwargs):
        client = openai.AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        reply = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}])
        return {reply.id: 0.5}


async def test_an_agent_of_areals_kind(make_runner) -> None:
    make, ledger = make_runner
    assert await make(load_workflow(AgentOfArealsKind())).run(SPEC) is Status.COMPLETED
    assert (await ledger.trajectory("s-1")).rewards.total == 0.5


async def test_a_session_that_it_ends_itself(make_runner) -> None:
    async def ending(task, rollout):
        await ask(rollout)
        async with aiohttp.ClientSession() as own:
            url = rollout.base_url.removesuffix("/v1") + "/rl/end_session"
            await own.post(url, json={}, headers={"Authorization": f"Bearer {rollout.api_key}"})
        return 1.0

    make, ledger = make_runner
    await make(ending).run(SPEC)
    assert (await ledger.trajectory("s-1")).status is Status.MISSING_REWARD


def ask_plainly(rollout) -> None:
    rollout.sync_client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


async def test_a_plain_function(make_runner) -> None:
    def plain(task, rollout):
        ask_plainly(rollout)
        return 1.0

    make, ledger = make_runner
    assert await make(load_workflow(plain)).run(SPEC) is Status.COMPLETED
    assert len((await ledger.trajectory("s-1")).turns) == 1


async def test_a_plain_function_that_is_cancelled_is_refused_at_its_next_call(make_runner) -> None:
    loop = asyncio.get_running_loop()
    asked, is_over, refused = asyncio.Event(), threading.Event(), loop.create_future()

    def plain(task, rollout):
        ask_plainly(rollout)
        loop.call_soon_threadsafe(asked.set)
        is_over.wait()
        try:
            ask_plainly(rollout)
        except openai.APIStatusError as error:
            loop.call_soon_threadsafe(refused.set_result, error.status_code)
        return 1.0

    make, ledger = make_runner
    running = asyncio.create_task(make(load_workflow(plain)).run(SPEC))
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    is_over.set()
    assert await refused == 409
    assert (await ledger.trajectory("s-1")).status is Status.CANCELLED


async def test_the_place_of_an_error_is_told(make_runner) -> None:
    async def broken(task, rollout):
        await ask(rollout)
        return task["answer"]

    make, ledger = make_runner
    await make(broken).run(SPEC)
    assert "KeyError: 'answer' (test_runner.py:" in (await ledger.trajectory("s-1")).error
