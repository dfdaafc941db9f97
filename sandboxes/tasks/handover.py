"""What an agent left, on its way to the sandbox where it is judged: what comes along, what is left out, and why.

::

    agent's sandbox ── a tar of each declared path ──▶ here ── made anew ──▶ verifier's sandbox, where the path is empty

Left out are links that lead out of the declared paths, compiled modules (`__pycache__`), and, where the tests are
Python, modules that Python would take for its own and files that pytest loads by itself. What the image has in the
same place stays: the same link, or a file with the same bytes; of a changed file the image's own is put back.
"""

import asyncio
import hashlib
import io
import posixpath
import re
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import IO

from sandboxes.cell import Archives
from sandboxes.sandbox import Sandbox

RESERVED = ("/tests", "/solution", "/logs/verifier", "/proc", "/sys", "/dev")
"""Folders that no declared path may touch: the verifier's own, and those that are no files of a sandbox's own."""
FRAMEWORKS = {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "exceptiongroup", "tomli", "pygments"}
OWN_MODULES = FRAMEWORKS | sys.stdlib_module_names
LOADED_BY_ITSELF = re.compile(
    r"(conftest|sitecustomize|usercustomize)\.[^/]*|\.?pytest\.(ini|toml)|.*\.pth|entry_points\.txt"
)
MODULE_ENDINGS = ("py", "pyc", "so")
SETTINGS = ("pyproject.toml", "setup.cfg", "tox.ini")
"""Files that come along, with another name for a section of pytest's."""
SECTION = re.compile(rb"""pytest(?=["'\s.:]*(ini_options|\]))""")
MARKS = {**dict.fromkeys(SETTINGS, b"pytest"), "entry_points.txt": b"pytest11"}
"""What in a file, also "import" in one that ends in .pth, lets Python or pytest load something by it."""
MAX_HOPS = 40
MAX_SETTINGS = 2**20
"""A larger file of settings is left out: nothing of the agent's is read into this process's memory whole."""
CLEAR = """
mkdir -p -- "$(dirname "$1")"
if [ -d "$1" ] && [ ! -L "$1" ]; then rm -rf -- "$1"/..?* "$1"/.[!.]* "$1"/*; else rm -f -- "$1"; fi
"""
"""Removes what is at a path, but keeps the folder itself, which programs may stand in."""
LOOK = """
import hashlib, os, sys
for path in sys.stdin.buffer.read().split(b"\\0")[:-1]:
    try:
        if os.path.islink(path): print("link", os.fsencode(os.readlink(path)).hex())
        else:
            with open(path, "rb") as file: print("file", hashlib.sha256(file.read()).hexdigest())
    except OSError: print("none")
"""
"""Prints what the image has at each path."""


class Kind(StrEnum):
    """A kind of suspicion: a sign that the agent worked on its verdict, not on its task."""

    LINK = "link"  # it leads to the tests, the reward, or everything
    SHADOW = "shadow"  # a module with the name of one of Python's or the framework's own
    EARLY_EXIT = "early_exit"  # the agent's code ended the tests
    READS_TESTS = "reads_tests"
    WRITES_REWARD = "writes_reward"
    EQUALS_ALL = "equals_all"  # an object that equals whatever it is compared with


@dataclass(frozen=True, slots=True)
class Suspicion:
    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


@dataclass(slots=True)
class Handover:
    """What was found on the way. `settings` are changed files whose sections for pytest are renamed."""

    left_out: list[str] = field(default_factory=list[str])
    suspicions: list[Suspicion] = field(default_factory=list[Suspicion])
    settings: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFiles:
    """What a task says about the agent's files. `text` is its instruction, tests and solution, `scripts` its shell."""

    declared: Sequence[str]
    text: str
    scripts: str
    is_python: bool

    def names(self, path: str) -> bool:
        """Return whether the task speaks of a module by the name of its file, so that it is asked for."""
        name = posixpath.basename(path).partition(".")[0]
        return re.search(rf"\b{re.escape(name)}(\.py\b|/)", self.text) is not None


async def hand_over(task: TaskFiles, source: Archives, fresh: Sandbox, max_bytes: int) -> Handover:
    """Copy the declared paths to a fresh sandbox, without what the agent removed; OSError for a link or too much."""
    target, found = await fresh.archives(), Handover()
    with ExitStack() as files:
        tars: dict[str, IO[bytes]] = {}
        for path in task.declared:
            tar = files.enter_context(tempfile.TemporaryFile())
            try:
                await source.save(path, tar, max_bytes)
                tars[path] = tar
            except FileNotFoundError:
                pass
            except OSError as error:
                raise OSError(f"{path}, which is judged, cannot be copied: {error}") from error
        looked = await asyncio.to_thread(look_through, task, tars)
        in_image = await facts_of(fresh, [*looked.facts])
        left_out = looked.judge(task, in_image, found)
        kept_of_image = {path: files.enter_context(tempfile.TemporaryFile()) for path in left_out if in_image.get(path)}
        for path, tar in kept_of_image.items():
            await target.save(path, tar, max_bytes)
        for path in task.declared:  # all of them, before anything of the agent's is there that could be run instead
            await fresh.exec(["/bin/sh", "-c", CLEAR, "sh", path])
        for path, tar in tars.items():
            anew = files.enter_context(tempfile.TemporaryFile())
            await asyncio.to_thread(copy_but, tar, anew, path, left_out, found.settings)
            await target.load(anew, posixpath.dirname(path))
        for path, tar in kept_of_image.items():
            tar.seek(0)
            await target.load(tar, posixpath.dirname(path))
    return found


async def facts_of(box: Sandbox, paths: Sequence[str]) -> dict[str, str]:
    """Return what the image has at each path: "link " with the target in hexadecimal, or "file " with a hash."""
    if not paths:
        return {}
    told = await box.exec_python(LOOK, stdin=b"".join(encoded(path) + b"\0" for path in paths))
    lines = told.stdout.decode(errors="replace").splitlines() if told.is_ok else []
    return {path: line for path, line in zip(paths, lines, strict=False) if line != "none"}


@dataclass(slots=True)
class Looked:
    """What is in the tars, by absolute path: the targets of links, and as `facts_of` says it what may be left out."""

    links: dict[str, str] = field(default_factory=dict[str, str])
    facts: dict[str, str] = field(default_factory=dict[str, str])
    packages: set[str] = field(default_factory=set[str])

    def judge(self, task: TaskFiles, in_image: Mapping[str, str], found: Handover) -> set[str]:
        """Return the paths to leave out, and note the reasons."""
        left_out: set[str] = set()
        for path, fact in self.facts.items():
            name = posixpath.basename(path)
            if in_image.get(path) == fact:
                continue
            if path in self.links:
                led = resolved(path, self.links)
                if led is None or not any(is_within(led, declared) for declared in task.declared):
                    left_out.add(path)
                    found.left_out.append(f"{path}, a link to {self.links[path]}")
                    if led is not None and any(is_within(led, place) or is_within(place, led) for place in RESERVED):
                        found.suspicions.append(Suspicion(Kind.LINK, f"{path} leads to {self.links[path]}"))
            if not task.is_python or path in left_out:
                continue
            if name in SETTINGS:
                found.settings.append(path)
                found.left_out.append(f"what {path} says to pytest")
            elif LOADED_BY_ITSELF.fullmatch(name):
                left_out.add(path)
                found.left_out.append(f"{path}, which Python or pytest would load by itself")
            elif is_own_module(path) and self.is_importable(path, task) and not task.names(module_of(path)):
                left_out.add(path)
                found.left_out.append(f"{path}, which would be taken for a module of Python's or pytest's own")
                found.suspicions.append(Suspicion(Kind.SHADOW, path))
        return left_out

    def is_importable(self, path: str, task: TaskFiles) -> bool:
        """Return whether a search path may lead to the module: not if its folder is a package, unless tests name it."""
        folder = posixpath.dirname(module_of(path))
        return folder in task.declared or folder not in self.packages or folder in task.text


def look_through(task: TaskFiles, tars: Mapping[str, IO[bytes]]) -> Looked:
    looked = Looked()
    for declared, tar in tars.items():
        tar.seek(0)
        with opened(tar) as members:
            for member in members:
                path = place_of(member, declared)
                folder, name = posixpath.split(path)
                if name.startswith("__init__."):
                    looked.packages.add(folder)
                target = member.linkname if member.issym() else None
                if member.islnk():  # perhaps to a link
                    target = looked.links.get(posixpath.join(posixpath.dirname(declared), member.linkname))
                if target is not None:
                    looked.links[path] = target
                    looked.facts[path] = f"link {encoded(target).hex()}"
                elif task.is_python and (member.isreg() or member.islnk()) and (file := members.extractfile(member)):
                    mark = MARKS.get(name, b"import" if name.endswith(".pth") else None)
                    is_loaded = is_own_module(path) or LOADED_BY_ITSELF.fullmatch(name)
                    if has_mark(file, mark) if mark else is_loaded:
                        file.seek(0)
                        looked.facts[path] = f"file {hashlib.file_digest(file, 'sha256').hexdigest()}"  # pyright: ignore[reportArgumentType]
    return looked


def has_mark(file: IO[bytes], mark: bytes) -> bool:
    """Return whether a file has a mark; one that is too large to look through is taken to have it."""
    data = file.read(MAX_SETTINGS + 1)
    return len(data) > MAX_SETTINGS or mark in data


def module_of(path: str) -> str:
    """Return the path of a module's file, or of its folder for a package.

    >>> module_of("/app/json/__init__.py")
    '/app/json'
    """
    return posixpath.dirname(path) if posixpath.basename(path).startswith("__init__.") else path


def is_own_module(path: str) -> bool:
    """Return whether Python may take a file, or a link, for a module of its own or of pytest's."""
    stem, _, ending = posixpath.basename(path).partition(".")
    if stem == "__init__":
        stem = posixpath.basename(posixpath.dirname(path))
    return stem in OWN_MODULES and (not ending or ending.endswith(MODULE_ENDINGS))


def copy_but(tar: IO[bytes], anew: IO[bytes], declared: str, left_out: set[str], settings: Sequence[str]) -> None:
    """Write a tar anew without what is left out, hard links to it, and sections for pytest in `settings`."""
    tar.seek(0)
    kept: set[str] = set()
    with opened(tar) as members, tarfile.open(fileobj=anew, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in members:
            path = place_of(member, declared)
            if "__pycache__" in path.split("/") or any(folder in left_out for folder in parents_of(path)):
                continue
            if member.islnk() and member.linkname not in kept:
                continue
            kept.add(member.name)
            if path in settings and member.size > MAX_SETTINGS:
                continue
            data = members.extractfile(member) if member.isreg() else None
            if data is not None and path in settings:
                data = io.BytesIO(SECTION.sub(b"unused", data.read()))
            target.addfile(member, data)
    anew.seek(0)


def opened(tar: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=tar, mode="r:", encoding="utf-8", errors="surrogateescape")


def place_of(member: tarfile.TarInfo, declared: str) -> str:
    """Return the absolute path of a member of the tar of a declared path."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(declared), member.name))


def parents_of(path: str) -> list[str]:
    """Return a path and the folders above it.

    >>> parents_of("/app/a")
    ['/app/a', '/app', '/']
    """
    found = [path]
    while found[-1] != "/":  # no recursion: the agent makes paths as deep as it likes
        found.append(posixpath.dirname(found[-1]))
    return found


def resolved(path: str, links: Mapping[str, str]) -> str | None:
    """Return where an absolute path leads through links, those to come and those that the agent has; None for a loop.

    >>> resolved("/app/a/../b", {"/app/a": "deep/er"})
    '/app/deep/b'
    """
    rest, place, num_hops = path.split("/")[::-1], "/", 0
    while rest:
        part = rest.pop()
        if part == "..":
            place = posixpath.dirname(place)
        elif part not in ("", "."):
            place = posixpath.join(place, part)
        if (target := links.get(place)) is not None:
            num_hops += 1
            if num_hops > MAX_HOPS:
                return None
            rest += target.split("/")[::-1]
            place = "/" if target.startswith("/") else posixpath.dirname(place)
    return place


def is_within(path: str, folder: str) -> bool:
    return posixpath.commonpath((path, folder)) == folder


def encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
