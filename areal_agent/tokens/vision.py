"""What a model that sees makes of an image: how many tokens it takes, and what a chat template writes around them.

The content of a message with images is a list, as chat templates take it. A renderer makes one text of it, in which an
unguessable *mark* stands for each image, so that templates and stand-ins meet text alone::

    content     [{"type": "text", "text": "What is this?"}, {"type": "image", "digest": ..., "width": 56, "height": 56}]
    text        What is this?<|vision_start|>MARK<|vision_end|>
    ids         ... <|vision_start|> -1 -1 -1 -1 <|vision_end|>
    shown       ... <|vision_start|> pad pad pad pad <|vision_end|>, and the span of the four

Among the ids of a session's prompts the tokens of image number k are -1 - k, so that a pad that the model sampled by
itself is never taken for one. `Vision.shown` turns them into the model's own at the border: for engines and journals.

A model's image processor says how many tokens an image takes. `Vision.load` compares that with what the processor makes
of blank images; the renderer that uses it proves the ids of whole conversations.
"""

import secrets
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
from PIL import Image

from areal_agent.errors import ConfigError, RequestError
from areal_agent.images import PROCESSOR, has_processor, image_processor
from areal_agent.tokens.template import ChatTemplate
from areal_agent.types import ImageSpan, JsonObject

PROBES = ("a" * 64, 56, 84), ("b" * 64, 280, 56)
"""Digest, width and height of the images of probe conversations."""
MAX_PROBE_TOKENS = 2**12
"""A processor that makes more of an image of the probe may take gigabytes for it."""


class Vision:
    """The images of one model. Create it with `load`; safe to use from several threads.

    >>> vision = Vision.load(Path("model"), template, {5: "<|image_pad|>"})                   # doctest: +SKIP
    >>> vision.num_pads(56, 56)                                                             # doctest: +SKIP
    4
    """

    def __init__(self, processor: Any, *, pad_id: int, before: str, after: str) -> None:
        self.pad_id = pad_id
        """The token that stands for a part of an image."""
        self.before, self.after = before, after  # what the template writes around an image
        self._processor = processor
        self._secret = f"{secrets.randbelow(10**38):038}"  # begins each mark; no message can contain it
        self._images: list[tuple[str, int]] = []  # digest and number of tokens of each
        self._numbers: dict[str, int] = {}  # by digest
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: Path, template: ChatTemplate, text_of: Mapping[int, str]) -> Self | None:
        """Read what a model's folder says about images; None for a model that takes text alone.

        `text_of` has the texts of the tokenizer's added tokens. Raises ConfigError for a model whose images are not
        understood here.
        """
        config = path / "config.json"
        try:
            pad_id = orjson.loads(config.read_bytes()).get("image_token_id") if config.is_file() else None
        except (AttributeError, ValueError) as error:
            raise ConfigError(f"{config} is no JSON object: {error}") from error
        if pad_id is None:
            return None
        if not has_processor(path):  # asked before the processor, which takes seconds and loads torch
            raise ConfigError(f"there is no {path / PROCESSOR}")
        if pad_id not in text_of:
            raise ConfigError(f"{config} has the image_token_id {pad_id!r}, which the tokenizer does not add")
        try:
            processor = image_processor(path)
        except Exception as error:  # transformers raises almost anything on a damaged file
            raise ConfigError(f"the image processor in {path} cannot be loaded: {error}") from error
        before, after = _around(template, text_of[pad_id])
        vision = cls(processor, pad_id=pad_id, before=before, after=after)
        for _, width, height in PROBES:
            vision._require_count(width, height)
        return vision

    # ------------------------------------------------------------------------------------------ how many tokens

    def num_pads(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size. Raises RequestError if the model takes no such image.

        It is a whole number of merged patches, which the model's image processor counts.
        """
        try:
            num_patches: int = self._processor.get_number_of_image_patches(height, width, {})
        except Exception as error:  # foreign code: what it raises differs from model to model
            raise RequestError(
                f"an image has {width} x {height} pixels, and the model takes none of this shape ({error}); send "
                "another part of it, or another size",
                param="messages",
                code="invalid_image",
            ) from error
        return num_patches // self._processor.merge_size**2

    def _require_count(self, width: int, height: int) -> None:
        """Raise ConfigError unless the processor makes as many patches of an image as it says."""
        try:
            if (said := self.num_pads(width, height)) > MAX_PROBE_TOKENS:
                raise ValueError(f"it says that {width} x {height} pixels are {said} tokens")
            grid = self._processor(images=[Image.new("RGB", (width, height))], return_tensors="np")["image_grid_thw"]
            made = int(np.prod(grid)) // self._processor.merge_size**2
            if made != said:
                raise ValueError(f"it makes {made} tokens of {width} x {height} pixels, and says {said}")
        except Exception as error:  # foreign code, as above
            raise ConfigError(
                f"{type(self._processor).__name__} does not count patches as Qwen2-VL's image processor does "
                f"({type(error).__name__}: {error})"
            ) from error

    # ------------------------------------------------------------------------------------------ marks and ids

    def mark(self, digest: str, width: int, height: int) -> str:
        """Return the text that stands for an image in rendered text: digits, so no template changes its case."""
        number = self._numbers.get(digest)
        if number is None:
            num_pads = self.num_pads(width, height)
            with self._lock:
                number = self._numbers.setdefault(digest, len(self._images))
                if number == len(self._images):
                    self._images.append((digest, num_pads))
        return f"{self._secret}{number:010}"

    def ids_of(self, mark: str) -> list[int] | None:
        """Return the ids that stand for an image in a session's prompts; None if the text is no mark."""
        if not mark.startswith(self._secret):
            return None
        number = int(mark[len(self._secret) :])
        return [-1 - number] * self._images[number][1]

    def pieces(self, token_ids: Sequence[int]) -> Iterator[str | list[int]]:
        """Cut the ids of a prompt at its images. Yield their marks, and the ids between them."""
        for token_id, same in groupby(token_ids, key=lambda token_id: min(token_id, 0)):
            ids = list(same)
            if not token_id:
                yield ids
            for _ in range(len(ids) // self._images[-1 - token_id][1] if token_id else 0):
                yield f"{self._secret}{-1 - token_id:010}"

    def shown(self, token_ids: "array[int]") -> "tuple[array[int], tuple[ImageSpan, ...]]":
        """Return the ids of a prompt, or of a part of it, as the model has them, and where its images stand."""
        ids = np.frombuffer(token_ids, np.int32)
        (places,) = np.nonzero(ids < 0)
        spans: list[ImageSpan] = []
        while len(places):
            start = int(places[0])
            digest, num_pads = self._images[-1 - token_ids[start]]
            spans.append(ImageSpan(digest=digest, start=start, end=start + num_pads))
            places = places[num_pads:]
        if not spans:
            return token_ids, ()
        return array("i", np.where(ids < 0, np.int32(self.pad_id), ids).tobytes()), tuple(spans)


def _around(template: ChatTemplate, pad: str) -> tuple[str, str]:
    """Return what a template writes before and after the one pad of an image between two texts."""
    words = "salamander", "axolotl"
    content = [{"type": "text", "text": words[0]}, {"type": "image"}, {"type": "text", "text": words[1]}]
    try:
        text = template.render([{"role": "user", "content": content}])
    except RequestError as error:
        raise ConfigError(f"the chat template takes no images: {error.__cause__}") from error
    between = text.partition(words[0])[2].partition(words[1])[0]
    before, found, after = between.partition(pad)
    if not found or pad in after or words[1] not in text:
        raise ConfigError(f"the chat template writes {between!r:.80} for an image instead of {pad!r} once")
    return before, after


def probe_conversations() -> Iterator[tuple[list[JsonObject], list[JsonObject]]]:
    """Yield conversations with two images: in a user's message, then in the result of a call.

    Each is as a template itself takes it, and as a renderer does, with digests and sizes.
    """
    own: list[JsonObject] = [{"type": "image"} for _ in PROBES]
    ours: list[JsonObject] = [{"type": "image", "digest": one, "width": w, "height": h} for one, w, h in PROBES]
    contents = [[images[0], {"type": "text", "text": "Are they\nequal?"}, images[1]] for images in (own, ours)]
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    asked: list[JsonObject] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    for before, after in (([], {"role": "user"}), (asked, {"role": "tool", "tool_call_id": "call00001"})):
        as_lists, as_marks = ([*before, {**after, "content": content}] for content in contents)
        yield as_lists, as_marks
