"""The default image: Debian with Python, C, C++ and JavaScript, made on this machine from its own package mirror.

`python -m sandboxes image` makes it, as root, with debootstrap. What was made once is kept: the image by the engine,
its files in the user's cache.
"""

import asyncio
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_agent.errors import SandboxError
from sandboxes.containers.engine import Engine

DEFAULT_IMAGE = "areal-agent-sandbox:latest"
RECIPE_LABEL = "areal-agent.sandboxes.recipe"
PACKAGES = ("python3", "gcc", "g++", "libc6-dev", "nodejs")
OF_NO_USE = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "var/log")
DEBOOTSTRAP_TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirror:
    """Where this machine's own packages come from."""

    uri: str
    suite: str

    @property
    def recipe(self) -> str:
        """Names what the image is made of."""
        return hashlib.sha256(repr((self.suite, PACKAGES, OF_NO_USE)).encode()).hexdigest()[:16]


async def make_default_image(engine: Engine) -> bool:
    """Whether there was anything to do."""
    mirror = mirror_here()
    if await engine.label_of_image(DEFAULT_IMAGE, RECIPE_LABEL) == mirror.recipe:
        return False
    files = cache_folder() / f"{mirror.recipe}.tar"
    if not files.exists():
        await asyncio.to_thread(make_files, mirror, files)
    await engine.import_image(files, DEFAULT_IMAGE, {RECIPE_LABEL: mirror.recipe})
    return True


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "areal-agent-sandboxes"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_files(mirror: Mirror, target: Path) -> None:
    """Minutes of work. The tar appears whole or not at all."""
    program = shutil.which("debootstrap")
    if program is None or os.getuid() != 0:
        raise SandboxError("the default image is made by debootstrap, as root; install the package `debootstrap`")
    with tempfile.TemporaryDirectory(prefix="areal-agent-image-") as scratch:
        root, part = Path(scratch) / "root", target.with_suffix(".part")
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        made = subprocess.run(
            [program, *options, mirror.suite, str(root), mirror.uri],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEBOOTSTRAP_TIMEOUT_S, text=True, check=False,
        )  # fmt: skip
        if made.returncode != 0:
            raise SandboxError(f"debootstrap failed with {made.returncode}: {made.stdout[-1000:]}")
        for place in OF_NO_USE:
            shutil.rmtree(root / place, ignore_errors=True)
        with tarfile.open(part, "w") as tar:
            tar.add(root, arcname=".")
        part.rename(target)


def mirror_here() -> Mirror:
    """SandboxError on a system that has no Debian mirror."""
    codename = release_of(Path("/etc/os-release").read_text()) if Path("/etc/os-release").exists() else ""
    texts = [(path.suffix, path.read_text()) for path in source_files() if path.is_file()]
    for uri, suite, components in (entry for suffix, text in texts for entry in entries_of(text, suffix)):
        if suite == codename and "main" in components:
            return Mirror(uri=uri, suite=suite)
    raise SandboxError(
        f"apt has no source of {codename or 'an unnamed release'} with the component `main`; make the default image on "
        f"Debian, or import one as {DEFAULT_IMAGE!r}"
    )


def source_files() -> Iterator[Path]:
    yield Path("/etc/apt/sources.list")
    yield from sorted(Path("/etc/apt/sources.list.d").glob("*.list"))
    yield from sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))


def release_of(os_release: str) -> str:
    """The codename in /etc/os-release.

    >>> release_of('NAME="Debian GNU/Linux"\\nVERSION_CODENAME=bookworm')
    'bookworm'
    """
    pairs = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    return pairs.get("VERSION_CODENAME", "").strip('"')


def entries_of(text: str, suffix: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """URI, suite and components, from either way in which apt's sources are written.

    >>> list(entries_of("deb [arch=amd64] http://mirror/debian bookworm main contrib", ".list"))
    [('http://mirror/debian', 'bookworm', ('main', 'contrib'))]
    """
    if suffix != ".sources":
        for line in text.splitlines():
            words = [word for word in line.split() if not (word.startswith("[") or word.endswith("]"))]
            if words[:1] == ["deb"] and len(words) > 3:
                yield words[1], words[2], tuple(words[3:])
        return
    for stanza in text.split("\n\n"):
        lines = [line.split(":", 1) for line in stanza.splitlines() if ":" in line and not line.startswith("#")]
        fields = {name.strip(): value.split() for name, value in lines}
        if "deb" in fields.get("Types", []):
            for uri in fields.get("URIs", []):
                for suite in fields.get("Suites", []):
                    yield uri, suite, tuple(fields.get("Components", []))
