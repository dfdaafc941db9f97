"""Web pages in a real Chromium, played by scripts that know only what a model sees and writes.

1. Each kind of task is solved by clicks and keys; pictures of the window's size come with the goal and each result, and
the same play has the same ones; 2. another form, or none, earns 0.0, and calls are bounded; 3. bad calls are text and
change nothing; 4. a page reaches nothing but its site; 5. a tab ends with its rollout, also by cancellation; 6. a
browser that dies is `SandboxError`, and later rollouts have another; 7. tasks differ between splits, and bad arguments
are named. The gateway is real, and its engine makes the calls of a script.
"""

import asyncio
import base64
import io
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from PIL import Image, ImageColor

pytest.importorskip("playwright", reason="playwright is not installed; pip install 'areal_agent[test]'")

from areal_agent import ConfigError, SandboxError, Trajectory
from areal_agent.engine.fake import FakeEngine
from areal_agent.images import ImageFolder
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.testing import MemoryJournal, open_scripted, tool_call
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import GenerateRequest, SessionPurpose, Task
from envs.browser.chromium import Chromium, Tab, open_browser
from envs.browser.site import Site
from envs.browser.tasks import KINDS, load
from envs.browser.workflow import browse
from tests.view.browser import CHROMIUM
from tests.vision import make_vision_model

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
Script = Callable[[Image.Image], list[Call]]
Play = Callable[[dict[str, Any], Script], Awaitable["Played"]]
TAB, SPACE, ENTER, ALL = (("key", {"name": name}) for name in ("Tab", "Space", "Enter", "Control+A"))


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB")


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


@dataclass(frozen=True)
class Played:
    trajectory: Trajectory
    pictures: list[bytes]  # that the engine was sent
    left: list[Call]  # that the script had not made at the end


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def play(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Play]:
    """Rollouts in one process, behind a gateway whose engine makes the calls of a script."""
    folder = tmp_path_factory.mktemp("vision")
    renderer, journal = Renderer.load(make_vision_model(folder)), MemoryJournal()
    script: Script = list
    pictures: list[bytes] = []
    left: list[Call] = []

    def reply(request: GenerateRequest) -> list[int]:
        pictures[:] = [one.data for one in request.images]
        if len(pictures) == 1:
            left[:] = script(opened(pictures[0]))
        name, arguments = left.pop(0) if left else (None, {})
        return renderer.ids_of((tool_call(name, **arguments) if name else "I stop.") + "<|im_end|>")

    async def play(task: dict[str, Any], its_script: Script) -> Played:
        nonlocal script
        script = its_script
        one = Task(id="t", data=task)
        purpose = SessionPurpose.EVAL
        spec = RolloutSpec(session_id=f"s{len(journal.closed)}", group_id="g", task=one, seed=0, purpose=purpose)
        await runner.run(spec)
        return Played(journal.closed[-1], [*pictures], [*left])

    options = {"renderer": renderer, "journal": journal, "sandbox": {}, "images": ImageFolder(folder / "images")}
    async with open_scripted(browse, FakeEngine(reply, vocab_size=renderer.vocab_size), **options) as runner:
        yield play


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Chromium]:
    async with open_browser(None) as chromium:
        yield chromium


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_is_solved_and_looks_the_same_each_time(kind: str, play: Play) -> None:
    first, second = [await play(TASKS[kind], sending(TASKS[kind], TASKS[kind]["right"])) for _ in range(2)]
    trajectory = first.trajectory
    assert (trajectory.error, trajectory.rewards.final) == (None, 1.0)
    num_steps = len(trajectory.turns)
    assert trajectory.logged == {"kind": kind, "steps": num_steps, "errors": 0}
    assert [len(turn.images) for turn in trajectory.turns] == [1] * num_steps  # each new one, in one conversation
    assert len(first.pictures) == num_steps and {opened(one).size for one in first.pictures} == {(448, 448)}
    assert first.pictures == second.pictures


@pytest.mark.parametrize("kind", KINDS)
async def test_another_form_or_none_earns_nothing(kind: str, play: Play) -> None:
    task = TASKS[kind]
    wrong = await play(task, lambda picture: sending(task, WRONG[kind])(picture) * 2)
    silent = await play(task, lambda _: [])
    idle = await play(task | {"max_steps": 2}, lambda _: [TAB] * 5)
    assert [one.trajectory.rewards.final for one in (wrong, silent, idle)] == [0.0] * 3
    assert wrong.left and len(idle.left) == 3  # the first form is the end, and so is the last call


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
            assert opened(base64.b64decode((await tab.picture()).split(",")[1])).getpixel(
                (200, 200)
            ) == ImageColor.getrgb("lime")
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


async def test_a_browser_that_dies_is_not_the_models_failure(chromium: Chromium) -> None:
    async with chromium.open(Site(TASKS["form"]), 448, 448) as tab:
        for process in psutil.Process().children(recursive=True):
            if "chrom" in process.name():
                process.kill()
        with pytest.raises(SandboxError, match="the browser failed"):
            await tab.picture()
    with suppress(SandboxError):  # one more may find out
        async with chromium.open(Site(TASKS["form"]), 448, 448):
            pass
    async with chromium.open(Site(TASKS["form"]), 448, 448) as tab:
        await tab.picture()


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
