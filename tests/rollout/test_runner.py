"""Whatever a workflow does ends as a status, over a real gateway and a scripted engine.

1. what it raises, exits with or returns; 2. what it logs, of any kind and size; 3. a session that it ends itself;
4. an agent of AReaL's kind runs unmodified;
5. a plain function runs in a thread, with a client of its own kind; when its time is up its next call is refused;
6. a call that was not awaited is named with its line;
7. with `sampling_override` an agent's top-p is ignored, and its `max_tokens` counts; the model may have aliases;
8. calls of other models are kept, without keys, and what fails there is `infra`; copies of clients know them, too.
"""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal_agent import ConfigError, Reject, SandboxError, Status, Task, testing
from areal_agent.engine.fake import FakeEngine
from areal_agent.gateway.app import Gateway
from areal_agent.rollout.config import OtherModel
from areal_agent.rollout.context import SharedResources
from areal_agent.rollout.models import NO_MODELS, OtherModels, open_models
from areal_agent.rollout.runner import RolloutRunner, RolloutSpec, open_clients
from areal_agent.rollout.unawaited import unawaited_calls
from areal_agent.rollout.workflow import load_workflow
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import SessionPurpose, Trajectory
from tests.histories import open_ledger

SPEC = RolloutSpec(session_id="s-1", group_id="g", task=Task(id="t", data={}), seed=1, purpose=SessionPurpose.TRAIN)


Play = Callable[..., Awaitable[tuple[Status, Trajectory]]]


@pytest.fixture(scope="module")
def renderer(small_model: Path) -> Renderer:
    return Renderer.load(small_model)


@pytest_asyncio.fixture
async def play(tmp_path: Path, renderer: Renderer) -> AsyncGenerator[Play]:
    """`await play(workflow)`: run it once; return its status, and its trajectory as the ledger has it."""
    async with open_ledger(tmp_path) as ledger, open_clients() as clients, SharedResources() as shared:
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

        async def play(workflow: Any, session: Any = None, **settings: Any) -> tuple[Status, Trajectory]:
            runner = RolloutRunner(
                workflow,
                gateway_url=served.base_url,
                admin_key="admin",
                model="m",
                clients=clients,
                shared=shared,
                max_concurrent=4,
                timeout_s=120.0,
                session={"sampling": {"max_tokens": 8}, **(session or {})},
                sandbox={},
                **settings,
            )
            try:
                status = await runner.run(SPEC)
            except asyncio.CancelledError:
                status = Status.CANCELLED
            return status, await ledger.trajectory("s-1")

        yield play
        await served.aclose()


async def ask(rollout) -> None:
    await rollout.client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("sampling_override", "top_p"), [(False, 0.5), (True, 1.0)])
async def test_the_runs_sampling_wins_where_that_is_asked_for(play, sampling_override: bool, top_p: float) -> None:
    async def picky(task, rollout):
        question = [{"role": "user", "content": "hi"}]
        await rollout.client.chat.completions.create(model="claude", messages=question, top_p=0.5, max_tokens=1)
        return 1.0

    _, trajectory = await play(picky, session={"sampling_override": sampling_override, "model_aliases": ["claude"]})
    assert (trajectory.turns[0].sampling.top_p, trajectory.turns[0].sampling.max_tokens) == (top_p, 1)


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
async def test_what_it_raises(play, error: BaseException, status: Status) -> None:
    async def raising(task, rollout):
        await ask(rollout)
        raise error

    found, trajectory = await play(raising)
    assert found is status and trajectory.error


@pytest.mark.parametrize(
    ("returned", "status"),
    [
        (1, Status.COMPLETED),
        (None, Status.MISSING_REWARD),
        (float("nan"), Status.ERROR),
        ("1.0", Status.ERROR),
        ({}, Status.MISSING_REWARD),
    ],
)
async def test_what_it_returns(play, returned: object, status: Status) -> None:
    async def returning(task, rollout):
        await ask(rollout)
        return returned

    assert (await play(returning))[0] is status


async def test_parts_returned_by_name_are_told_how_parts_are_given(play) -> None:
    async def returning(task, rollout):
        await ask(rollout)
        return {"style": 0.5}

    status, trajectory = await play(returning)
    assert status is Status.ERROR and "a part of the reward has a name" in trajectory.error


async def test_one_that_never_calls_the_model_is_an_error(play) -> None:
    async def silent(task, rollout):
        return 1.0

    status, trajectory = await play(silent)
    assert status is Status.ERROR and "never called" in trajectory.error


async def test_a_call_that_is_not_awaited_is_named(play, recwarn: pytest.WarningsRecorder) -> None:
    async def forgetting(task, rollout):
        answer = ask(rollout)
        return 1.0 if answer else 0.0

    with unawaited_calls() as unawaited:
        _, trajectory = await play(forgetting, unawaited=unawaited)
    place = f"{Path(__file__).name}:{forgetting.__code__.co_firstlineno + 1}"
    assert trajectory.error == f"the model was never called; a call was made and not awaited: {place}"
    assert [str(one.message).partition("\n")[0] for one in recwarn] == ["coroutine 'ask' was never awaited"]


def nested(depth: int) -> object:
    return [] if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize(
    "values",
    [[2**70], ["\ud800"], [nested(400)], ["x" * 40_000_000], [{1: object()}], ["x" * 900_000] * 60],
    ids=range(6),
)
async def test_what_it_logs(play, values: list[object]) -> None:
    async def logging_it(task, rollout):
        await ask(rollout)
        rollout.log(**{f"value_{number}": value for number, value in enumerate(values)})
        return 1.0

    status, trajectory = await play(logging_it)
    assert (status, len(trajectory.logged)) == (Status.COMPLETED, len(values))


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


class AnthropicAgentOfArealsKind:
    """Its client adds /v1 to the URL that it is given."""

    async def run(self, data, **extra_kwargs):
        body = {"model": "default", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
        reply = await extra_kwargs["http_client"].post(
            extra_kwargs["base_url"] + "/v1/messages", json=body, headers={"x-api-key": extra_kwargs["api_key"]}
        )
        return {reply.json()["id"]: 0.5}


@pytest.mark.parametrize("agent", [AgentOfArealsKind(), AnthropicAgentOfArealsKind()], ids=["openai", "anthropic"])
async def test_an_agent_of_areals_kind(play, agent) -> None:
    status, trajectory = await play(load_workflow(agent))
    assert (status, trajectory.rewards.total) == (Status.COMPLETED, 0.5)


async def test_a_session_that_it_ends_itself(play) -> None:
    async def ending(task, rollout):
        await ask(rollout)
        async with aiohttp.ClientSession() as own:
            url = rollout.base_url.removesuffix("/v1") + "/rl/end_session"
            await own.post(url, json={}, headers={"Authorization": f"Bearer {rollout.api_key}"})
        return 1.0

    assert (await play(ending))[1].status is Status.MISSING_REWARD


def ask_plainly(rollout) -> None:
    rollout.sync_client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


async def test_a_plain_function(play) -> None:
    def plain(task, rollout):
        ask_plainly(rollout)
        return 1.0

    status, trajectory = await play(load_workflow(plain))
    assert (status, len(trajectory.turns)) == (Status.COMPLETED, 1)


async def test_a_plain_function_that_is_cancelled_is_refused_at_its_next_call(play) -> None:
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

    running = asyncio.create_task(play(load_workflow(plain)))
    await asked.wait()
    running.cancel()
    status, trajectory = await running
    is_over.set()
    assert await refused == 409
    assert status is trajectory.status is Status.CANCELLED


async def test_the_place_of_an_error_is_told(play) -> None:
    async def broken(task, rollout):
        await ask(rollout)
        return task["answer"]

    assert "KeyError: 'answer' (test_runner.py:" in (await play(broken))[1].error


async def test_the_place_is_the_workflows_own(play) -> None:
    async def deep(task, rollout):
        await ask(rollout)
        return json.loads("no number")  # raised in a library, whose line helps nobody

    assert "(char 0) (test_runner.py:" in (await play(deep))[1].error


@asynccontextmanager
async def judge(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, str]) -> AsyncGenerator[OtherModels]:
    """A server that gives these answers in turn, the last one for ever, to whom knows the key."""
    left = list(answers)

    async def answer(request: web.Request) -> web.Response:
        status, text = left.pop(0) if len(left) > 1 else left[0]
        if request.headers["Authorization"] != "Bearer sk-judge":
            status, text = 401, "{}"
        kind = "text/event-stream" if text.startswith("data:") else "application/json"
        return web.Response(status=status, text=text, content_type=kind, headers={"retry-after-ms": "1"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    async with TestServer(app) as server:
        model = OtherModel(url=str(server.make_url("/v1")), model="large", key_env="JUDGE_KEY", max_retries=1)
        async with open_models({"judge": model}) as models:
            yield models


def answered(text: str, **more: object) -> str:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return json.dumps({"id": "c", "object": "chat.completion", "created": 0, "model": "x", "choices": [choice], **more})


async def judged(task, rollout) -> float:
    await ask(rollout)
    judge = rollout.client.with_options(timeout=60.0)("judge").with_options(timeout=60.0)
    reply = await judge.chat.completions.create(model=judge.model, messages=[{"role": "user", "content": "good?"}])
    return float(reply.choices[0].message.content)


@pytest.mark.parametrize(
    ("answers", "status", "error"),
    [
        ([(200, answered("0.5"))], Status.COMPLETED, None),
        ([(429, "{}"), (200, answered("0.5"))], Status.COMPLETED, None),
        ([(500, "{}"), (200, answered("0.5"))], Status.COMPLETED, None),
        ([(200, "<html>"), (200, answered("0.5"))], Status.COMPLETED, None),
        ([(200, answered("good"))], Status.ERROR, "ValueError"),
        *[([(status, "{}")], Status.INFRA, str(status)) for status in (400, 401, 404, 429, 500)],
        ([(200, "<html>")], Status.INFRA, "<html>"),
        ([(401, '{"error": {"message": "no key sk-judge"}}')], Status.INFRA, "no key ***"),
        ([(401, r'{"error": {"message": "no key s\u006b-judge"}}')], Status.INFRA, "no key ***"),
        ([(200, 'data: {"error": {"message": "overloaded"}}\n\n')], Status.INFRA, "overloaded"),
        ([(200, answered("1", error={"message": "overloaded"}))], Status.INFRA, "overloaded"),
    ],
)
async def test_another_model_is_asked_and_its_failures_are_not_the_models(
    play, monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, str]], status: Status, error: str | None
) -> None:
    async with judge(monkeypatch, *answers) as models:
        got, trajectory = await play(judged, models=models)
    assert (got, len(trajectory.turns)) == (status, 1)
    assert error is None or error in trajectory.error
    calls = [trajectory.logged[f"judge.{number}"] for number in range(1, len(trajectory.logged) + 1)]
    assert [call["status"] for call in calls][: len(answers)] == [status for status, _ in answers]
    assert all(call["asked"]["model"] == "large" and "sk-judge" not in json.dumps(call) for call in calls)


async def test_what_another_model_streams_is_kept(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def streaming(task, rollout) -> float:
        await ask(rollout)
        judge = rollout.client("judge")
        stream = await judge.chat.completions.create(model=judge.model, messages=[], stream=True)
        return float("".join([chunk.choices[0].delta.content async for chunk in stream]))

    delta = {"index": 0, "delta": {"content": "0.25"}}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "x", "choices": [delta]}
    async with judge(monkeypatch, (200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")) as models:
        got, trajectory = await play(streaming, models=models)
    assert (got, trajectory.rewards.final) == (Status.COMPLETED, 0.25)
    assert "0.25" in trajectory.logged["judge.1"]["answer"]


async def test_a_model_that_is_gone_or_that_there_is_not(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_models({"judge": OtherModel(url="http://127.0.0.1:9/v1", model="m")}) as models:
        got, trajectory = await play(judged, models=models)
    assert (got, [trajectory.logged[f"judge.{n}"]["error"] != "" for n in (1, 2, 3)]) == (Status.INFRA, [True] * 3)
    with pytest.raises(ConfigError, match=r"rollout.models has no 'critic'; it has none"):
        NO_MODELS.client("critic", {})
    with pytest.raises(ConfigError, match=r"rollout.models.x.key_env is 'JUDGE_KEY', a variable that is not set"):
        OtherModel(url="http://h", model="m", key_env="JUDGE_KEY").key("rollout.models.x")
    monkeypatch.setenv("JUDGE_KEY", "secret\r")
    with pytest.raises(ConfigError, match=r"rollout.models.x.key_env: the variable JUDGE_KEY holds no usable key"):
        OtherModel(url="http://h", model="m", key_env="JUDGE_KEY").key("rollout.models.x")


def test_the_page_on_workflows_has_a_judge_that_a_test_scripts() -> None:
    page = Path(__file__).parents[2].joinpath("docs/workflows.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("## Other models")[2].partition("```python")[2].partition("```")[0], names)
    for verdict, reward in (("Yes.", 1.0), ("no", 0.0)):
        trajectory = testing.play(names["solve"], {"topic": "water"}, "It is wet.", others={"judge": [verdict]})
        assert (trajectory.rewards.final, "It is wet." in str(trajectory.logged["judge.1"]["asked"])) == (reward, True)
    assert testing.play(names["solve"], {"topic": "water"}, "It is wet.", others={"judge": []}).status is Status.INFRA
