"""Takes the images out of an agent's request, before anything else reads it.

A part with an image, in the form of whichever protocol (`FORMS`), is decoded, checked, and kept in the run's
`ImageFolder`. In its place comes a part of chat completions' form, with a reference for the data, and the size::

    {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0..."}
    {"type": "image_url", "image_url": {"url": "sha256:9f86d0..."}, "width": 56, "height": 56}

So what is compared and journaled of a conversation is small, and names images that are on disk. A client may send a
reference itself, for an image that the run has. A URL is fetched, once, where the operator allows its host or folder
(`Limits.image_sources`). What engines and trainers would not all see alike is refused: a transparent image, a turned
one, an animation.
"""

import asyncio
import binascii
import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

import httpx
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from pydantic import WithJsonSchema

from areal_agent.errors import LedgerError, RequestError, unwritable
from areal_agent.gateway.bodies import GROWING, Limits
from areal_agent.images import DIGEST, PREFIX, ImageFolder, content_type, reference_to
from areal_agent.tokens.vision import Vision
from areal_agent.types import ImageSpan, JsonObject, PromptImage

T = TypeVar("T")
Size = tuple[int, int]  # width and height

_DATA = "data:image/png;base64,..."
FORMS: Mapping[str, Sequence[JsonObject]] = {
    "image_url": ({"type": "image_url", "image_url": {"url": _DATA}},),
    "image": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}},
        {"type": "image", "source": {"type": "url", "url": "https://..."}},
    ),
    "input_image": ({"type": "input_image", "image_url": _DATA},),
}
"""Examples of parts with an image, by their type: of chat completions, Messages, and Responses."""

LISTS = (*GROWING, "content", "output")
"""The lists in a body that have parts for images, or what has such parts."""

READERS: Mapping[str, Callable[[io.BytesIO], ImageFile]] = {
    "image/png": PngImageFile,
    "image/jpeg": JpegImageFile,
    "image/webp": WebPImageFile,
}
"""What reads files; not `Image.open`, which warns of sizes in its own way."""

FETCH_TIMEOUT_S = 30.0
UNREADABLE = (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL, RuntimeError)  # the last: links in a circle
MAX_URL = 8192
"""A longer one is most likely the image itself, with a wrong beginning."""
MAX_HEAD = 256
"""The longest beginning of a data URL, up to its data."""

ELSEWHERE = f"send the image itself, as {_DATA}, or let the operator add it to image_sources"
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[^,;]*)*;base64,", re.ASCII)


class _Refused(Exception):
    """Says of a part what is wrong with its image, and the remedy."""


class ImageIntake:
    """The images of one gateway's requests. Use it from one event loop; the work is done in threads.

    >>> intake = ImageIntake(vision, ImageFolder(run / "images"), Limits())                 # doctest: +SKIP
    >>> body = await intake.taken(body)                                                     # doctest: +SKIP
    """

    def __init__(
        self, vision: Vision, folder: ImageFolder | None, limits: Limits, *, elsewhere: str = ELSEWHERE
    ) -> None:
        """`elsewhere` is the remedy for an image at a URL that the limits do not allow."""
        self._vision = vision
        self._folder = folder
        self._limits = limits
        self._elsewhere = elsewhere
        self._sizes: dict[str, Size] = {}  # by digest, of images that were checked
        self._fetched: dict[str, str] = {}  # digests by URL: what is there may change, and a conversation may not
        self._decoding = threading.Lock()  # a large image takes hundreds of megabytes: one at a time

    async def taken(self, body: JsonObject) -> JsonObject:
        """Return a request's body with references to its images; without images it is `body` itself.

        Raises RequestError that names the part for an image that is not taken, DiskFull if it cannot be kept.
        """
        parts = list(_image_parts(body))
        if len(parts) > self._limits.max_images:
            raise RequestError(
                f"there are {len(parts)} images, and {self._limits.max_images} are taken at most; leave out older ones",
                code="too_many_images",
            )
        for place, part, role in parts:
            try:
                body = _replaced(body, place, await self._reference(part, role))
            except _Refused as why:
                where = ".".join(f"{name}[{index}]" for name, index in place)
                raise RequestError(f"{where} {why}", param=where, code="invalid_image") from why
        return body

    async def of(self, spans: Sequence[ImageSpan]) -> tuple[PromptImage, ...]:
        """Return the images of a prompt with their bytes. Raises LedgerError if one is gone or damaged."""
        folder = self._folder
        if not spans or folder is None:
            return ()
        read = await asyncio.to_thread(lambda: [folder.read(span.digest) for span in spans])
        return tuple(PromptImage(span=span, data=data) for span, data in zip(spans, read, strict=True))

    async def _reference(self, part: JsonObject, role: Any) -> JsonObject:
        """Keep the image of a part, and return the part that refers to it."""
        if role not in (None, "user", "tool"):
            raise _Refused(f"is an image of the {role!r:.80}; send images of users, and in results of calls")
        if self._folder is None:
            raise _Refused("is an image, and this gateway has no folder for them (alone it needs --images); send text")
        url = _url_of(part)
        if url is None:
            raise _Refused(f"is no image part that is known; give {json.dumps(FORMS[part['type']][0])}")
        is_data = url.startswith("data:")  # of any length, so it is looked for nowhere
        digest = url.removeprefix(PREFIX) if url.startswith(PREFIX) else None if is_data else self._fetched.get(url)
        if digest is not None:
            size = self._sizes.get(digest) or await asyncio.to_thread(self._measured, self._folder, digest)
        else:
            fetched = None if is_data else await self._fetch(url)
            digest, size = await asyncio.to_thread(self._kept, self._folder, url, fetched)
        if not is_data and not url.startswith(PREFIX):
            if (first := self._fetched.get(url, digest)) != digest:  # another request was faster, and found another
                digest, size = first, await asyncio.to_thread(self._measured, self._folder, first)
            self._renew(self._fetched, url, digest)
        self._renew(self._sizes, digest, size)
        return {**reference_to(digest), "width": size[0], "height": size[1]}

    def _renew(self, known: dict[str, T], key: str, value: T) -> None:
        """Make an entry the newest, and forget the oldest if there are too many."""
        known.pop(key, None)
        known[key] = value
        if len(known) > self._limits.max_known_images:
            del known[next(iter(known))]

    # ------------------------------------------------------------------------------------------------- reading

    def _decoded(self, url: str) -> bytes:
        """Return the image in a data URL."""
        head = _DATA_URL.match(url, 0, MAX_HEAD)
        if head is None:
            raise _Refused(f"has the URL {url!r:.80}; give {_DATA}")
        num_bytes, most = (len(url) - head.end()) * 3 // 4, self._limits.max_image_bytes
        if num_bytes > most + 2:  # padding counts as bytes
            raise _Refused(f"has {num_bytes} bytes, and {most} are taken at most; make it smaller")
        try:
            data = binascii.a2b_base64(url[head.end() :], strict_mode=True)
        except ValueError as error:
            raise _Refused(f"has data that is not base64 ({error}); encode the file's bytes again") from None
        said, kind = head[1], _kind_of(data)
        if said is not None and said.replace("/jpg", "/jpeg") != kind:
            raise _Refused(f"says that it is {said!r:.80}, and its content is {kind}; correct its type")
        return data

    async def _fetch(self, url: str) -> bytes:
        """Return what is at a URL that the operator allows."""
        sources, most, data = self._limits.image_sources, self._limits.max_image_bytes, None
        try:
            if len(url) > MAX_URL:
                raise ValueError(f"it has more than {MAX_URL} characters")
            parts = urlsplit(url)
            if parts.scheme == "file" and not parts.netloc:
                data = await asyncio.to_thread(self._of_folder, Path(unquote(parts.path)))
            elif parts.scheme in ("http", "https") and parts.netloc.lower() in sources:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    data = await self._of_host(url)
        except UNREADABLE as error:
            why = f"it took more than {FETCH_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else error
            raise _Refused(f"is at {url!r:.200}, which cannot be read ({why}); correct it, or give the image") from None
        if data is None:
            raise _Refused(f"is at {url!r:.200}, from where nothing is fetched; {self._elsewhere}")
        if len(data) > most:
            raise _Refused(f"has more than {most} bytes, which are taken at most; make it smaller")
        return data

    async def _of_host(self, url: str) -> bytes:
        data = bytearray()
        async with self._client.stream("GET", url) as response:
            if response.status_code != 200:
                raise ValueError(f"it answers {response.status_code}")
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > self._limits.max_image_bytes:
                    break
        return bytes(data)

    def _of_folder(self, path: Path) -> bytes | None:
        """Read a file; None if no folder that the operator allows has it."""
        folders = (urlsplit(one).path for one in self._limits.image_sources if one.startswith("file:"))
        file = path.resolve()
        if not any(file.is_relative_to(Path(unquote(folder)).resolve()) for folder in folders):
            return None
        with file.open("rb") as opened:
            return opened.read(self._limits.max_image_bytes + 1)

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """Follows no redirects, and takes nothing that grows when it is unpacked. Making one takes 50 ms."""
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        return httpx.AsyncClient(headers=headers, timeout=FETCH_TIMEOUT_S)

    # ------------------------------------------------------------------------------------ checking and keeping

    def _kept(self, folder: ImageFolder, url: str, data: bytes | None) -> tuple[str, Size]:
        """Check an image unless it is known, bring it to disk, and return its digest and size."""
        data = self._decoded(url) if data is None else data
        digest = hashlib.sha256(data).hexdigest()
        size = self._sizes.get(digest)
        if size is None:
            size = self._checked(data)
            try:
                folder.keep(data)
            except OSError as error:
                raise unwritable(folder.file(digest), error) from error
        return digest, size

    def _measured(self, folder: ImageFolder, digest: str) -> Size:
        """Return the size of an image that is kept."""
        try:
            return self._checked(folder.read(digest))
        except LedgerError:
            if DIGEST.fullmatch(digest) and folder.file(digest).exists():
                raise  # damaged, or the disk is
            raise _Refused(f"names the image {digest!r:.80}, which this run does not have; give it itself") from None

    def _checked(self, data: bytes) -> Size:
        """Decode an image once and return its size."""
        kind, most = _kind_of(data), self._limits.max_image_pixels
        with self._decoding:
            try:
                with READERS[kind](io.BytesIO(data)) as image:
                    width, height = image.size
                    if width * height > most:
                        raise _Refused(f"has {width} x {height} pixels, and {most} are taken at most; make it smaller")
                    image.load()
                    is_turned = image.getexif().get(ORIENTATION, 1) != 1
                    is_animated = getattr(image, "is_animated", False)
                    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
                    is_opaque = alpha is None or alpha.getextrema() == (255, 255)
            except _Refused:
                raise
            except Exception as error:  # foreign code on foreign data
                raise _Refused(f"is a damaged {kind} file ({error}); give a whole one") from error
        for is_so, what, remedy in (
            (is_turned, "is turned by its EXIF data", "save it upright, without them"),
            (is_animated, "is an animation", "give one picture of it"),
            (not is_opaque, "is transparent in places", "put it on a background"),
        ):
            if is_so:
                raise _Refused(f"{what}, which engines would not see alike; {remedy}")
        try:
            self._vision.num_pads(width, height)
        except RequestError as error:
            raise _Refused(f"is not for this model: {error.message}") from error
        return width, height


def schema_of(kind: str) -> WithJsonSchema:
    """Return how /openapi.json describes a part with an image that has this type."""
    about = (
        "PNG, JPEG or WebP. Only a model that sees takes it, in users' messages and in the results of calls. A URL is "
        "its data, `sha256:DIGEST` of an image that the run has, or one that the operator allows."
    )
    return WithJsonSchema({"title": "Image", "description": about, "anyOf": [*map(_schema, FORMS[kind])]})


def _schema(example: JsonObject) -> JsonObject:
    properties = {
        name: {"const": one} if name == "type" else {"type": "string"} if isinstance(one, str) else _schema(one)
        for name, one in example.items()
    }
    return {"type": "object", "properties": properties, "required": [*example]}


def has_images(body: JsonObject) -> bool:
    """Return whether a body has parts for images, of any protocol."""
    return any(True for _ in _image_parts(body))


def _image_parts(item: Any, place: tuple[tuple[str, int], ...] = (), role: Any = None) -> Iterator[Any]:
    """Yield the parts for images in a body, a message, an item or a part: the place of each, it, and whose it is."""
    if not isinstance(item, dict):
        return
    item = cast("JsonObject", item)
    if isinstance(kind := item.get("type"), str) and kind in FORMS:
        yield place, item, role
        return
    role = item.get("role", role)
    for name in LISTS:
        if isinstance(parts := item.get(name), list):
            for index, part in enumerate(cast("list[Any]", parts)):
                yield from _image_parts(part, (*place, (name, index)), role)


def _replaced(item: JsonObject, place: Sequence[tuple[str, int]], part: JsonObject) -> JsonObject:
    """Return a body, or anything in it, with another part at a place."""
    if not place:
        return part
    (name, index), *rest = place
    old = item[name]
    return {**item, name: [*old[:index], _replaced(old[index], rest, part), *old[index + 1 :]]}


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


def _kind_of(data: bytes) -> str:
    kind = content_type(data)
    if kind is None:
        raise _Refused(f"is no PNG, JPEG or WebP file: it begins with {data[:12]!r}; convert it to one")
    return kind
