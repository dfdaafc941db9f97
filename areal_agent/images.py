"""The images of a run, each once, in a folder beside its ledger: `images/ab/ab12...` is the file with that SHA-256.

Turns and requests name an image by its digest. Its bytes are on the disk before a turn with it is in the journal.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from areal_agent.errors import LedgerError
from areal_agent.files import no_device, sync
from areal_agent.types import JsonObject, TokenRecord

IMAGES = "images"
"""The folder's name in that of a run."""
FORMATS = ("PNG", "JPEG", "WEBP")
"""What PIL may take an image for, and nothing else."""
PROCESSOR = "preprocessor_config.json"
"""What a model's folder says about images; newer transformers write it into processor_config.json."""
DIGEST = re.compile("[0-9a-f]{64}")
PREFIX = "sha256:"
"""Before the digest, in the URL of an image in a recorded message."""
SOURCE = re.compile(r"file:///.*|([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
"""From where images are fetched: a folder, or a host as URLs have it (`gateway.bodies.Limits`)."""


def reference_to(digest: str) -> JsonObject:
    """Return the part of a recorded message that refers to an image: chat completions', whatever protocol it came by.

    >>> digest_of(reference_to("ab" * 32)) == "ab" * 32
    True
    """
    return {"type": "image_url", "image_url": {"url": PREFIX + digest}}


def digest_of(part: object) -> str | None:
    """Return the digest of the image that a part of a recorded message refers to; None for any other part."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith(PREFIX):
            digest = url.removeprefix(PREFIX)
            return digest if DIGEST.fullmatch(digest) else None
        case _:
            return None


def digests_in(messages: Iterable[object]) -> Iterator[str]:
    """Yield the digests of the images that recorded messages refer to, in their order."""
    for message in messages:
        match message:
            case {"content": [*parts]}:
                yield from filter(None, map(digest_of, parts))
            case _:
                pass


def content_type(data: bytes) -> str | None:
    """Return what an image is, by its first bytes: image/png, image/jpeg or image/webp; None for anything else.

    >>> content_type(b"RIFF....WEBPVP8 ")
    'image/webp'
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def has_processor(model: Path) -> bool:
    """Return whether a model's folder says what becomes of an image, in either of its files."""
    try:
        whole: object = orjson.loads(no_device(model / "processor_config.json").read_bytes())
    except (OSError, ValueError):
        whole = None
    return (model / PROCESSOR).is_file() or (isinstance(whole, dict) and "image_processor" in whole)


def image_processor(model: Path) -> Any:
    """Return the image processor of a model's folder, which scales by PIL. Raises what transformers raises.

    Before transformers 5.18 its top level has processors only beside torchvision, which nothing here needs.
    """
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # takes seconds, and loads torch

    return AutoImageProcessor.from_pretrained(model, backend="pil", local_files_only=True)


class ImageFolder:
    """Bytes by their SHA-256. Several processes may write to one folder at a time.

    >>> images = ImageFolder(Path("run/images"))                                    # doctest: +SKIP
    >>> images.read(images.keep(data)) == data                                      # doctest: +SKIP
    True
    """

    def __init__(self, path: Path, earlier: "ImageFolder | None" = None) -> None:
        """The images of `earlier` are read where they are, and not written again: a replay's are those of its run."""
        self.path = path
        self._earlier = earlier

    def file(self, digest: str) -> Path:
        """Return the place of an image. Raises LedgerError for what is no digest."""
        if not DIGEST.fullmatch(digest):
            raise LedgerError(f"{digest!r:.80} is no SHA-256 of an image")
        file = self.path / digest[:2] / digest
        if self._earlier is not None and not file.exists() and (there := self._earlier.file(digest)).exists():
            return there
        return file

    def keep(self, data: bytes) -> str:
        """Bring an image to disk, unless it is there, and return its digest. Raises OSError, for a full disk too."""
        digest = hashlib.sha256(data).hexdigest()
        file = self.file(digest)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch = file.with_name(f".{secrets.token_hex(16)}")
            try:
                scratch.write_bytes(data)  # as readable as the run's other files
                sync(scratch)
                scratch.rename(file)
            finally:
                scratch.unlink(missing_ok=True)
            for folder in (file.parent, self.path, self.path.parent):  # which may have new names, too
                sync(folder)
        return digest

    def read(self, digest: str) -> bytes:
        """Return the bytes of an image. Raises LedgerError if they are missing or not those that were kept."""
        file = self.file(digest)
        try:
            data = no_device(file).read_bytes()
        except OSError as error:
            raise LedgerError(f"image {digest} cannot be read: {error}; put the run's images/ back") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise LedgerError(f"image {digest} is damaged: {file} has other bytes; put the run's images/ back")
        return data

    def of(self, records: Iterable[TokenRecord]) -> dict[str, bytes]:
        """Return the bytes of all images in these records, by digest. Raises LedgerError as `read` does."""
        digests = dict.fromkeys(span.digest for record in records for span in record.images)
        return {digest: self.read(digest) for digest in digests}
