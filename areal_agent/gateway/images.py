"""Takes the images out of an agent's request, before anything else reads it.

Each protocol has parts for images: chat completions `image_url`, Messages `image`, Responses `input_image`. The data in
such a part is decoded, checked, and kept in the run's `ImageFolder`. A reference takes its place in the part, beside
the image's size. So what is compared and journaled of a conversation is small, and names images that are on disk::

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0..."}}
    {"type": "image_url", "image_url": {"url": "sha256:9f86d0..."}, "width": 56, "height": 56}

A client may send such a reference itself, for an image that the run has. A URL is fetched, once, where the operator
allows its host or folder (`Limits.image_sources`). What engines and trainers would not all see alike is refused: a
transparent image, a turned one, an animation.
"""

import asyncio
import binascii
import hashlib
import io
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import is_not
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import httpx
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from areal_agent.errors import LedgerError, RequestError, unwritable
from areal_agent.gateway.bodies import GROWING, IMAGE_FORMS, Limits
from areal_agent.images import ImageFolder, content_type
from areal_agent.tokens.vision import Vision
from areal_agent.types import ImageSpan, JsonObject, PromptImage

REFERENCE = "sha256:"

LISTS = (*GROWING, "content", "output")
"""The lists in a body that have parts for images, or what has such parts."""

MAX_CACHED_BYTES = 64 * 2**20
"""The bytes of recent images in memory; others are read from the disk."""

READERS: Mapping[str, Callable[[io.BytesIO], ImageFile]] = {
    "image/png": PngImageFile,
    "image/jpeg": JpegImageFile,
    "image/webp": WebPImageFile,
}
"""What reads files; not `Image.open`, which warns of sizes in its own way."""

FETCH_TIMEOUT_S = 30.0
MAX_URL = 8192
"""A longer one is most likely the image itself, with a wrong beginning."""
MAX_HEAD = 256
"""The longest beginning of a data URL, up to its data."""

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
        self._fetched: dict[str, str] = {}  # digests by URL: what is there may change, and a conversation may not
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._num_recent_bytes = 0
        self._lock = threading.Lock()  # guards the recent bytes
        self._decoding = threading.Lock()  # a large image takes hundreds of megabytes: one at a time

    async def taken(self, body: JsonObject) -> JsonObject:
        """Return a request's body with references to its images; without images it is `body` itself.

        Raises RequestError that names the part for an image that is not taken, DiskFull if it cannot be kept.
        """
        parts = list(_image_parts(body))
        if not parts:
            return body
        if len(parts) > self._limits.max_images:
            raise RequestError(
                f"the request has {len(parts)} images, and this gateway takes {self._limits.max_images} at most; leave "
                "out older ones",
                code="too_many_images",
            )
        return _with(body, {id(part): await self._reference(part, where, role) for where, part, role in parts})

    async def of(self, spans: Sequence[ImageSpan]) -> tuple[PromptImage, ...]:
        """Return the images of a prompt with their bytes."""
        read = [self._recent.get(span.digest) or await asyncio.to_thread(self._read, span.digest) for span in spans]
        return tuple(PromptImage(span=span, data=data) for span, data in zip(spans, read, strict=True))

    # ------------------------------------------------------------------------------------------ parts of a body

    async def _reference(self, part: JsonObject, where: str, role: Any) -> JsonObject:
        """Keep the image of a part, and return the part with a reference to it."""
        if role not in (None, "user", "tool"):
            raise _refusal(where, f"is an image of the {role!r:.80}; send images of users and in results of calls")
        url = _url_of(part)
        if url is None:
            raise _refusal(where, f"is no image part that this gateway knows; send {IMAGE_FORMS[part['type']]}")
        if url.startswith(REFERENCE):
            digest = url.removeprefix(REFERENCE)
            if digest not in self._sizes:
                await asyncio.to_thread(self._measure_kept, digest, where)
        elif url.startswith("data:"):
            digest = await asyncio.to_thread(self._keep, lambda: self._decoded(url, where), where)
        elif url in self._fetched:
            digest = self._fetched[url]
        else:
            read = await self._fetch(url, where)
            digest = self._fetched.setdefault(url, await asyncio.to_thread(self._keep, read, where))
        width, height = self._sizes[digest]
        return {**_with_url(part, REFERENCE + digest), "width": width, "height": height}

    def _decoded(self, url: str, where: str) -> tuple[str | None, bytes]:
        """Return the type that a data URL says, if it says one, and its bytes."""
        head = _DATA_URL.match(url, 0, MAX_HEAD)
        if head is None:
            raise _refusal(where, f"has the URL {url!r:.80}; send data:image/png;base64,...")
        num_bytes, most = (len(url) - head.end()) * 3 // 4, self._limits.max_image_bytes
        if num_bytes > most + 2:  # padding counts as bytes
            raise _refusal(where, f"is an image of {num_bytes} bytes, and this gateway takes {most}; make it smaller")
        try:
            return head[1], binascii.a2b_base64(url[head.end() :], strict_mode=True)
        except ValueError as error:
            raise _refusal(where, f"has data that is not base64 ({error}); encode the file's bytes again") from None

    async def _fetch(self, url: str, where: str) -> Callable[[], tuple[None, bytes]]:
        """Return what reads the image at a URL that the operator allows. Of a host, it is read when this returns."""
        sources, most = self._limits.image_sources, self._limits.max_image_bytes
        try:
            if len(url) > MAX_URL:
                raise ValueError(f"it has more than {MAX_URL} characters")
            parts = urlsplit(url)
            if parts.scheme == "file" and not parts.netloc:
                return lambda: (None, self._of_folder(url, Path(unquote(parts.path)), where))
            if parts.scheme in ("http", "https") and parts.netloc.lower() in sources:
                data = bytearray()
                async with asyncio.timeout(FETCH_TIMEOUT_S), self._client.stream("GET", url) as response:
                    if response.status_code != 200:
                        raise _unreadable(url, where, f"it answers {response.status_code}")
                    async for piece in response.aiter_raw():
                        data += _within(piece, most - len(data), where)
                return lambda: (None, bytes(data))
        except TimeoutError:
            raise _unreadable(url, where, f"it took more than {FETCH_TIMEOUT_S:g} s") from None
        except (ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise _unreadable(url, where, error) from None
        raise _foreign(url, where)

    def _of_folder(self, url: str, path: Path, where: str) -> bytes:
        """Return a file of a folder that the operator allows."""
        most = self._limits.max_image_bytes
        folders = (urlsplit(one).path for one in self._limits.image_sources if one.startswith("file:"))
        try:
            file = path.resolve()
            if any(file.is_relative_to(Path(unquote(folder)).resolve()) for folder in folders):
                with file.open("rb") as opened:
                    return _within(opened.read(most + 1), most, where)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
            raise _unreadable(url, where, error) from None
        raise _foreign(url, where)

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """Follows no redirects, and takes nothing that grows when it is unpacked. Making one takes 50 ms."""
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        return httpx.AsyncClient(headers=headers, timeout=FETCH_TIMEOUT_S)

    # ----------------------------------------------------------------------------------------- keeping and reading

    def _keep(self, read: Callable[[], tuple[str | None, bytes]], where: str) -> str:
        """Check an image unless it is known, bring it to disk, and return its digest. `read` gives its type and it."""
        if self._folder is None:
            raise _refusal(
                where, "is an image, and this gateway has no folder for them (alone it needs --images); send text"
            )
        said, data = read()
        kind = _kind_of(data, where)
        if said is not None and said.replace("/jpg", "/jpeg") != kind:
            raise _refusal(where, f"says that it is {said!r:.80}, and its content is {kind}; correct its type")
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._sizes:
            size = self._checked(kind, data, where)
            try:
                self._folder.keep(data)
            except OSError as error:
                raise unwritable(self._folder.file(digest), error) from error
            self._sizes[digest] = size
        self._remember(digest, data)
        return digest

    def _measure_kept(self, digest: str, where: str) -> None:
        try:
            data = self._read(digest)
        except LedgerError:
            raise _refusal(where, f"names the image {digest!r:.80}, which this run does not have; send it") from None
        self._sizes[digest] = self._checked(_kind_of(data, where), data, where)

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

    def _checked(self, kind: str, data: bytes, where: str) -> tuple[int, int]:
        """Decode an image once and return its width and height. Raises RequestError for one that is not taken."""
        most = self._limits.max_image_pixels
        with self._decoding:
            try:
                with READERS[kind](io.BytesIO(data)) as image:
                    width, height = image.size
                    if width * height > most:
                        size = f"{width} x {height} pixels"
                        raise _refusal(where, f"is an image of {size}, and this gateway takes {most}; make it smaller")
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


def _unreadable(url: str, where: str, why: object) -> RequestError:
    return _refusal(where, f"is at {url!r:.80}, which cannot be read ({why}); send the image itself")


def _foreign(url: str, where: str) -> RequestError:
    return _refusal(
        where,
        f"is at {url!r:.80}, and this gateway fetches nothing from there: send the image itself, as "
        "data:image/png;base64,..., or let the operator add it to image_sources",
    )


def _within(data: bytes, most: int, where: str) -> bytes:
    if len(data) > most:
        raise _refusal(where, "is an image of more bytes than this gateway takes; make it smaller")
    return data


def _kind_of(data: bytes, where: str) -> str:
    kind = content_type(data)
    if kind is None:
        raise _refusal(where, f"is no PNG, JPEG or WebP file: it begins with {data[:12]!r}; convert it to one")
    return kind


def _is_image(part: JsonObject) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in IMAGE_FORMS


def _image_parts(item: Any, where: str = "", role: Any = None) -> Iterator[tuple[str, JsonObject, Any]]:
    """Yield the parts for images in a body, a message, an item or a part: the place of each, it, and whose it is."""
    if not isinstance(item, dict):
        return
    item = cast("JsonObject", item)
    if _is_image(item):
        yield where, item, role
        return
    role = item.get("role", role)
    for name in LISTS:
        if isinstance(parts := item.get(name), list):
            for index, part in enumerate(cast("list[Any]", parts)):
                yield from _image_parts(part, f"{where}.{name}[{index}]".lstrip("."), role)


def _with(item: Any, references: Mapping[int, JsonObject]) -> Any:
    """Return a body, or anything in it, with references for its images, which are known by `id`; else itself."""
    if not isinstance(item, dict):
        return item
    item = cast("JsonObject", item)
    if id(item) in references:
        return references[id(item)]
    over: dict[str, Any] = {}
    for name in LISTS:
        if isinstance(old := item.get(name), list):
            new = [_with(one, references) for one in cast("list[Any]", old)]
            over |= {name: new} if any(map(is_not, new, cast("list[Any]", old))) else {}
    return {**item, **over} if over else item


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
