"""What every backend implements: a `Provider` makes a `Cell`, in which a `Process` (`cell.py`) runs a `Program`.

A cell is a place where programs run. Callers hold a `Sandbox` (`sandbox.py`), which wraps a cell and adds what is the
same for all backends (environment, set-up, sessions, packing of folders, the pool's slots). A program's failure is an
`ExecResult`; a cell that cannot run programs raises `SandboxError`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from sandboxes.cell import Process
from sandboxes.spec import CellSpec, ExecResult, Isolation, Limits, Program


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The guarantees of a backend on this machine, and the attacks that it is known not to stop."""

    backend: str
    isolation: Isolation
    enforces: tuple[str, ...]
    cannot_stop: tuple[str, ...]


ENFORCED_BY_WALLS = (
    "wall-clock time",
    "CPU time, file length and open files of each process",
    "output",
    "disk and number of files of the sandbox",
    "no reading your files",
    "no changing files outside the working directory",
    "no reading the memory and environment of your other processes",
    "no sending signals to your other processes",
    "daemons die with their program",
)
"""The guarantees of every backend with walls."""


@dataclass(frozen=True, slots=True)
class Archives:
    """The way to any path of a sandbox whose image can be written to: tars with owners, modes and links.

    `save` writes a tar of a path; OSError if that is a link, missing or too long. `load` unpacks one in a folder.
    """

    save: Callable[[str, BinaryIO, int], Awaitable[None]]  # path, target, most bytes
    load: Callable[[BinaryIO | bytes, str], Awaitable[None]]  # tar, folder


class Cell(Protocol):
    """A working directory in which any number of programs run at once. `close` removes it.

    Cancelling a call kills its program. Paths are relative to the working directory. A file that is missing, is a
    link or is too long raises OSError, as opening a file does.
    """

    async def answers(self) -> bool:
        """Return whether the cell can run anything, which it is asked."""
        ...

    async def exec(self, program: Program, *, stdin: bytes, limits: Limits) -> ExecResult:
        """Run a program to its end."""
        ...

    async def spawn(self, program: Program, *, limits: Limits, is_timed: bool) -> Process:
        """Start a program, which lives until it ends, `kill` is called, or the cell is closed.

        Its output is not bounded. Only if `is_timed` do `limits.wall_s` and `limits.cpu_s` apply.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Return the bytes of a regular file, which may be as long as the cell's `Limits.file_bytes`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, replacing any old one, and make its parent folders; never follow a link."""
        ...

    async def upload(self, tar: bytes, path: str) -> None:
        """Unpack a tar into a folder, which is made if missing; never follow a link.

        The tar comes from `folder.pack`: only regular files and folders, relative paths, no `..`.
        """
        ...

    async def download(self, path: str, max_bytes: int) -> bytes:
        """Return a tar of a folder's files and folders, with paths relative to it; OSError above `max_bytes`.

        The folder may be hostile: anything that is neither file nor folder is left out, and no link is followed.
        """
        ...

    async def close(self) -> None:
        """Kill what runs in the cell and remove its files. Harmless when it is closed already."""
        ...


class Provider(Protocol):
    """The maker of one backend's cells."""

    def capabilities(self) -> Capabilities: ...

    def check(self, spec: CellSpec) -> None:
        """Raise SandboxError when this backend cannot give what `spec` asks for. Quick: nothing is started."""
        ...

    async def create(self, spec: CellSpec) -> Cell:
        """Return a fresh cell that is ready to run programs. The pool keeps some in stock."""
        ...

    async def reap(self) -> int:
        """Remove what dead owners left on this machine, and return the number of things removed."""
        ...

    async def close(self) -> None:
        """Close every cell and release what the backend holds. Harmless when it is closed already."""
        ...
