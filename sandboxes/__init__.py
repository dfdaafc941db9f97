"""Sandboxes: run programs that a model wrote, within limits, and say honestly how each ended.

::

    base.py        the nouns: Limits, SandboxSpec, ExecResult, Status, and the protocols Sandbox and Provider
    pool.py        open_pool, Pool: sandboxes on demand, programs at once bounded
    subprocess.py  the subprocess backend: a process of the host's user under kernel limits
    link.py        the host's end of the launcher
    launcher.py    the launcher: a resident process that forks, confines and reaps programs
    output.py      what a program prints, bounded
    folder.py      a working directory, from its making to its removal

An independent package: of areal_agent it knows the error `SandboxError` alone. What a backend cannot stop is in
README.md and in `Pool.capabilities()`.
"""

from sandboxes.base import Capabilities, ExecResult, Isolation, Limits, Provider, Sandbox, SandboxSpec, Status
from sandboxes.pool import Pool, open_pool

__all__ = [
    "Capabilities",
    "ExecResult",
    "Isolation",
    "Limits",
    "Pool",
    "Provider",
    "Sandbox",
    "SandboxSpec",
    "Status",
    "open_pool",
]
