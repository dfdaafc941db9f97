"""Sandboxes: run programs that a model wrote, within limits, and say honestly how each ended.

::

    spec.py, limits.py, result.py    what is asked, what may be used, how a program ended
    base.py         what a backend implements: Provider, Cell, Process
    pool.py         open_pool, Pool: sandboxes on demand, programs at once bounded
      backends.py   which backend
      stock.py      cells that are started before they are asked for
    sandbox.py      Sandbox: a cell of any backend in its caller's hands
      shell_session.py, python_session.py (and session_inside.py)    sessions that keep their state
      archive.py, paths.py    folders and tars
    sync.py         all this without asyncio
    proxy.py        a sandbox's way to the network
    containers/     the docker backend: every sandbox a container
    bubblewrap.py   the bubblewrap backend: every sandbox a jail
      jail.py       what a jail shows of the host, and the commands that build it
      seccomp.py    the filter
      cgroups.py    what bounds all processes of a program together; group_tree.py: who makes and keeps them
    subprocess.py   the subprocess backend: a process of the host's user under kernel limits
    launched.py     a cell of either of these two, whose programs a launcher runs
      link.py       the host's end of a launcher; interpreter.py starts it; environment.py: what programs find
      inner/        the launcher itself, and the walls of jails: what runs in a process of its own
      execution.py  one program, from its start to its result
      output.py     what a program prints, bounded
      spawned.py, streams.py    a program that is talked with while it runs
      folder.py     a working directory, from its making to its removal
    judge/, tools.py    code rewards; tools for agents
    conformance/    the hostile suite
    doctor.py       what works on this machine
    reap.py         what dead processes left; owner.py tells whose it was

An independent package: of areal_agent it knows the error `SandboxError` alone. What a backend cannot stop is in
README.md and in `Pool.capabilities()`.
"""

from sandboxes.base import Capabilities, Cell, Process, Program, Provider
from sandboxes.pool import Pool, open_pool
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Access, ExecResult, Isolation, Limits, Network, SandboxSpec, Status

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
