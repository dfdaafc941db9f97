"""Web pages in a real Chromium, played by scripts that know only what a model sees and writes.

1. Each kind of task is solved by clicks and keys, and pictures of the window's size come with the goal and each result;
the same play has the same pictures; 2. whatever else is sent first, or nothing, earns 0.0, and calls are bounded; 3. bad
calls are text and change nothing; 4. a page reaches nothing but its site; 5. a browser that dies is `SandboxError`, and
the next rollout has another; 6. a tab ends with its rollout, also by cancellation; 7. tasks differ between splits, and
bad arguments are named.

A rollout here has a server of the test's own behind its client.
"""

import asyncio
import base64
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest
import pytest_asyncio
from PIL import Image, ImageColor

pytest.importorskip("playwright", reason="playwright is not installed; pip install 'areal_agent[test]'")

from areal_agent import ConfigError, Rollout, SandboxError
from areal_agent.rollout.context import SharedResources
from areal_agent.rollout.models import RolloutClient
from envs.browser.chromium import Chromium, Tab, open_browser
from envs.browser.site import Site
from envs.browser.tasks import KINDS, load
from envs.browser.workflow import browse
from tests.view.browser import CHROMIUM

real = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium")
slow = pytest.mark.slow
TASKS = {task["kind"]: task for task in load("train", 3, size=len(KINDS), max_steps=30)}
Call = tuple[str, dict[str, Any]]
TAB, SPACE, ENTER = (("key", {"name": name}) for name in ("Tab", "Space", "Enter"))


def opened(url: str) -> Image.Image:
    """The picture of a data URL, which has to be a PNG."""
    head, _, data = url.partition(",")
    picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=["PNG"])
    assert head == "data:image/png;base64"
    return picture.convert("RGB")


def click_on(colour: str, picture: Image.Image) -> Call:
    places = [at for at in range(0, 448 * 448) if picture.getpixel((at % 448, at // 448)) == ImageColor.getrgb(colour)]
    return "click", {"x": places[len(places) // 2] % 448, "y": places[len(places) // 2] // 448}


def plan(task: dict[str, Any], right: dict[str, list[str]], picture: Image.Image) -> list[Call]:
    """The calls that send `right`."""
    match task["kind"]:
        case "button":
            return [click_on(right["colour"][0], picture)]
        case "form":
            return [TAB, ("type", {"text": right["code"][0]}), ENTER]
        case "boxes":
            marks = ([TAB, SPACE] if name in right["fruit"] else [TAB] for name in task["fruit"])
            return [*sum(marks, []), TAB, ENTER]
        case _:
            good = right["name"][0].split()[1]
            results = [name for name in task["prices"] if good in name]
            links = [TAB] * (2 + 1 + results.index(right["name"][0]))  # after the field and its button
            return [TAB, ("type", {"text": good}), ENTER, *links, ENTER, TAB, ENTER]


class Model:
    """A server that answers with the calls of a script, made from the first picture, and keeps what it was sent."""

    def __init__(self, script: Callable[[Image.Image], Sequence[Call]]) -> None:
        self._script = script
        self._calls: list[Call] | None = None
        self.messages: list[Any] = []

    @property
    def pictures(self) -> list[str]:
        parts = [part for one in self.messages if one["role"] != "assistant" for part in one["content"]]
        return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.messages = json.loads(request.content)["messages"]
        if self._calls is None:
            self._calls = [*self._script(opened(self.pictures[0]))]
        message: dict[str, Any] = {"role": "assistant", "content": "I look."}
        if self._calls:
            name, arguments = self._calls.pop(0)
            function = {"name": name, "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": f"call-{len(self.messages)}", "type": "function", "function": function}]
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body)


@asynccontextmanager
async def rollout_of(model: Model, shared: SharedResources) -> AsyncIterator[Rollout]:
    web, sync_web = httpx.AsyncClient(transport=httpx.MockTransport(model.answer)), httpx.Client()
    where = {"api_key": "k", "base_url": "http://model/v1"}
    async def no_role(name: str) -> Any:
        raise AssertionError(name)

    rollout = Rollout(
        client=RolloutClient(**where, http_client=web), http_client=web,
        sync_client=openai.OpenAI(**where, http_client=sync_web), sync_http_client=sync_web,
        **where, model="m", seed=0, is_eval=False, sandbox={}, shared=shared, open_role=no_role,
    )  # fmt: skip
    try:
        yield rollout
    finally:
        await rollout.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[SharedResources]:
    async with SharedResources() as resources:
        yield resources


async def played(task: dict[str, Any], script: Callable[[Image.Image], Sequence[Call]], shared: Any) -> Any:
    model = Model(script)
    async with rollout_of(model, shared) as rollout:
        reward = await browse(task, rollout)
    return reward, model, rollout.logged


in_one_loop = pytest.mark.asyncio(loop_scope="module")


@real
@slow
@in_one_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_is_solved_and_looks_the_same_each_time(kind: str, shared: SharedResources) -> None:
    task, pictures = TASKS[kind], []
    for _ in range(2):
        reward, model, logged = await played(task, lambda picture: plan(task, task["right"], picture), shared)
        assert (reward, logged["kind"], logged["errors"]) == (1.0, kind, 0)
        pictures.append(model.pictures)
        assert {opened(url).size for url in model.pictures} == {(448, 448)}
        assert [one["role"] for one in model.messages] == ["user", *["assistant", "tool"] * (logged["steps"] - 1)]
        assert len(model.pictures) == logged["steps"]
    assert pictures[0] == pictures[1]


WRONG = {
    "button": lambda task: {"colour": [one for one in task["colours"] if one not in task["right"]["colour"]][:1]},
    "form": lambda task: {"code": [task["right"]["code"][0] + "0"]},
    "boxes": lambda task: {"fruit": task["fruit"]},
    "search": lambda task: {"name": [max(task["prices"], key=task["prices"].get)]},
}
