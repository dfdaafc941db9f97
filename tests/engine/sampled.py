"""Proves which weights sampled an answer by transformers' own log-probabilities. A helper of tests."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

from areal_agent.types import GenerateRequest, GenerateResult, PromptImage, VersionSpan, WeightVersion

TOLERANCE = 1e-4

Truth = Callable[[Path], Any]
"""The type of the fixture `truth`."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model, and the version stamped on its tokens."""

    model: Path
    version: WeightVersion


def assert_sampled_by(weights: Weights, request: GenerateRequest, result: GenerateResult, truth: Truth) -> None:
    """Assert that these weights sampled the whole answer."""
    expected = truth(weights.model).logprobs(request.input_ids, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert result.versions == (VersionSpan(version=weights.version, start=0, end=len(result.token_ids)),)


def assert_swapped(old: Weights, new: Weights, request: GenerateRequest, result: GenerateResult, truth: Truth) -> int:
    """Assert that one set of weights sampled the beginning and the other the rest; return where the rest begins."""
    (cut,) = {span.start for span in result.versions} - {0}
    assert result.versions == (
        VersionSpan(version=old.version, start=0, end=cut),
        VersionSpan(version=new.version, start=cut, end=request.sampling.max_tokens),
    )
    before, after = (truth(one.model).logprobs(request.input_ids, result.token_ids) for one in (old, new))
    assert result.logprobs[:cut] == pytest.approx(before[:cut], abs=TOLERANCE)
    assert result.logprobs[cut:] == pytest.approx(after[cut:], abs=TOLERANCE)
    return cut


class Seeing:
    """Log-probabilities of a vision model for prompts with these images, which stand where their places are."""

    def __init__(self, folder: Path, images: Sequence[PromptImage]) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._process = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self._images = images

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
        ids, model = torch.tensor([[*prompt, *sampled]]), self.model.model
        is_image, inputs = torch.zeros_like(ids), model.get_input_embeddings()(ids)
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        if self._images:
            for span in (image.span for image in self._images):
                is_image[0, span.start : span.end] = 1
            pictures = [Image.open(io.BytesIO(image.data)).convert("RGB") for image in self._images]
            done = self._process(images=pictures, return_tensors="pt")
            seen = model.get_image_features(done.pixel_values, done.image_grid_thw).pooler_output
            inputs[is_image.bool()] = torch.cat(list(seen))
            positions, _ = model.get_rope_index(ids, mm_token_type_ids=is_image, image_grid_thw=done.image_grid_thw)
        logits = self.model(inputs_embeds=inputs, position_ids=positions, use_cache=False).logits[0]
        rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        return rows.gather(1, torch.tensor(list(sampled))[:, None])[:, 0].tolist()
