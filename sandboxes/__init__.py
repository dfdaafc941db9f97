"""Sandboxes: run programs that a model wrote, within limits, and say honestly how each ended.

::

    spec.py, limits.py, result.py    what is asked, what may be used, how a program ended
    base.py         what a backend implements: Provider, Cell, Process
    pool.py         open_pool, Pool: a backend, sandboxes on demand, programs at once bounded
    containers/     the docker backend: every sandbox a container
    bubblewrap.py   the bubblewrap backend: every sandbox a jail
      jail.py       what a jail shows of the host, and the commands that build it
      enter.py      its walls by system calls, where bubblewrap is missing
      inside.py     its last steps from inside: disk, user, filter
      seccomp.py    the filter
      cgroups.py    what bounds all processes of a program together
    subprocess.py   the subprocess backend: a process of the host's user under kernel limits
    link.py         the host's end of a launcher
    launcher.py     the launcher: a resident process that forks, confines and reaps programs
    execution.py    one program, from its start to its result
    output.py       what a program prints, bounded
    folder.py       a working directory, from its making to its removal
    conformance/    the hostile suite
    doctor.py       what works on this machine
    reap.py         what dead processes left; owner.py tells whose it was

An independent package: of areal_agent it knows the error `SandboxError` alone. What a backend cannot stop is in
README.md and in `Pool.capabilities()`.
"""

from sandboxes.base import Capabilities, Cell, Process, Program, Provider
from sandboxes.limits import Limits
from sandboxes.pool import Pool, open_pool
from sandboxes.result import ExecResult, Status
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Access, Isolation, Network, SandboxSpec

__all__ = [
    "Access",
    "Capabilities",
    "Cell",
    "ExecResult",
    "Isolation",
    "Limits",
    "Network",
    "Pool",
    "Process",
    "Program",
    "Provider",
    "Sandbox",
    "SandboxSpec",
    "Status",
    "open_pool",
]
