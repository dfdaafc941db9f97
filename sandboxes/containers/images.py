"""Images: built from a folder or a Dockerfile, and the default image. The same content is built only once.

Folders and Dockerfiles may be task data. So `images_of` refuses any Dockerfile that asks for more than files and
settings, and the engine's builder runs without network and within `BuildBounds`. It bounds memory, CPUs, file length
and open files, but not the processes of steps that run as root: they are bounded here as soon as the builder names a
step's container. The time is bounded here too: closing the connection ends a build.

`make_default_image` makes the default image (Debian with Python, C, C++ and JavaScript) by debootstrap, as root. The
engine keeps the image, the user's cache its files.
"""

import asyncio
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp

from areal_agent.errors import SandboxError
from sandboxes.cgroups import CPU_PERIOD_US
from sandboxes.containers.engine import Engine
from sandboxes.folder import Entry, entries_in, pack

DEFAULT_IMAGE = "areal-agent-sandbox:latest"
NAME = "areal-agent-sandbox-of"
DOCKERFILE = "Dockerfile"
FILES_ONLY = f"FROM {DEFAULT_IMAGE}\nCOPY . /files\n"
"""The Dockerfile of a folder that has none."""
DOCKERFILE_INSIDE = ".areal-agent.Dockerfile"
"""Our file in the build's folder. Another of that name is left out."""
SHM_BYTES = 2**26 + 7 * 2**12
"""The size of /dev/shm in containers of builds and no others, which tells them apart: a step may print any name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildBounds:
    """The resources that one build may use."""

    wall_s: float = 1800.0
    memory_bytes: int = 4 * 2**30  # per step
    cpus: float = 2.0
    file_bytes: int = 4 * 2**30  # length of each file
    open_files: int = 4096
    processes: int = 4096  # per step; also counts processes of the step's user outside, if that is not root
    added_bytes: int = 8 * 2**30  # how much larger than its base images the image may be

    def as_asked(self) -> dict[str, str | int]:
        """Return the bounds as the builder's parameters."""
        ulimits = {"fsize": self.file_bytes, "nofile": self.open_files, "nproc": self.processes, "core": 0}
        return {
            "memory": self.memory_bytes,
            "memswap": self.memory_bytes,
            "shmsize": SHM_BYTES,
            "cpuperiod": CPU_PERIOD_US,
            "cpuquota": round(self.cpus * CPU_PERIOD_US),
            "ulimits": json.dumps([{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits.items()]),
        }


BOUNDS = BuildBounds()


async def build_image(
    folder: Path | None = None, *, dockerfile: str | None = None, bounds: BuildBounds = BOUNDS
) -> str:
    """Build an image unless it exists, and return its name, for `SandboxSpec.image`.

    Give a folder with its own `Dockerfile`, a folder and a Dockerfile's text, such a text alone, or a folder whose
    files go to `/files` of the default image. SandboxError for a Dockerfile that asks for what is not allowed.
    """
    if folder is None and not dockerfile:
        raise SandboxError("there is nothing to build: give a folder, or the text of a Dockerfile")
    files = [] if folder is None else entries_in(folder)
    own = next((entry.data.decode(errors="replace") for entry in files if entry.path == DOCKERFILE and entry.data), "")
    text = dockerfile or own or FILES_ONLY
    kept = (entry for entry in files if entry.path != DOCKERFILE_INSIDE)
    content = pack([*kept, Entry(path=DOCKERFILE_INSIDE, data=as_read(text).encode())])
    async with aclosing(await Engine.connect()) as engine:
        bases = [await engine.image(name) for name in images_of(text)]
        name = f"{NAME}:{hashlib.sha256(repr([base.id for base in bases]).encode() + content).hexdigest()[:32]}"
        if await engine.find_image(name) is None:
            await run_build(engine, content, name, bounds)
            max_bytes = sum(base.num_bytes for base in bases) + bounds.added_bytes
            num_bytes = (await engine.image(name)).num_bytes
            if num_bytes > max_bytes:
                await engine.remove_image(name)
                raise SandboxError(f"the image has {num_bytes} bytes, and may have {max_bytes}; leave files out of it")
    return name


ALLOWED = ("FROM", "RUN", "COPY", "ENV", "ARG", "WORKDIR", "USER", "LABEL", "SHELL", "CMD", "ENTRYPOINT")
ALLOWED_FLAGS = {"COPY": ("--from=", "--chown=", "--chmod="), "FROM": ()}
IMAGE = re.compile(r"[a-z0-9][a-z0-9._/-]*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)
OWN_LABELS = "areal-agent."


def images_of(text: str) -> list[str]:
    """Return the images that a Dockerfile builds upon; SandboxError, with the line, for what is not allowed."""
    images: list[str] = []
    stages: set[str] = set()  # by name and number
    num_stages = 0
    for instruction, rest in instructions_of(text):
        line, words = f"{instruction} {rest}", rest.split()
        if instruction not in ALLOWED:
            raise refusal(line, f"only {', '.join(ALLOWED)} are allowed, and no here-documents")
        if instruction == "LABEL" and OWN_LABELS in rest:
            raise refusal(line, f"labels of {OWN_LABELS!r} are reserved")
        # RUN's own flags come first; the rest belong to its command
        flags = [word for word in (takewhile(is_flag, words) if instruction == "RUN" else words) if is_flag(word)]
        for flag in flags:
            if not flag.startswith(ALLOWED_FLAGS.get(instruction, ())):
                raise refusal(line, f"the flag {flag!r} is not allowed")
        sources = [flag.removeprefix("--from=") for flag in flags if flag.startswith("--from=")]
        for name in words[:1] if instruction == "FROM" else sources:
            if name not in stages:
                if not IMAGE.fullmatch(name):
                    raise refusal(line, f"{name!r} is not the name of an image")
                images.append(name)
        if instruction == "FROM":
            stages |= {str(num_stages), *(words[2:] if len(words) == 3 and words[1].upper() == "AS" else ())}
            num_stages += 1
    if not images:
        raise SandboxError("the Dockerfile has no FROM; begin it with the image that it builds upon")
    return images


def is_flag(word: str) -> bool:
    return word.startswith("--")


def instructions_of(text: str) -> list[tuple[str, str]]:
    """Return the name and the rest of every instruction, with continued lines joined and comments left out."""
    found: list[tuple[str, str]] = []
    going_on = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            if not found and not going_on and re.match(r"\s*#\s*\w+\s*=", line):
                raise refusal(line, "parser directives are not allowed")
            continue
        line = line.rstrip()
        going_on += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        if going_on.strip():
            name, rest = re.split(r"\s+|$", going_on.strip(), maxsplit=1)
            if rest.endswith("\\"):
                raise refusal(going_on, "it ends in a backslash, and parsers differ on whether it continues")
            found.append((name.upper(), rest.strip()))
        going_on = ""
    if going_on.strip():
        raise refusal(going_on, "its last line ends in a backslash")
    return found


def as_read(text: str) -> str:
    r"""Return the same Dockerfile with one instruction per line, so that any engine builds exactly what was checked.

    >>> as_read("FROM a\nRUN true \\\n  # and then\n  && false")
    'FROM a\nRUN true   && false\n'
    """
    return "".join(f"{name} {rest}\n" for name, rest in instructions_of(text))


def refusal(line: str, reason: str) -> SandboxError:
    return SandboxError(f"the Dockerfile asks for {line.strip()[:200]!r}: {reason}")


MAX_SAID_LINES = 50
RUNNING = re.compile(r" ---> Running in ([0-9a-f]{12,64})\n")
MAX_WAITING_STEPS = 64
"""A step may print the lines that name containers. Beyond this number it has to wait until those were looked up."""
READ_AHEAD_BYTES = 4 * 2**20
"""The longest line of the engine: an escaped chunk of what a step prints."""


async def run_build(engine: Engine, content: bytes, name: str, bounds: BuildBounds) -> None:
    """Build an image from a tar that holds our Dockerfile, without network; SandboxError with the end of the log."""
    asked = {"dockerfile": DOCKERFILE_INSIDE, "t": name, "rm": 1, "forcerm": 1, "networkmode": "none"}
    headers, timeout = {"Content-Type": "application/x-tar"}, aiohttp.ClientTimeout(total=bounds.wall_s)
    connector = aiohttp.UnixConnector(engine.socket_path)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_AHEAD_BYTES) as session,
            session.post(
                "http://engine/build", params={**asked, **bounds.as_asked()}, data=content, headers=headers
            ) as response,
        ):
            if not response.ok:
                raise SandboxError(f"the container engine refused the build: {(await response.text()).strip()}")
            await follow(engine, response, bounds)
    except TimeoutError:
        raise SandboxError(
            f"the image was not built within {bounds.wall_s:g} s; ask for less, or build it by hand"
        ) from None
    except (aiohttp.ClientError, ValueError) as error:  # ValueError: a line that is not JSON, or too long
        raise SandboxError(f"the container engine aborted the build: {error}; is dockerd running?") from error


async def follow(engine: Engine, response: aiohttp.ClientResponse, bounds: BuildBounds) -> None:
    """Follow the build to its end; SandboxError when it fails."""
    said: deque[str] = deque(maxlen=MAX_SAID_LINES)
    room = asyncio.Semaphore(MAX_WAITING_STEPS)

    async def bound(container: str) -> None:
        await bound_processes(engine, container, bounds.processes)
        room.release()

    try:
        async with asyncio.TaskGroup() as group:  # the engine may not answer until what a step prints is read
            async for line in response.content:
                told: dict[str, Any] = json.loads(line)
                said.append(told.get("stream", ""))
                if step := RUNNING.fullmatch(said[-1]):
                    await room.acquire()
                    group.create_task(bound(step[1]))
                if "error" in told:
                    raise SandboxError(
                        f"the image was not built, without network: {told['error']}; {''.join(said)[-1000:]}"
                    )
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


TOLD_LATE_S = (0.0, 0.1, 0.5, 2.0)
"""An engine hears of a container's end a little later than the runtime that refuses to bound it."""


async def bound_processes(engine: Engine, container: str, num_processes: int) -> None:
    """Bound the processes of a step's container, which is about to start or may have ended already."""
    details = await engine.find_container(container)
    if details is None or details["HostConfig"]["ShmSize"] != SHM_BYTES:
        return
    try:
        await engine.limit(container, {"PidsLimit": num_processes})
    except SandboxError as error:
        for wait_s in TOLD_LATE_S:
            await asyncio.sleep(wait_s)
            details = await engine.find_container(container)
            if details is None or not details["State"]["Running"]:
                return
        raise SandboxError(f"the processes of a build could not be bounded: {error}") from error


RECIPE_LABEL = "areal-agent.sandboxes.recipe"
PACKAGES = ("python3", "gcc", "g++", "libc6-dev", "nodejs")
OF_NO_USE = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "var/log")
DEBOOTSTRAP_TIMEOUT_S = 1800


async def make_default_image(engine: Engine) -> bool:
    """Make the default image of this machine's Debian release unless it is up to date; return whether it was made."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME")
    if release is None:
        raise SandboxError(f"the default image is made on Debian; make it there, or import one as {DEFAULT_IMAGE!r}")
    recipe = recipe_of(release)
    found = await engine.find_image(DEFAULT_IMAGE)
    if found is not None and found.labels.get(RECIPE_LABEL) == recipe:
        return False
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal-agent-sandboxes"
    cache.mkdir(parents=True, exist_ok=True)
    files = cache / f"{recipe}.tar"
    if not files.exists():
        await asyncio.to_thread(make_files, release, files)
    await engine.import_image(files, DEFAULT_IMAGE, {RECIPE_LABEL: recipe})
    return True


def recipe_of(release: str) -> str:
    """Return a hash of everything that determines the image's content."""
    return hashlib.sha256(repr((release, PACKAGES, OF_NO_USE)).encode()).hexdigest()[:16]


def make_files(release: str, target: Path) -> None:
    """Write the image's files to a tar, which takes minutes. The tar appears whole or not at all."""
    program = shutil.which("debootstrap")
    if program is None or os.getuid() != 0:
        raise SandboxError("the default image is made by debootstrap, as root; install the package `debootstrap`")
    with tempfile.TemporaryDirectory(prefix="areal-agent-image-") as scratch:
        root, part = Path(scratch) / "root", target.with_suffix(".part")
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        made = subprocess.run(
            [program, *options, release, str(root), *mirror_of(release)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEBOOTSTRAP_TIMEOUT_S, text=True, check=False,
        )  # fmt: skip
        if made.returncode != 0:
            raise SandboxError(f"debootstrap failed with {made.returncode}: {made.stdout[-1000:]}")
        for place in OF_NO_USE:
            shutil.rmtree(root / place, ignore_errors=True)
        with tarfile.open(part, "w") as tar:
            tar.add(root, arcname=".")
        part.rename(target)


def mirror_of(release: str) -> list[str]:
    """Return the mirror that this machine's apt has fetched lists of; empty: debootstrap knows a public one."""
    if shutil.which("apt-get") is None:
        return []
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    shown = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return [uri for uri, *source in map(str.split, shown.splitlines()) if source == [release, "main"]][:1]
