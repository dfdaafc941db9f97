"""Web pages in a real Chromium, played by scripts that know only what a model sees and writes.

1. Each kind of task is solved by clicks and keys; pictures of the window's size come with the goal and each result, and
the same play has the same ones; 2. another form, or none, earns 0.0, and calls are bounded; 3. bad calls are text and
change nothing; 4. a page reaches nothing but its site; 5. a tab ends with its rollout, also by cancellation; 6. a
browser that dies is `SandboxError`, and the next rollout has another; 7. tasks differ between splits, and bad arguments
are named. The model is a server of the test's own.
"""

import asyncio
import base64
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import pytest_asyncio
from PIL import Image, ImageColor

pytest.importorskip("playwright", reason="playwright is not installed; pip install 'areal_agent[test]'")

from areal_agent import ConfigError, Rollout, SandboxError
from areal_agent.rollout.context import SharedResources
from envs.browser.chromium import Chromium, Tab, open_browser
from envs.browser.site import Site
from envs.browser.tasks import KINDS, load
from envs.browser.workflow import browse
from tests.view.browser import CHROMIUM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),  # one browser for all
]

TASKS = {task["kind"]: task for task in load("train", 3, size=len(KINDS), max_steps=30)}
WRONG = {
    "button": {"colour": [one for one in TASKS["button"]["colours"] if [one] != TASKS["button"]["right"]["colour"]]},
    "form": {"code": ["12"]},
    "boxes": {"fruit": TASKS["boxes"]["fruit"]},
    "search": {"name": [max(TASKS["search"]["prices"], key=TASKS["search"]["prices"].get)]},
}
BAD = (  # the tool, what the model wrote, what it reads
    ("fly", "{}", "Error: there is no tool 'fly'; there are click, "),
    ("click", '{"x": 448, "y": 1}', "Error: the point is outside the window of 448 x 448"),
    ("click", '{"x": -1' + "0" * 400 + ', "y": 1}', "Error: the point is outside"),
    ("click", '{"x": true, "y": 1.5}', 'Error: call click with {"x": "integer", "y": "integer"}'),
    ("click", "[1, 2]", "Error: call click"),
    ("click", "", "Error: call click"),
    ("click", "[" * 100_000, "Error: call click"),
    ("type", '{"text": "a\\nb"}', "Error: only 200 printable"),
    ("type", '{"text": "\\ud800"}', "Error: only 200 printable"),
    ("type", json.dumps({"text": "a" * 201}), "Error: only 200 printable"),
    ("key", '{"name": "F5"}', "Error: there is no key 'F5'; there are Enter, "),
)
Call = tuple[str, dict[str, Any]]
Script = Callable[[Image.Image], Sequence[Call]]
TAB, SPACE, ENTER, ALL = (("key", {"name": name}) for name in ("Tab", "Space", "Enter", "Control+A"))


def opened(url: str) -> Image.Image:
    """The picture of a data URL, which has to be a PNG."""
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=["PNG"]).convert("RGB")


def sending(task: dict[str, Any], form: dict[str, list[str]]) -> Script:
    """The calls that send a form."""

    def calls(picture: Image.Image) -> list[Call]:
        match task["kind"]:
            case "button":
                colour = ImageColor.getrgb(form["colour"][0])
                places = np.argwhere((np.asarray(picture) == colour).all(-1))
                y, x = map(int, places[len(places) // 2])
                return [("click", {"x": x, "y": y})]
            case "form":
                return [TAB, ("type", {"text": "?"}), ALL, ("type", {"text": form["code"][0]}), ENTER]
            case "boxes":
                marks = [[TAB, SPACE] if name in form["fruit"] else [TAB] for name in task["fruit"]]
                return [*(call for calls in marks for call in calls), TAB, ENTER]
            case _:
                good = form["name"][0].split()[1]
                place = [name for name in task["prices"] if good in name].index(form["name"][0])
                links = [TAB] * (3 + place)  # after the field and its button
                return [TAB, ("type", {"text": good}), ENTER, *links, ENTER, TAB, ENTER]

    return calls


class Model:
    """A server that answers with the calls of a script, made from the first picture, and keeps what it was sent."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.left: list[Call] = []
        self.messages: list[Any] = []

    @property
    def pictures(self) -> list[str]:
        parts = [part for one in self.messages if one["role"] != "assistant" for part in one["content"]]
        return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.messages = json.loads(request.content)["messages"]
        if len(self.messages) == 1:
            self.left = [*self._script(opened(self.pictures[0]))]
        message: dict[str, Any] = {"role": "assistant", "content": "I look."}
        if self.left:
            name, arguments = self.left.pop(0)
            function = {"name": name, "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": f"call-{len(self.messages)}", "type": "function", "function": function}]
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body)


def rollout_of(shared: SharedResources, client: Any) -> Rollout:
    return Rollout(
        client=client, http_client=None, sync_client=None, sync_http_client=None, base_url="", api_key="", model="m",
        seed=0, is_eval=False, sandbox={}, shared=shared, open_role=None,
    )  # fmt: skip


async def played(task: dict[str, Any], script: Script, shared: SharedResources) -> tuple[float, Model, dict[str, Any]]:
    model = Model(script)
    async with httpx.AsyncClient(transport=httpx.MockTransport(model.answer)) as web:
        rollout = rollout_of(shared, openai.AsyncOpenAI(api_key="k", base_url="http://model/v1", http_client=web))
        try:
            return await browse(task, rollout), model, rollout.logged
        finally:
            await rollout.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[SharedResources]:
    async with SharedResources() as resources:
        yield resources


@pytest_asyncio.fixture(loop_scope="module")
async def chromium(shared: SharedResources) -> Chromium:
    return await rollout_of(shared, SimpleNamespace()).shared(open_browser)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_is_solved_and_looks_the_same_each_time(kind: str, shared: SharedResources) -> None:
    task, pictures = TASKS[kind], []
    for _ in range(2):
        reward, model, logged = await played(task, sending(task, task["right"]), shared)
        assert (reward, logged["errors"], {opened(url).size for url in model.pictures}) == (1.0, 0, {(448, 448)})
        assert [one["role"] for one in model.messages] == ["user", *["assistant", "tool"] * (logged["steps"] - 1)]
        assert len(model.pictures) == logged["steps"]  # the goal's, and all but the last call's
        pictures.append(model.pictures)
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize("kind", KINDS)
async def test_another_form_or_none_earns_nothing(kind: str, shared: SharedResources) -> None:
    task = TASKS[kind]
    reward, model, _ = await played(task, lambda picture: sending(task, WRONG[kind])(picture) * 2, shared)
    assert reward == 0.0 and model.left  # the first form is the end
    assert (await played(task, lambda _: (), shared))[0] == 0.0
    reward, model, logged = await played(task | {"max_steps": 2}, lambda _: [TAB] * 5, shared)
    assert (reward, logged["steps"], len(model.left)) == (0.0, 2, 3)


async def test_bad_calls_are_text_and_change_nothing(chromium: Chromium) -> None:
    async with chromium.open(Site(TASKS["boxes"]), 448, 448) as tab:
        before = await tab.picture()
        for name, arguments, said in BAD:
            assert said in await tab.call(name, arguments), (name, arguments)
        assert await tab.picture() == before
        await tab.call("scroll", '{"dy": 1' + "0" * 400 + "}")
        assert await tab.picture() != before
        await tab.call("scroll", '{"dy": -500}')
        assert await tab.picture() == before


async def test_a_page_reaches_nothing_but_its_site(chromium: Chromium) -> None:
    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(writer)

    class Curious(Site):
        """A page that asks elsewhere, and turns green when it gets nothing."""

        def answer(self, *_: str) -> str:
            turn = "document.body.style.background = 'lime'; isLeft = false"
            script = f"isLeft = true; fetch('{elsewhere}', {{mode: 'no-cors'}}).catch(() => {{ {turn} }})"
            return f"<body><script>{script}</script>"

    visits: list[object] = []
    async with await asyncio.start_server(visit, "127.0.0.1", 0) as server:
        elsewhere = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with chromium.open(Curious(TASKS["form"]), 448, 448) as tab:
            assert opened(await tab.picture()).getpixel((200, 200)) == ImageColor.getrgb("lime")
    assert not visits


async def test_a_tab_ends_with_its_rollout(chromium: Chromium) -> None:
    tabs: asyncio.Queue[Tab] = asyncio.Queue()

    async def stay() -> None:
        async with chromium.open(Site(TASKS["form"]), 448, 448) as tab:
            tabs.put_nowait(tab)
            await asyncio.Event().wait()

    rollout = asyncio.create_task(stay())
    tab = await tabs.get()
    await tab.picture()
    rollout.cancel()
    await asyncio.wait({rollout})
    with pytest.raises(SandboxError, match="closed"):
        await tab.picture()


async def test_a_browser_that_dies_is_not_the_models_failure(chromium: Chromium, shared: SharedResources) -> None:
    async with chromium.open(Site(TASKS["form"]), 448, 448) as tab:
        for process in psutil.Process().children(recursive=True):
            if "chrom" in process.name():
                process.kill()
        with pytest.raises(SandboxError, match="the browser failed"):
            await tab.picture()
    assert (await played(TASKS["button"], sending(TASKS["button"], TASKS["button"]["right"]), shared))[0] == 1.0


async def test_bad_arguments_are_named_and_splits_differ() -> None:
    for values, message in (
        ({"split": "dev"}, "split is 'dev'; valid: 'train', 'test'"),
        ({"kinds": ["form", "maze"]}, "give a list of some of button, form, boxes, search"),
        ({"kinds": "form"}, "kinds is 'form'"),
        ({"width": 100}, "width is 100; give a whole number, at least 224"),
        ({"max_steps": 0}, "max_steps is 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load(**{"split": "train", "seed": 0, **values})
    train, test = ([one | {"id": "", "margin": ()} for one in load(split, 0, size=400)] for split in ("train", "test"))
    assert not [one for one in test if one in train]
    assert load("train", 5, size=9) == load("train", 5, size=9) != load("train", 6, size=9)
