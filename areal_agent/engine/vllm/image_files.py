"""Lets vLLM's server take images as files, at the places that a request names. For launcher.py, without areal_agent.

vLLM's route for token ids takes images as tensors with their places. It can also take files, but then it looks for the
places itself, by the id of the pads, which an answer may have sampled as well. So here `features` has the places, and
files instead of tensors. vLLM's own processor makes tensors of them in this process, and remembers them.

A hash is that of the file, a colon, and the label of the weights that the request is sent to. The latter keeps what the
old weights saw in an image from answers of the new ones.
"""

import asyncio
import importlib
import io
import operator
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
SERVING = "vllm.entrypoints.scale_out.token_in_token_out.serving"


class ImageFilesTaken:
    """ASGI middleware, which vLLM makes in each process that serves. It leaves the application as it is."""

    def __new__(cls, app: Any) -> Any:
        take_image_files()
        return app


def take_image_files() -> None:
    """Make the server of this process take them."""
    serving: Any = importlib.import_module(SERVING)
    serve = serving.ServingTokens.serve_tokens

    async def serve_tokens(self: Any, request: Any, raw_request: Any = None) -> Any:
        if request.features is not None:
            try:
                request.features.kwargs_data = {"image": await tensors(self.online_renderer.renderer, request)}
            except (ValueError, OSError) as error:  # OSError: the file is no image
                return self.create_error_response(f"the images of this request cannot be taken: {error}")
        return await serve(self, request, raw_request)

    serving.ServingTokens.serve_tokens = serve_tokens
    serving.mm_kwargs_from_features = operator.attrgetter("kwargs_data")


async def tensors(renderer: Any, request: Any) -> Sequence[Any]:
    """Return the processed images of a request. Raises ValueError unless each has as many tokens as its place."""
    ids, features = request.token_ids, request.features
    places = [(one.offset, one.offset + one.length) for one in features.mm_placeholders["image"]]
    images = await asyncio.to_thread(open_all, renderer, features.kwargs_data["image"])
    alone = [id_ for start, end in places for id_ in ids[max(0, start - 1) : start + 1] + ids[end:][:1]]
    prompt = {
        "prompt_token_ids": alone,  # each image as one pad, between its marks
        "multi_modal_data": {"image": images},
        "multi_modal_uuids": {"image": [one.partition(":")[0] for one in features.mm_hashes["image"]]},
    }
    (rendered,) = await renderer.render_cmpl_async([prompt], skip_mm_cache=True)
    found = rendered["mm_placeholders"]["image"]
    if any(one.is_embed is not None for one in found):
        raise ValueError("this model has other tokens among those of an image")
    if (theirs := [one.length for one in found]) != (ours := [end - start for start, end in places]):
        raise ValueError(f"they have {ours} tokens in the prompt, and vLLM counts {theirs}")
    return rendered["mm_kwargs"]["image"]


def open_all(renderer: Any, files: Sequence[str]) -> Sequence[Image.Image]:
    """Decode the files, and see to it that they will be processed as the trainer does: by PIL, not by torchvision."""
    processor = renderer.get_mm_processor().info.get_hf_processor()
    if "Pil" not in type(processor.image_processor).__name__:
        by_pil = importlib.import_module("transformers").AutoImageProcessor.from_pretrained
        processor.image_processor = by_pil(renderer.model_config.model, backend="pil")
    return [Image.open(io.BytesIO(b64decode(file)), formats=FORMATS).convert("RGB") for file in files]
