"""What every backend implements: a `Provider` makes a `Cell`, in which a `Process` (`cell.py`) runs a `Program`.

A cell is a place where programs run. Callers hold a `Sandbox` (`sandbox.py`), which wraps a cell and adds what is the
same for all backends (environment, set-up, sessions, packing of folders, the pool's slots). A program's failure is an
`ExecResult`; a cell that cannot run programs raises `SandboxError`.
"""

from dataclasses import dataclass
from typing import Protocol

from sandboxes.cell import Cell
from sandboxes.spec import CellSpec, Isolation


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
