"""Images of a folder or a Dockerfile: made once of the same content, found by it ever after.

Their makers may be task data: `dockerfile.py` says what they may ask for. A build has no network, the rights of any
container and bounds on what it uses (`build.py`), and builds upon images that are here.
"""

import hashlib
from pathlib import Path

from areal_agent.errors import SandboxError
from sandboxes.archive import Entry, pack, pack_folder
from sandboxes.archive import entries_of as members_of
from sandboxes.containers.base_image import DEFAULT_IMAGE
from sandboxes.containers.build import BuildBounds, run_build
from sandboxes.containers.dockerfile import as_read, images_of
from sandboxes.containers.engine import Engine

NAME = "areal-agent-sandbox-of"
DOCKERFILE = "Dockerfile"
BOUNDS = BuildBounds()
FILES_ONLY = f"FROM {DEFAULT_IMAGE}\nCOPY . /files\n"
"""Of a folder without a Dockerfile."""
DOCKERFILE_INSIDE = ".areal-agent.Dockerfile"
"""Ours in the build's folder, where any other of that name is refused."""


async def build_image(
    folder: Path | None = None, *, dockerfile: str | None = None, bounds: BuildBounds = BOUNDS
) -> str:
    """The name of the image, for `SandboxSpec.image`.

    Of a folder with its own `Dockerfile`, of a folder and the text of one, of such a text alone, or of a folder whose
    files are put beneath `/files` of the default image. SandboxError for what a Dockerfile may not ask for.
    """
    engine = await Engine.connect()
    try:
        return await build_image_with(engine, folder, dockerfile, bounds)
    finally:
        await engine.aclose()


async def build_image_with(
    engine: Engine, folder: Path | None, dockerfile: str | None, bounds: BuildBounds = BOUNDS
) -> str:
    files = entries_of(folder)
    text = dockerfile or dockerfile_of(files)
    bases = [await engine.image(name) for name in images_of(text)]
    built = as_read(text)
    content = pack([*files, Entry(path=DOCKERFILE_INSIDE, data=built.encode())])
    name = f"{NAME}:{hashlib.sha256(repr([base.id for base in bases]).encode() + content).hexdigest()[:32]}"
    if not await engine.has_image(name):
        await run_build(engine.socket_path, content, DOCKERFILE_INSIDE, name, bounds)
        await refuse_too_large(engine, name, sum(base.num_bytes for base in bases) + bounds.added_bytes)
    return name


async def refuse_too_large(engine: Engine, name: str, max_bytes: int) -> None:
    """SandboxError for an image that was built and is larger; it is removed."""
    num_bytes = (await engine.image(name)).num_bytes
    if num_bytes > max_bytes:
        await engine.remove_image(name)
        raise SandboxError(f"the image has {num_bytes} bytes and may have {max_bytes}; leave files out of it")


def entries_of(folder: Path | None) -> list[Entry]:
    """In the order of their names, so that the same files make the same image. ValueError for links and the like."""
    if folder is None:
        return []
    entries = members_of(pack_folder(folder))
    if any(entry.path == DOCKERFILE_INSIDE for entry in entries):
        raise SandboxError(f"{str(folder)!r} holds a file {DOCKERFILE_INSIDE!r}, a name that is taken; rename it")
    return sorted(entries, key=lambda entry: entry.path)


def dockerfile_of(files: list[Entry]) -> str:
    found = next((entry.data for entry in files if entry.path == DOCKERFILE and entry.data is not None), None)
    if found is not None:
        return found.decode(errors="replace")
    if not files:
        raise SandboxError("there is nothing to build: give a folder, or the text of a Dockerfile")
    return FILES_ONLY
