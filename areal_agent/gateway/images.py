"""Takes the images out of an agent's request, before anything else reads it.

Each protocol has parts for images: chat completions `image_url`, Messages `image`, Responses `input_image`. The data in
such a part is decoded, checked, and kept in the run's `ImageFolder`. A reference takes its place in the part, beside
the image's size. So what is compared and journaled of a conversation is small, and names images that are on disk::

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0..."}}
    {"type": "image_url", "image_url": {"url": "sha256:9f86d0..."}, "width": 56, "height": 56}

A client may send such a reference itself, for an image that the run has. What engines and trainers would not all see
alike is refused: a transparent image, a turned one, an animation.
"""

import asyncio
import binascii
import hashlib
import io
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from areal_agent.errors import LedgerError, RequestError, unwritable
from areal_agent.gateway.bodies import GROWING, IMAGE_FORMS, Limits
from areal_agent.images import ImageFolder
from areal_agent.tokens.vision import Vision
from areal_agent.types import ImageSpan, JsonObject, PromptImage

REFERENCE = "sha256:"

MAX_CACHED_BYTES = 64 * 2**20
"""The bytes of recent images in memory; others are read from the disk."""

FORMATS: Mapping[str, tuple[re.Pattern[bytes], Callable[[io.BytesIO], ImageFile]]] = {
    "image/png": (re.compile(rb"\x89PNG\r\n\x1a\n"), PngImageFile),
    "image/jpeg": (re.compile(rb"\xff\xd8\xff"), JpegImageFile),
    "image/webp": (re.compile(rb"RIFF....WEBP", re.DOTALL), WebPImageFile),
}
"""How files begin, and what reads them; the readers alone, because `Image.open` warns of sizes in its own way."""

OPAQUE = 255
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[^,;]*)*;base64,", re.ASCII)


class ImageIntake:
    """The images of one gateway's requests. Use it from one event loop; the work is done in threads.

    >>> intake = ImageIntake(vision, ImageFolder(run / "images"), Limits())                 # doctest: +SKIP
    >>> body = await intake.taken(body)                                                     # doctest: +SKIP
    """

    def __init__(self, vision: Vision, folder: ImageFolder | None, limits: Limits) -> None:
        self._vision = vision
        self._folder = folder
        self._limits = limits
        self._sizes: dict[str, tuple[int, int]] = {}  # width and height of the images that were checked, by digest
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._num_recent_bytes = 0
        self._lock = threading.Lock()  # guards the recent bytes
        self._decoding = threading.Lock()  # a large image takes hundreds of megabytes: one at a time

    async def taken(self, body: JsonObject) -> JsonObject:
        """Return a request's body with references to its images; without images it is `body` itself.

        Raises RequestError that names the part for an image that is not taken, DiskFull if it cannot be kept.
        """
        num_images = sum(1 for _ in _image_parts(body))
        if not num_images:
            return body
        if num_images > self._limits.max_images:
            raise RequestError(
                f"the request has {num_images} images, and this gateway takes {self._limits.max_images} at most; leave "
                "out older ones",
                code="too_many_images",
            )
        return await asyncio.to_thread(self._over_body, body)

    async def of(self, spans: Sequence[ImageSpan]) -> tuple[PromptImage, ...]:
        """Return the images of a prompt with their bytes."""
        read = [self._recent.get(span.digest) or await asyncio.to_thread(self._read, span.digest) for span in spans]
        return tuple(PromptImage(span=span, data=data) for span, data in zip(spans, read, strict=True))

    # ------------------------------------------------------------------------------------------- parts of a body

    def _over_body(self, body: JsonObject) -> JsonObject:
        over = {
            name: [self._over_item(item, f"{name}[{index}]") for index, item in enumerate(body[name])]
            for name in GROWING
            if isinstance(body.get(name), list)
        }
        return {**body, **over}

    def _over_item(self, item: Any, where: str) -> Any:
        if any(_image_parts(item)) and item.get("role") not in (None, "user", "tool"):
            raise _refusal(
                where,
                f"has the role {item['role']!r:.80} and an image; images go into users' messages and the results of "
                "calls",
            )
        return self._over(item, where)

    def _over(self, item: Any, where: str) -> Any:
        """Return a message, an item or a part with references to the images in it; itself if it has none."""
        if not any(_image_parts(item)):
            return item
        if _is_image(item):
            return self._reference(item, where)
        over = {
            name: [self._over(part, f"{where}.{name}[{index}]") for index, part in enumerate(item[name])]
            for name in ("content", "output")
            if isinstance(item.get(name), list)
        }
        return {**item, **over}

    def _reference(self, part: JsonObject, where: str) -> JsonObject:
        """Keep the image of a part, and return the part with a reference to it."""
        url = _url_of(part)
        if url is None:
            raise _refusal(where, f"is no image part that this gateway knows; send {IMAGE_FORMS[part['type']]}")
        if url.startswith(REFERENCE):
            digest = url.removeprefix(REFERENCE)
            width, height = self._size_of_kept(digest, where)
        else:
            digest, (width, height) = self._keep(*self._decoded(url, where), where)
        return {**_with_url(part, REFERENCE + digest), "width": width, "height": height}

    def _decoded(self, url: str, where: str) -> tuple[str | None, bytes]:
        """Return the type that a data URL says, if it says one, and its bytes."""
        head = _DATA_URL.match(url)
        if head is None:
            raise _refusal(
                where,
                f"has the URL {url!r:.80}, and this gateway fetches nothing: send the image itself, as "
                "data:image/png;base64,...",
            )
        self._require_few_bytes((len(url) - head.end()) * 3 // 4 - 2, where)
        try:
            return head[1], binascii.a2b_base64(url[head.end() :], strict_mode=True)
        except ValueError as error:
            raise _refusal(where, f"has data that is not base64 ({error}); encode the file's bytes again") from None

    # ----------------------------------------------------------------------------------------- keeping and reading

    def _keep(self, said: str | None, data: bytes, where: str) -> tuple[str, tuple[int, int]]:
        """Check an image unless it is known, bring it to disk, and return its digest and size."""
        if self._folder is None:
            raise _refusal(where, "is an image, and this gateway has no folder to keep images in; send text alone")
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._sizes:
            size = self._checked(said, data, where)
            try:
                self._folder.keep(data)
            except OSError as error:
                raise unwritable(self._folder.file(digest), error) from error
            self._sizes[digest] = size
        self._remember(digest, data)
        return digest, self._sizes[digest]

    def _size_of_kept(self, digest: str, where: str) -> tuple[int, int]:
        if digest not in self._sizes:
            try:
                data = self._read(digest)
            except LedgerError:
                raise _refusal(
                    where, f"names the image {digest!r:.80}, which this run does not have; send it"
                ) from None
            self._sizes[digest] = self._checked(None, data, where)
        return self._sizes[digest]

    def _read(self, digest: str) -> bytes:
        if self._folder is None:
            raise LedgerError("this gateway has no folder of images")
        data = self._folder.read(digest)
        self._remember(digest, data)
        return data

    def _remember(self, digest: str, data: bytes) -> None:
        with self._lock:
            if digest not in self._recent:
                self._num_recent_bytes += len(data)
                self._recent[digest] = data
            self._recent.move_to_end(digest)
            while self._num_recent_bytes > MAX_CACHED_BYTES:
                self._num_recent_bytes -= len(self._recent.popitem(last=False)[1])

    # -------------------------------------------------------------------------------------------------- checking

    def _require_few_bytes(self, num_bytes: int, where: str) -> None:
        if num_bytes > self._limits.max_image_bytes:
            raise _refusal(
                where,
                f"is an image of {num_bytes} bytes, and this gateway takes {self._limits.max_image_bytes} at most; "
                "make it smaller",
            )

    def _checked(self, said: str | None, data: bytes, where: str) -> tuple[int, int]:
        """Decode an image once and return its width and height. Raises RequestError for one that is not taken."""
        self._require_few_bytes(len(data), where)
        kind = next((kind for kind, (beginning, _) in FORMATS.items() if beginning.match(data)), None)
        if kind is None:
            raise _refusal(where, f"is no PNG, JPEG or WebP file: it begins with {data[:12]!r}; convert it to one")
        if said is not None and said.replace("/jpg", "/jpeg") != kind:
            raise _refusal(where, f"says that it is {said!r:.80}, and its content is {kind}; correct its type")
        with self._decoding:
            try:
                with FORMATS[kind][1](io.BytesIO(data)) as image:
                    width, height = image.size
                    self._require_few_pixels(width, height, where)
                    image.load()
                    is_turned = image.getexif().get(ORIENTATION, 1) != 1
                    is_animated = getattr(image, "is_animated", False)
                    is_transparent = image.has_transparency_data and _least_alpha(image) < OPAQUE
            except RequestError:
                raise
            except Exception as error:  # foreign code on foreign data
                raise _refusal(where, f"is a damaged {kind} file ({error}); send a whole one") from error
        for is_so, what, remedy in (
            (is_turned, "is turned by its EXIF data", "save it upright, without them"),
            (is_animated, "is an animation", "send one picture of it"),
            (is_transparent, "is transparent in places", "put it on a background"),
        ):
            if is_so:
                raise _refusal(where, f"{what}, which engines would not see alike; {remedy}")
        try:
            self._vision.num_pads(width, height)
        except RequestError as error:
            raise _refusal(where, f"is not for this model: {error.message}") from error
        return width, height

    def _require_few_pixels(self, width: int, height: int, where: str) -> None:
        if width * height > self._limits.max_image_pixels:
            raise _refusal(
                where,
                f"is an image of {width} x {height} pixels, and this gateway takes {self._limits.max_image_pixels} "
                "pixels at most; make it smaller",
            )


def _is_image(part: JsonObject) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in IMAGE_FORMS


def _image_parts(item: Any) -> Iterator[JsonObject]:
    """Yield the parts for images in a body, a message, an item or a part."""
    if not isinstance(item, dict):
        return
    item = cast("JsonObject", item)
    if _is_image(item):
        yield item
    else:
        for name in (*GROWING, "content", "output"):
            if isinstance(parts := item.get(name), list):
                for part in cast("list[Any]", parts):
                    yield from _image_parts(part)


def _url_of(part: JsonObject) -> str | None:
    """Return the URL of an image part of any protocol; None if it has none."""
    match part:
        case (
            {"type": "image_url", "image_url": {"url": str(url)}}
            | {"type": "input_image", "image_url": str(url)}
            | {"type": "image", "source": {"type": "url", "url": str(url)}}
        ):
            return url
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return f"data:{kind};base64,{data}"
        case _:
            return None


def _with_url(part: JsonObject, url: str) -> JsonObject:
    match part["type"]:
        case "image_url":
            return {**part, "image_url": {**part["image_url"], "url": url}}
        case "input_image":
            return {**part, "image_url": url}
        case _:
            return {**part, "source": {"type": "url", "url": url}}


def _least_alpha(image: ImageFile) -> int:
    least, _ = cast("tuple[int, int]", image.convert("RGBA").getchannel("A").getextrema())
    return least


def _refusal(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}", param=where, code="invalid_image")
