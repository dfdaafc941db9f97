"""Lets SGLang's server take images as files, at the places that a request names. For launcher.py, without areal_agent.

SGLang itself would look for the places of images by the id of the pads, which an answer may have sampled as well, and
would decode and tokenize the prompt for it. So here its processor is given a prompt of images alone. What it makes of
them is put at the places of the request, whose ids stay as they are.

An image arrives as `areal-agent-image:START:END:BASE64`, which a server without this file refuses.
"""

import asyncio
import importlib
import io
from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
IMAGE = "areal-agent-image"  # as server.py has it
MANAGER = "sglang.srt.managers.tokenizer_manager"


def register() -> None:
    """Register the hooks with SGLang, which installs them before it makes its processor."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(f"{MANAGER}.get_mm_processor", around_get, hooks.HookType.AROUND)
    hooks.HookRegistry.register(f"{MANAGER}.TokenizerManager._validate_one_request", refuse, hooks.HookType.BEFORE)


def refuse(manager: Any, asked: Any, *_: Any) -> None:
    """Refuse images where SGLang would silently leave them out: for a model that it serves without its vision."""
    if manager.mm_processor is None and asked.contains_mm_input():
        raise ValueError("this server was started without the model's vision; see SGLang's --enable-multimodal")


def around_get(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make a processor that takes our images."""
    processor = original(*args, **options)
    process = processor.process_mm_data_async

    async def process_mm_data_async(*, image_data: Any, input_text: Any, **others: Any) -> Any:
        if not image_data or not all(isinstance(one, str) and one.startswith(f"{IMAGE}:") for one in image_data):
            return await process(image_data=image_data, input_text=input_text, **others)
        return await place(processor, process, list(input_text), [one.split(":") for one in image_data], others)

    processor.process_mm_data_async = process_mm_data_async
    return processor


async def place(processor: Any, process: Any, ids: list[int], parts: Sequence[Sequence[str]], others: Any) -> Any:
    """Return the processed prompt. Raises ValueError unless each image has as many tokens as its place."""
    images = await asyncio.to_thread(open_all, [file for *_, file in parts])
    places = [(int(start), int(end)) for _, start, end, _ in parts]
    alone = [id_ for start, end in places for id_ in ids[max(0, start - 1) : start + 1] + ids[end:][:1]]
    made = await process(image_data=images, input_text=alone, **others)
    theirs = [sum(end + 1 - start for start, end in item.offsets) for item in made.mm_items]
    if theirs != (ours := [end - start for start, end in places]):
        raise ValueError(f"the images of this request have {ours} tokens in the prompt, and SGLang counts {theirs}")
    for item, (start, end) in zip(made.mm_items, places, strict=True):
        item.offsets = [(start, end - 1)]
    had_positions, seen = made.mrope_positions is not None, [0] * len(ids)
    for start, end in places:  # all that positions depend on
        seen[max(0, start - 1) : end] = ids[max(0, start - 1) : end]
    made.input_ids = ids
    made.padded_input_ids = type(made).build_padded_input_ids(ids, made.mm_items)
    made.mrope_positions, made.mrope_position_delta = processor.compute_mrope_positions(seen, made.mm_items)
    if had_positions != (made.mrope_positions is not None) or made.token_type_ids is not None:
        raise ValueError("SGLang cannot be told the places of this model's images: use vLLM for it")
    return made


def open_all(files: Sequence[str]) -> Sequence[Image.Image]:
    """Decode the files as the trainer does, where SGLang may decode on a GPU, with other pixels."""
    try:
        return [Image.open(io.BytesIO(b64decode(file)), formats=FORMATS).convert("RGB") for file in files]
    except OSError as error:
        raise ValueError(f"an image of this request cannot be read: {error}") from error
