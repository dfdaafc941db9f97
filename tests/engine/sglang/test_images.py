"""Images in front of a real server of a vision model (slow): what it samples has the log-probabilities of transformers.

- one image, two of different sizes, one with transparency, none; pads that are tokens like others
- several requests share an image; another picture at the same place is not mistaken for it by the cache of prefixes
- a stream has what the answer has; a push in the middle of it: the rest is that of the new weights with new eyes
- weights by torch.distributed
- a file that is no image, or has another number of tokens, is refused
"""

import asyncio
import hashlib
import io
from collections.abc import AsyncGenerator
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from areal_agent.cluster.servers import start_sglang
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.errors import EngineRejected
from areal_agent.types import GenerateRequest, ImageSpan, PauseMode, PromptImage, SamplingParams
from areal_agent.weights.channels import DiskChannel, DistributedChannel, layout

from ...vision import make_vision_model, picture
from ..sampled import TOLERANCE, Seeing, assert_sampled_by, assert_swapped
from ..servers import STARTUP_S, running_server
from .conftest import DEADLINE_S, Stage, Watched, open_stage

pytestmark = pytest.mark.slow

ON_CPU = {"max_context_tokens": 1000, "kv_tokens": 8192, "startup_timeout_s": STARTUP_S}
BEGIN, END, PAD = 3, 4, 5  # the tokens around an image, and those of it
TEXT = tuple(range(30, 50))
RED, BLUE = ((picture(colour), 4) for colour in ("red", "blue"))


def noise(size: tuple[int, int], mode: str = "RGB") -> bytes:
    """A picture that PIL and torchvision scale to different pixels."""
    file, (width, height) = io.BytesIO(), size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    Image.fromarray(pixels, mode).save(file, "PNG")
    return file.getvalue()


def ask(*pieces: tuple[int, ...] | tuple[bytes, int], number: int = 0, max_tokens: int = 12) -> GenerateRequest:
    """Make a request of texts, and of images with the number of their tokens."""
    ids: list[int] = []
    images: list[PromptImage] = []
    for piece in pieces:
        if isinstance(piece[0], bytes):
            data, num_tokens = piece
            start, digest = len(ids) + 1, hashlib.sha256(data).hexdigest()
            images.append(PromptImage(span=ImageSpan(digest=digest, start=start, end=start + num_tokens), data=data))
            ids += [BEGIN, *[PAD] * num_tokens, END]
        else:
            ids += piece
    sampling = SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True)
    return GenerateRequest(
        request_id=f"request-{number:04}", input_ids=tuple(ids), sampling=sampling, images=tuple(images)
    )


def seeing(request: GenerateRequest):
    return partial(Seeing, images=request.images)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [make_vision_model(tmp_path_factory.mktemp("vision"), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def vision_server(sglang_python, models, tmp_path_factory):
    options = {"backend": "sglang", "device": "cpu", **ON_CPU}
    with running_server(start_sglang, sglang_python, models[0], tmp_path_factory.mktemp("sglang"), **options) as url:
        yield SglangServer, url


@pytest.fixture
async def stage(vision_server, models) -> AsyncGenerator[Stage]:
    kind, url = vision_server
    async with asyncio.timeout(DEADLINE_S), open_stage(kind(url), *models, num_long=800) as stage:
        yield stage


CASES = {
    "one": [TEXT, RED, TEXT[:5]],
    "two": [TEXT, RED, TEXT[:5], (noise((130, 90)), 15), TEXT],
    "two and more": [TEXT, RED, TEXT[:5], (noise((130, 90)), 15), TEXT, TEXT],
    "at the beginning, transparent": [(noise((56, 56), "RGBA"), 4), TEXT],
    "none": [TEXT],
    "pads": [(1, PAD, 7), TEXT, (PAD,), RED, TEXT[:5], (PAD, PAD), (noise((120, 90)), 12), (BEGIN, PAD, END, BEGIN)],
}


@pytest.mark.parametrize("case", CASES)
async def test_images_are_seen_at_their_places(stage, case):
    request = ask(*CASES[case])
    assert_sampled_by(stage.before, request, await stage.engine.generate(request), seeing(request))


async def test_pictures_are_kept_apart(stage):
    ahead = TEXT * 3
    requests = [ask(ahead, one, TEXT[:3], number=n) for n, one in enumerate([RED, RED, RED, BLUE, RED, BLUE])]
    answers = [await stage.engine.generate(requests[0])]
    answers += await asyncio.gather(*map(stage.engine.generate, requests[1:]))
    for request, answer in zip(requests, answers, strict=True):
        assert_sampled_by(stage.before, request, answer, seeing(request))
    assert [answer.cached_tokens > 0 for answer in answers[1:]] == [True] * 5
    red, blue = (
        Seeing(stage.model, request.images).logprobs(request.input_ids, answers[0].token_ids)
        for request in (requests[0], requests[3])
    )
    assert max(abs(a - b) for a, b in zip(red, blue, strict=True)) > 10 * TOLERANCE


async def test_new_weights_see_anew(stage, tmp_path):
    request = ask(TEXT, RED, TEXT[:5], max_tokens=stage.num_long)
    watched = Watched(stage.engine, request)
    await watched.until(5)
    tensors = load_file(stage.other / "model.safetensors")
    await stage.push(DiskChannel(tmp_path, torch.float32).write(tensors.items()), PauseMode.RETRACT)
    answer = await watched.answer
    assert tuple(watched.token_ids) == answer.token_ids
    assert_swapped(stage.before, stage.after, request, answer, seeing(request))
    again = ask(TEXT, RED, TEXT[:5], number=1)
    assert_sampled_by(stage.after, again, await stage.engine.generate(again), seeing(again))


async def test_weights_by_the_processes(stage):
    request, tensors = ask(TEXT, RED), load_file(stage.other / "model.safetensors")
    entries = layout(tensors.items(), torch.float32)
    told = DistributedChannel(entries, torch.device("cpu"), host="127.0.0.1", bucket_bytes=2**16, timeout_s=60.0)
    with closing(told):
        await stage.push(told.write(tensors.items()))
        assert_sampled_by(stage.after, request, await stage.engine.generate(request), seeing(request))


@pytest.mark.parametrize("wrong", [(b"no picture", 4), (noise((130, 90)), 4)])
async def test_wrong_images_are_refused(stage, wrong):
    with pytest.raises(EngineRejected, match="image"):
        await stage.engine.generate(ask(TEXT, wrong))
    request = ask(TEXT, RED)
    assert_sampled_by(stage.before, request, await stage.engine.generate(request), seeing(request))
