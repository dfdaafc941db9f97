"""Images in conversations:

- the three protocols give the same tokens, and those are the model's own: its template, expanded by its image processor
- the engine, the turn and the folder have each image where its tokens stand; what is kept of a request has no data
- a conversation with images continues: with results of calls, with an edited history, with a sampled pad in an answer
- every request of n answers has the images; they count as tokens of the prompt
- a reference stands for an image that the run has; a URL, for what is there, where the operator allows that; only the
  newest are remembered, and a host that does not answer holds up nobody else
- what cannot be taken is refused with a 400 that names the part; nothing of it reaches the disk or the engine
- any part for an image, however malformed, is answered with 200 or 400
- without a folder, and for a model that takes text only, images are refused with the reason
"""

import asyncio
import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.images import ImageIntake
from areal_agent.images import ImageFolder, digest_of, image_processor
from areal_agent.ledger.verify import ImageCheck
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ImageSpan
from tests.vision import make_vision_model, picture

from .conftest import ADMIN_KEY, MemoryJournal, OpenWorld, World
from .live import live_gateway

RED, WIDE = picture("red"), picture("blue", size=(112, 56), kind="JPEG")
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, kind), "detail": "high"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def block(data: bytes, kind: str = "image/png", **others: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source, **others}


QUESTION = user(text("what"), text("is it?"), part(RED), part(WIDE, "image/jpeg"), text("look"))
"""As chat completions write it."""

MARKED = block(RED, cache_control={"type": "ephemeral"})
BLOCKS = [text("what"), text("is it?"), MARKED, block(WIDE, "image/jpeg"), text("look")]
ITEMS = [
    {"type": "input_text", "text": "what"},
    {"type": "input_text", "text": "is it?"},
    {"type": "input_image", "image_url": data_url(RED), "detail": "auto"},
    {"type": "input_image", "image_url": data_url(WIDE, "image/jpeg")},
    {"type": "input_text", "text": "look"},
]
PROTOCOLS = {
    "/v1/chat/completions": {"messages": [QUESTION]},
    "/v1/messages": {"messages": [{"role": "user", "content": BLOCKS}], "max_tokens": 9},
    "/v1/responses": {"input": [{"role": "user", "content": ITEMS}]},
}


class Model:
    """transformers' own: the template and the tokenizer, and the image processor that expands pads."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = image_processor(folder)
        self.pad = int(self.tokenizer.convert_tokens_to_ids("<|image_pad|>"))

    def ids(self, messages: list[Any], images: list[bytes], tools: list[Any] | None = None) -> list[int]:
        pictures = [Image.open(io.BytesIO(data)) for data in images]
        grids = self.processor(images=pictures, return_tensors="np")["image_grid_thw"]
        written = self.tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
        first, *rest = written.split("<|image_pad|>")
        pads = ["<|image_pad|>" * (int(np.prod(grid)) // 4) for grid in grids]
        whole = first + "".join(pad + piece for pad, piece in zip(pads, rest, strict=True))
        return self.tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def seeing(vision_folder: Path) -> Renderer:
    return Renderer.load(vision_folder)


@pytest.fixture(scope="module")
def model(vision_folder: Path) -> Model:
    return Model(vision_folder)


@pytest.fixture
def images(tmp_path: Path) -> ImageFolder:
    return ImageFolder(tmp_path / "images")


@pytest.fixture
def open_seeing(open_world: OpenWorld, seeing: Renderer, images: ImageFolder) -> Any:
    """Opens a gateway of a model that sees; the texts are its answers."""

    async def open_it(*texts: str, **options: Any) -> World:
        script = options.pop("script", None) or [seeing.ids_of(text) for text in texts]
        options = {"model": seeing, "vocab_size": seeing.vocab_size, "images": images} | options
        return await open_world(script=script, **options)

    return open_it


def stored(images: ImageFolder) -> list[Path]:
    return [file for file in images.path.rglob("*") if file.is_file()]


def shown(world: World, index: int = -1) -> list[tuple[int, int, bytes]]:
    """Start, end and bytes of the images that the engine was given."""
    return [(one.span.start, one.span.end, one.data) for one in world.engine.requests[index].images]


async def test_protocols_agree_with_the_models_own_processor(
    open_seeing: Any, model: Model, images: ImageFolder
) -> None:
    world: World = await open_seeing(*["red<|im_end|>"] * 3)
    given = {"role": "user", "content": [text("what\nis it?"), {"type": "image"}, {"type": "image"}, text("look")]}
    expected = model.ids([given], [RED, WIDE])
    for index, (path, body) in enumerate(PROTOCOLS.items()):
        agent = await world.start()
        status, answer = await world.call(path, {"model": "model"} | body, key=agent.key)
        assert status == 200, answer
        assert list(world.engine.requests[index].input_ids) == expected
        (turn,) = agent.turns
        assert list(turn.new_prompt_ids) == expected
        assert [(one.start, one.end) for one in turn.images] == [one[:2] for one in shown(world)]
        assert turn.images[0] == ImageSpan(digest=images.keep(RED), start=turn.images[0].start, end=turn.images[0].end)
        assert [data for *_, data in shown(world)] == [RED, WIDE]
        assert {model.pad} == {id_ for start, end, _ in shown(world) for id_ in expected[start:end]}
        assert sum(end - start for start, end, _ in shown(world)) == expected.count(model.pad) == 12
        assert "base64" not in json.dumps(turn.request_delta)
        assert [*ImageCheck(images).check([turn])] == []
        assert [images.read(one.digest) for one in turn.images] == [RED, WIDE]
    assert len(stored(images)) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokenize", PROTOCOLS["/v1/chat/completions"]),
        ("/v1/messages/count_tokens", {"messages": PROTOCOLS["/v1/messages"]["messages"]}),
    ],
)
async def test_images_are_counted(path: str, body: Any, open_seeing: Any) -> None:
    world = await open_seeing("red<|im_end|>")
    agent = await world.start()
    reply = await agent.ask([QUESTION])
    _, counted = await world.call(path, {"model": "model"} | body, key=agent.key)
    assert reply.usage.prompt_tokens == counted.get("count", counted.get("input_tokens")) > 12
    assert min(counted.get("tokens", [0])) >= 0


async def test_a_conversation_goes_on(open_seeing: Any, model: Model, images: ImageFolder) -> None:
    """A result with an image, and an answer with a pad that the model sampled by itself."""
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    seeing: Renderer = (await open_seeing("")).renderer
    pads = [*seeing.ids_of("red"), model.pad, *seeing.ids_of("<|im_end|>")]
    world: World = await open_seeing(script=[seeing.ids_of(call), pads, seeing.ids_of("blue<|im_end|>")])
    agent = await world.start()
    messages: list[Any] = [QUESTION]
    for seen in ([RED], []):
        message = (await agent.ask(messages, tools=[LOOK])).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": one.id, "content": [*map(part, seen)]} for one in calls]
        messages += [] if calls else [user(part(RED), text("again"))]
    await agent.ask(messages, tools=[LOOK])
    turns, path = agent.turns, list[int]()
    for index, turn in enumerate(turns):
        assert turn.fork_reason is None and turn.fork_at == len(path)
        path += turn.new_prompt_ids
        assert list(world.engine.requests[index].input_ids) == path
        assert all(path[start:end] == [model.pad] * (end - start) for start, end, _ in shown(world, index))
        path += turn.completions[0].token_ids
    assert [data for *_, data in shown(world)] == [RED, WIDE, RED, RED]
    own = [
        {"role": "user", "content": [text("what\nis it?"), {"type": "image"}, {"type": "image"}, text("look")]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": [{"type": "image"}]},
    ]
    assert list(world.engine.requests[1].input_ids) == model.ids(own, [RED, WIDE, RED], [LOOK])
    await agent.end()
    assert world.gateway.stats().history_mismatches == 0
    assert [*ImageCheck(images).check(turns)] == []


async def test_an_edited_history_forks(open_seeing: Any, images: ImageFolder) -> None:
    world: World = await open_seeing(*["red<|im_end|>"] * 3)
    agent = await world.start()
    for first in (part(RED), part(WIDE, "image/jpeg")):
        await agent.ask([user(first, text("?"))])
    said = {"role": "assistant", "content": "red"}
    await agent.ask([user(part(RED), text("?")), said, user(text("sure?"))])
    assert [turn.parent for turn in agent.turns] == [None, None, agent.turns[0].completions[0].id]
    assert [len(turn.images) for turn in agent.turns] == [1, 1, 0]
    assert [*ImageCheck(images).check(agent.turns)] == []
    assert [data for *_, data in shown(world)] == [RED]


async def test_every_answer_is_given_the_images(open_seeing: Any) -> None:
    world: World = await open_seeing("red<|im_end|>", "blue<|im_end|>")
    await (await world.start()).ask([QUESTION], n=2)
    assert [[data for *_, data in shown(world, index)] for index in (0, 1)] == [[RED, WIDE]] * 2


async def test_a_reference_stands_for_an_image(open_seeing: Any, images: ImageFolder, tmp_path: Path) -> None:
    world: World = await open_seeing("red<|im_end|>")
    url = f"sha256:{images.keep(RED)}"
    lie = {"type": "image_url", "image_url": {"url": url}, "width": 9999, "height": 1}
    await (await world.start()).ask([user(lie)])
    assert [(end - start, data) for start, end, data in shown(world)] == [(4, RED)]
    (tmp_path / "other").touch()  # as readable as an image
    assert images.file(images.keep(RED)).stat().st_mode == (tmp_path / "other").stat().st_mode


async def test_urls_are_fetched_from_where_the_operator_allows(
    open_seeing: Any, tmp_path: Path, images: ImageFolder
) -> None:
    """Each once: what stands there later is another picture, and the conversation has the first one."""
    served = [RED]
    app = web.Application()

    async def it(_: web.Request) -> web.Response:
        return web.Response(body=served[0])

    async def away(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/it.png"})

    app.router.add_get("/it.png", it)
    app.router.add_get("/away", away)
    async with TestServer(app) as server:
        host, folder = f"127.0.0.1:{server.port}", tmp_path / "pictures"
        folder.mkdir()
        (folder / "a wide one.jpg").write_bytes(WIDE)
        (folder / "out").symlink_to(images.path)
        (folder / "circle").symlink_to("circle")
        limits = Limits(image_sources=(host, folder.as_uri()), max_image_bytes=4000)
        world: World = await open_seeing("red<|im_end|>", "red<|im_end|>", limits=limits)
        session = await world.start()
        urls = [f"http://{host}/it.png", (folder / "a wide one.jpg").as_uri()]
        for _ in range(2):
            await session.ask([user(*({"type": "image_url", "image_url": {"url": url}} for url in urls))])
            assert [data for *_, data in shown(world)] == [RED, WIDE]
            served[0] = picture("blue")
        for url, message in (
            (f"http://{host}/away", "answers 302"),
            (f"http://{host}/none", "answers 404"),
            (f"http://me@{host}/it.png", "from where nothing is fetched"),
            ("http://127.0.0.1:1/it.png", "from where nothing is fetched"),
            (f"{folder.as_uri()}/../{images.path.name}", "from where nothing is fetched"),
            (f"{folder.as_uri()}/none.png", "cannot be read"),
            (f"{folder.as_uri()}/%00", "cannot be read"),
            (f"{folder.as_uri()}/out", "from where nothing is fetched"),
            (f"{folder.as_uri()}/circle", "cannot be read"),
            ("http://[", "cannot be read"),
        ):
            status, answer = await session.post_chat(messages=[user({"type": "image_url", "image_url": {"url": url}})])
            assert (status, answer["error"]["param"]) == (400, "messages[0].content[0]"), url
            assert message in answer["error"]["message"], answer


async def test_what_is_remembered_is_bounded(seeing: Renderer, images: ImageFolder, tmp_path: Path) -> None:
    """What stands at the oldest URL is read again."""
    first, second = tmp_path / "1.png", tmp_path / "2.png"
    for num_known, expected in ((2, [RED, WIDE, RED]), (1, [RED, WIDE, picture("blue")])):
        limits = Limits(image_sources=(tmp_path.as_uri(),), max_known_images=num_known)
        intake, seen = ImageIntake(seeing.vision(), images, limits), []
        first.write_bytes(RED)
        second.write_bytes(WIDE)
        for file in (first, second, first):
            url = {"type": "image_url", "image_url": {"url": file.as_uri()}}
            (taken,) = (await intake.taken({"messages": [user(url)]}))["messages"][0]["content"]
            seen.append(images.read(digest_of(taken)))
            first.write_bytes(picture("blue"))
        assert seen == expected


async def test_a_host_that_does_not_answer_holds_nobody_up(open_seeing: Any) -> None:
    """However many wait for it: no other call waits for a thread."""
    may_answer, app = asyncio.Event(), web.Application()

    async def slow(_: web.Request) -> web.Response:
        await may_answer.wait()
        return web.Response(body=RED)

    app.router.add_get("/slow", slow)
    async with TestServer(app) as server:
        host = f"127.0.0.1:{server.port}"
        world: World = await open_seeing(*["red<|im_end|>"] * 41, limits=Limits(image_sources=(host,)))
        url = {"type": "image_url", "image_url": {"url": f"http://{host}/slow"}}
        waiting = [asyncio.create_task((await world.start()).post_chat(messages=[user(url)])) for _ in range(40)]
        await (await world.start()).ask([user(part(RED))])
        may_answer.set()
        assert {status for status, _ in await asyncio.gather(*waiting)} == {200}


def bomb() -> bytes:
    """A PNG whose header promises more pixels than it has."""
    header = RED[12:16] + struct.pack(">II", 20_000, 20_000) + RED[24:29]
    return RED[:12] + header + struct.pack(">I", zlib.crc32(header)) + RED[33:]


def made(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return made(Image.new("RGB", (60, 56)), "JPEG", exif=exif)


def animated() -> bytes:
    frames = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    return made(frames[0], "PNG", save_all=True, append_images=frames[1:])


REFUSED: dict[str, tuple[Any, str]] = {
    "a bomb": (part(bomb()), "20000 x 20000 pixels"),
    "a truncated PNG": (part(picture("red")[:-40]), "damaged image/png"),
    "a truncated JPEG": (part(WIDE[:-60], "image/jpeg"), "damaged image/jpeg"),
    "an empty one": (part(b""), "no PNG, JPEG or WebP"),
    "a GIF": (part(made(Image.new("RGB", (56, 56)), "GIF")), "no PNG, JPEG or WebP"),
    "a wrong type": (part(RED, "image/jpeg"), "its content is image/png"),
    "SVG": (part(b"<svg/>", "image/svg+xml"), "no PNG, JPEG or WebP"),
    "a thin one": (part(made(Image.new("RGB", (1, 500)), "PNG")), "not for this model"),
    "a turned one": (part(turned(), "image/jpeg"), "turned by its EXIF"),
    "an animation": (part(animated()), "animation"),
    "a transparent one": (part(made(Image.new("RGBA", (56, 56), (1, 2, 3, 4)), "PNG")), "transparent"),
    "too many bytes": (part(bytes(5000)), "bytes, and 4000 are taken at most"),
    "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "not base64"),
    "a URL": ({"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}, "from where nothing is fetched"),
    "a bare file": ({"type": "image_url", "image_url": {"url": "iVBOR" * 2000}}, "more than 8192 characters"),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "from where nothing is fetched"),
    "a path": ({"type": "image_url", "image_url": {"url": "sha256:../../x"}}, "this run does not have"),
    "another run's": ({"type": "image_url", "image_url": {"url": "sha256:" + "a" * 64}}, "this run does not have"),
    "a bare URL": ({"type": "image_url", "image_url": data_url(RED)}, "no image part"),
    "a file's id": ({"type": "input_image", "file_id": "file-1"}, "no image part"),
    "audio": ({"type": "input_audio", "input_audio": {"data": ""}}, "no audio"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_name_the_part(name: str, open_seeing: Any, images: ImageFolder) -> None:
    wrong, message = REFUSED[name]
    world: World = await open_seeing("red<|im_end|>", limits=Limits(max_image_bytes=4000))
    status, answer = await (await world.start()).post_chat(messages=[user(text("?")), user(text("?"), wrong)])
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == "messages[1].content[1]"
    assert (world.engine.requests, stored(images)) == ([], [])


SAID = {"role": "assistant", "content": [part(RED)]}
PLACES: list[tuple[str, Any, str]] = [
    ("/v1/chat/completions", {"messages": [{**SAID, "role": "system"}, user(text("?"))]}, "messages[0]"),
    ("/v1/chat/completions", {"messages": [user(text("?")), SAID, user(text("?"))]}, "messages[1]"),
    ("/v1/chat/completions", {"messages": [user(*[part(RED)] * 4)]}, "there are 4 images"),
    ("/v1/messages", {"messages": [user(text("?"))], "system": BLOCKS, "max_tokens": 9}, "system[2]"),
    ("/v1/responses", {"input": [{"role": "developer", "content": ITEMS}]}, "input[0]"),
]


@pytest.mark.parametrize(("path", "body", "message"), PLACES)
async def test_images_only_where_they_belong(path: str, body: Any, message: str, open_seeing: Any) -> None:
    world: World = await open_seeing("red<|im_end|>", limits=Limits(max_images=3))
    status, answer = await world.call(path, {"model": "model"} | body, key=(await world.start()).key)
    assert (status, message in answer["error"]["message"]) == (400, True), answer


async def test_without_a_folder(open_seeing: Any) -> None:
    world: World = await open_seeing("red<|im_end|>", images=None)
    status, answer = await (await world.start()).post_chat(messages=[QUESTION])
    assert (status, "no folder" in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize("path", PROTOCOLS)
async def test_a_model_of_text_refuses_them(path: str, open_world: OpenWorld, images: ImageFolder) -> None:
    """A reference, too, which only a gateway that has taken an image writes."""
    world = await open_world("red<|im_end|>", images=images)
    agent = await world.start()
    status, answer = await world.call(path, {"model": "model"} | PROTOCOLS[path], key=agent.key)
    assert (status, "takes text" in answer["error"]["message"]) == (400, True), answer
    taken = {"type": "image_url", "image_url": {"url": f"sha256:{images.keep(RED)}"}, "width": 56, "height": 56}
    status, answer = await agent.post_chat(messages=[user(taken)])
    assert (status, "takes text only" in answer["error"]["message"]) == (400, True), answer


JSON = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=5) | st.just(data_url(RED))
VALUES = st.recursive(
    JSON, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("url", "type", "data")), inner)
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(("image_url", "image", "input_image", "tool_result")) | VALUES},
    optional={name: VALUES for name in ("image_url", "source", "content", "output", "width", "height", "text")},
)


@pytest.fixture(scope="module")
def live(seeing: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a gateway on a thread of its own, and the key of a session."""
    images = ImageFolder(tmp_path_factory.mktemp("run") / "images")
    with live_gateway(seeing, MemoryJournal(), vocab_size=seeing.vocab_size, images=images) as (url, _):
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        started = requests.post(url + "/rl/start_session", json={"task_id": "t"}, headers=headers, timeout=20)
        yield url, started.json()["api_key"]


@given(content=st.lists(PARTS, max_size=3) | VALUES, role=st.sampled_from(("user", "tool", "system")) | VALUES)
@pytest.mark.parametrize("path", PROTOCOLS)
def test_malformed_parts(path: str, content: Any, role: Any, live: tuple[str, str]) -> None:
    url, key = live
    item = {"role": role, "content": content, "tool_call_id": "c"}
    body = {"model": "model", "max_tokens": 9, "messages": [item], "input": [item]}
    body.pop("messages" if path.endswith("responses") else "input")
    body |= {"max_output_tokens": body.pop("max_tokens")} if path.endswith("responses") else {}
    reply = requests.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=20)
    assert reply.status_code in (200, 400), reply.text
