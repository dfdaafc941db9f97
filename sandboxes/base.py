"""What every backend implements: `Provider`, which makes a `Cell`, in which a `Process` runs a `Program`.

A cell is a place where programs run. Callers hold a `Sandbox` (`sandbox.py`), which is a cell in their hands: it adds
what is the same for all backends (environment, set-up, sessions, packing of folders, the pool's slots).
It knows no backend. A program's failure is an `ExecResult`; a cell that cannot run programs raises `SandboxError`.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sandboxes.spec import CellSpec, ExecResult, Isolation, Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What to run: an executable with its arguments, or Python source as `__main__`.

    Source runs in a process of its own, with the standard library and the modules of the working directory. An
    `argv[0]` that cannot be run ends as in a shell: 127 or 126, the reason on stderr.
    """

    argv: tuple[str, ...] = ()
    source: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # added to PATH, HOME and TMPDIR of the cell
    cwd: str = "."  # relative to the working directory

    def __post_init__(self) -> None:
        if bool(self.argv) == (self.source is not None):
            raise ValueError(f"argv is {self.argv!r}; give the program and its arguments as a list of strings")


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend promises on this machine, and what it is known not to stop."""

    backend: str
    isolation: Isolation
    enforces: tuple[str, ...]
    cannot_stop: tuple[str, ...]


class Process(Protocol):
    """A program that runs, its output as it is printed.

    What nobody reads stays in the pipe, and the program waits when that is full: nothing piles up in the host.
    """

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        """Chunks as they come, none of them empty; ends when the program has closed it or is dead."""
        ...

    @property
    def stderr(self) -> AsyncIterator[bytes]: ...

    async def write(self, data: bytes) -> None:
        """To its stdin, when it has room. BrokenPipeError when nobody will read it."""
        ...

    async def close_stdin(self) -> None: ...

    async def wait(self) -> ExecResult:
        """How it ended, without what it printed. It may be called any number of times, also at once."""
        ...

    async def kill(self) -> None:
        """Kill it, with all that came of it, and wait until it is dead. Harmless when it is."""
        ...


class Cell(Protocol):
    """A working directory in which programs run, any number at once. It is gone after `close`.

    A cancelled call kills its program. Paths are relative to the working directory; what is not as asked in the files
    of a cell (nothing there, a link, too long) raises OSError, as opening a file does.
    """

    @property
    def is_alive(self) -> bool:
        """False when it is known that it can run nothing any more; without asking it."""
        ...

    async def exec(self, program: Program, *, stdin: bytes, limits: Limits) -> ExecResult:
        """Run a program to its end."""
        ...

    async def spawn(self, program: Program, *, limits: Limits, is_timed: bool) -> Process:
        """Start a program, which lives until its end, `kill`, or `close` of the cell.

        Its output is not bounded; `is_timed`: whether `limits.wall_s` and `cpu_s` hold.
        """
        ...

    async def read(self, path: str) -> bytes:
        """The bytes of a regular file of at most `Limits.file_bytes` of the cell."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file anew, with the folders that lead to it; never through a link."""
        ...

    async def upload(self, tar: bytes, path: str) -> None:
        """Write the files of a tar into a folder, which is made; never through a link.

        The tar is one of `archive.py`: regular files and folders alone, paths relative, without `..`.
        """
        ...

    async def download(self, path: str, max_bytes: int) -> bytes:
        """A folder as a tar of its regular files and folders, paths relative to it; OSError when they are more.

        Made of a hostile folder: what is neither file nor folder is left out, and no link is followed.
        """
        ...

    async def close(self) -> None:
        """Kill what runs in it and remove its files. Harmless when it is closed already."""
        ...


class Provider(Protocol):
    """Makes cells of one backend."""

    def capabilities(self) -> Capabilities: ...

    def check(self, spec: CellSpec) -> None:
        """SandboxError when this backend cannot give what `spec` asks. Quick: nothing is started."""
        ...

    async def create(self, spec: CellSpec) -> Cell:
        """A fresh cell, ready to run programs. The pool keeps some in stock (`stock.py`)."""
        ...

    async def reap(self) -> int:
        """Remove what dead owners left on this machine; how many things there were."""
        ...

    async def close(self) -> None:
        """Close every cell and release what the backend holds. Harmless when it is closed already."""
        ...
