"""The images of a micro-batch, as a model that takes images gets them: pixels, features, and positions.

    files ─▶ transformers' own processor ─▶ pixels ─▶ the model's vision tower ─▶ features, once for each image
                                                                                      │
    spans ─▶ the model's own positions, and the places of features among tokens ──────┴─▶ the model's own forward pass

Which tokens stand for images is told by spans alone: a sampled token that has an image's id is a token like any other.
"""

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from areal_agent.algorithms.batching import MicroBatch
from areal_agent.images import FORMATS, image_processor
from areal_agent.types import ImageSpan, PromptImage

KEPT_BYTES = 2**31
"""The pixels that are kept, of the newest images: sequences of one rollout are near each other, and have the same."""
SIZES = ((64, 96), (160, 64))
"""Width and height of the images of the proof."""


class Vision:
    """What a model with images needs besides tokens. It has no weights: the vision tower is the model's."""

    def __init__(self, processor: Any, config: Any) -> None:
        """Take what transformers makes of a folder's preprocessor_config.json and config.json."""
        self._processor = processor
        self._token_id = int(config.image_token_id)
        self._merged = int(config.vision_config.spatial_merge_size) ** 2  # patches that are one token
        self._special = [getattr(config, name) for name in vars(config) if name.endswith("_token_id")]
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}  # by file, the newest last

    @classmethod
    def load(cls, folder: Path, config: PreTrainedConfig) -> Self:
        """Read the processor of a Hugging Face folder. Raises what transformers raises."""
        return cls(image_processor(folder), config)

    @contextmanager
    def shown(self, decoder: nn.Module, batch: MicroBatch) -> Generator[dict[str, Any]]:
        """Within the context, call `decoder` with these arguments besides the tokens of `batch`, which has images."""
        device = batch.inputs.device
        shown = [one for row in batch.images for one in row]
        each = {one.span.digest: one.data for one in shown}
        numbers = {digest: number for number, digest in enumerate(each)}
        places = [numbers[one.span.digest] for one in shown]
        all_pixels, grids = zip(*map(self._of, each.values()), strict=True)
        pixels = torch.cat(all_pixels).to(device)
        for one, place in zip(shown, places, strict=True):
            self._require_size(one.span, grids[place])
        is_trained = any(one.requires_grad for part in tower_of(decoder) for one in part.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
            found: Any = cast(Any, decoder).get_image_features(pixels, torch.cat(grids).to(device), return_dict=True)
        sizes = [len(one) for one in found.pooler_output]
        found.pooler_output = [found.pooler_output[place] for place in places]
        if found.get("deepstack_features") is not None:
            found.deepstack_features = [_of_places(layer, sizes, places) for layer in found.deepstack_features]
        kinds = _kinds(batch.images, batch.inputs.shape[1])
        positions, _ = cast(Any, decoder).get_rope_index(
            batch.inputs.cpu(), kinds, image_grid_thw=torch.cat([grids[place] for place in places])
        )
        mask = kinds.bool().to(device)[..., None]

        def features_of(*_: Any, **__: Any) -> Any:
            return found

        def places_of(*_: Any, **__: Any) -> tuple[Tensor, None]:
            return mask, None

        # The model's own see an image as often as it is there, and look for ids.
        asked = {"get_image_features": features_of, "get_placeholder_mask": places_of}
        vars(decoder).update(asked)
        try:
            yield {"pixel_values": pixels, "position_ids": positions.to(device)}
        finally:
            for name in asked:
                del vars(decoder)[name]

    def plainly(self, images: Sequence[PromptImage], num_tokens: int, device: torch.device) -> dict[str, Any]:
        """Return what the model's own forward pass takes besides the tokens of one sequence."""
        if not images:
            return {}
        pixels, grids = zip(*(self._of(one.data) for one in images), strict=True)
        tensors = {
            "pixel_values": torch.cat(pixels),
            "image_grid_thw": torch.cat(grids),
            "mm_token_type_ids": _kinds([images], num_tokens),
        }
        return {name: one.to(device) for name, one in tensors.items()}

    def illustrated(self, row: Tensor, count: int) -> tuple[Tensor, tuple[PromptImage, ...]]:
        """Return tokens with so many images among them, two at most, for the proof."""
        is_special = torch.isin(row, torch.tensor(self._special, device=row.device))
        first, *texts = row.where(~is_special, row.max()).chunk(count + 1)
        images: list[PromptImage] = []
        for text, size in zip(texts, SIZES, strict=False):
            data = _noise(*size)
            pads = row.new_full((int(self._of(data)[1].prod()) // self._merged,), self._token_id)
            span = ImageSpan(digest=f"{size}", start=len(first), end=len(first) + len(pads))
            images.append(PromptImage(span=span, data=data))
            first = torch.cat([first, pads, text])
        return first, tuple(images)

    def _of(self, data: bytes) -> tuple[Tensor, Tensor]:
        """Return the patches of an image, and its grid [1, 3]."""
        made = self._kept.pop(data, None)
        if made is None:
            image = Image.open(io.BytesIO(data), formats=FORMATS).convert("RGB")
            done = self._processor(images=[image], return_tensors="pt")
            made = done["pixel_values"], done["image_grid_thw"]
        self._kept[data] = made
        while sum(pixels.nbytes for pixels, _ in self._kept.values()) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return made

    def _require_size(self, span: ImageSpan, grid: Tensor) -> None:
        needed, found = int(grid.prod()) // self._merged, span.end - span.start
        if needed != found:
            raise ValueError(
                f"image {span.digest} stands for {found} tokens, and is {needed} for this model: the settings of "
                "another image processor made the prompt; use those in the model's folder"
            )


def tower_of(decoder: nn.Module) -> list[nn.Module]:
    """Return what sees images: the parts of a decoder beside that of its text."""
    text = cast(PreTrainedModel, decoder).get_decoder()
    return [part for part in decoder.children() if part is not text]


def _of_places(layer: Tensor | Sequence[Tensor], sizes: Sequence[int], places: Sequence[int]) -> Any:
    """Return the features of the images that these places show; before transformers 5.18, all are one tensor."""
    if isinstance(layer, Tensor):
        each = layer.split(sizes)
        return torch.cat([each[place] for place in places])
    return [layer[place] for place in places]


def _kinds(images: Sequence[Sequence[PromptImage]], num_tokens: int) -> Tensor:
    """Return which tokens stand for an image, [R, T]: 1, and 0 for text."""
    kinds = torch.zeros(len(images), num_tokens, dtype=torch.int)
    for row, of_row in zip(kinds, images, strict=True):
        for one in of_row:
            row[one.span.start : one.span.end] = 1
    return kinds


def _noise(width: int, height: int) -> bytes:
    """Return an image of noise, in which no two rows or columns are alike."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
