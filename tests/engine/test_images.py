"""Images of a request: they arrive over our own wire, and at vLLM and SGLang in a form that their launchers make exact.

- places that are out of order, outside of the prompt, or on different tokens are refused, as is what is no base64
- the embedded engine, and a server of a model without vision, refuse them; the fake one keeps them
"""

import hashlib
import json
from base64 import b64encode
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from areal_agent.engine.fake import FakeEngine
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.engine.wire import generate
from areal_agent.engine.wire.fields import WireError
from areal_agent.errors import EngineRejected
from areal_agent.types import GenerateRequest, ImageSpan, PromptImage, SamplingParams

from ..vision import picture
from .sglang import scripted as sglang
from .vllm import scripted as vllm

RED = picture("red")
DIGEST = hashlib.sha256(RED).hexdigest()


def ask(*places: tuple[int, int], ids: tuple[int, ...] = (1, 3, 9, 9, 4, 9, 9)) -> GenerateRequest:
    images = tuple(PromptImage(span=ImageSpan(digest=DIGEST, start=one, end=end), data=RED) for one, end in places)
    return GenerateRequest(request_id="r1", input_ids=ids, sampling=SamplingParams(max_tokens=4), images=images)


def test_they_arrive_as_they_were_sent():
    request = ask((2, 4), (5, 7))
    assert generate.GenerateCall.read(orjson.dumps(generate.encode_request(request))).request() == request
    assert "images" not in generate.encode_request(ask())


@pytest.mark.parametrize("data", ["not base64!", 5, None])
def test_a_file_that_is_no_base64(data):
    body = generate.encode_request(ask((2, 4)))
    body["images"][0]["data"] = data
    with pytest.raises(WireError, match=r"images\.0\.data is"):
        generate.GenerateCall.read(orjson.dumps(body))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(5, 7), (2, 4)], "a place from 2 to 4; it must be after the image before it, which ends at 7"),
        ([(2, 4), (3, 4)], "a place from 3 to 4; it must be after .* ends at 4"),
        ([(5, 8)], "from 5 to 8; .* inside of the 7 tokens"),
        ([(4, 4)], "a place from 4 to 4"),
        ([(2, 5)], "from 2 to 5; .* on tokens of one id"),
    ],
)
async def test_wrong_places_are_refused(places, message):
    engine = FakeEngine(lambda _: (5,))
    with pytest.raises(EngineRejected, match=message):
        await engine.generate(ask(*places))
    await engine.generate(ask((2, 4)))
    assert engine.requests == [ask((2, 4))]


async def test_who_sees_nothing_refuses(tiny, serve):
    async with serve(tiny) as served:
        with pytest.raises(EngineRejected, match=r"engine\.backend to vllm or sglang"):
            await served.engine.generate(ask((2, 4)))
    async with vllm.answering(vllm.ScriptedServer(str(tiny))) as engine:
        with pytest.raises(EngineRejected, match="serves a model that takes no images"):
            await engine.generate(ask((2, 4)))


@pytest.fixture
def vision(tiny, tmp_path) -> Path:
    """A folder that looks like a model with vision."""
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    return tmp_path


async def test_vllm_gets_files_and_their_places(vision):
    server = vllm.ScriptedServer(str(vision))
    server.will_answer([5])
    async with vllm.answering(server) as engine:
        await engine.load(vision, vllm.OLD)
        await engine.generate(ask((2, 4), (5, 7)))
        await engine.generate(ask())
    with_images, without = server.bodies
    assert with_images["token_ids"] == list(ask().input_ids) and "features" not in without
    assert with_images["features"] == {
        "mm_hashes": {"image": [f"{DIGEST}:{vllm.OLD}"] * 2},
        "mm_placeholders": {"image": [{"offset": 2, "length": 2}, {"offset": 5, "length": 2}]},
        "kwargs_data": {"image": [b64encode(RED).decode()] * 2},
    }
    assert "/reset_encoder_cache" in server.calls


async def test_sglang_gets_files_and_their_places(vision):
    server = sglang.ScriptedServer(str(vision))
    server.will_answer([5])
    async with sglang.serving(server) as url, aclosing(ForeignEngine(SglangServer(url))) as engine:
        await engine.generate(ask((2, 4), (5, 7)))
        await engine.generate(replace(ask(), request_id="r2"))
    with_images, without = server.bodies
    file = b64encode(RED).decode()
    assert with_images["input_ids"] == list(ask().input_ids)
    assert with_images["image_data"] == [f"areal-agent-image:2:4:{file}", f"areal-agent-image:5:7:{file}"]
    assert not {"images", "image_data"} & set(without)
