"""Sandboxes run programs that a model wrote, within limits, and report honestly how each ended.

::

    spec.py         what a caller asks for (SandboxSpec, Limits, Network) and gets back (ExecResult, Status)
    base.py         what a backend implements: Provider
    pool.py         open_pool, Pool: sandboxes on demand, the stock of started cells, the choice of a backend
    sandbox.py      Sandbox: a cell of any backend in its caller's hands
    sessions.py     shells and Python interpreters that keep their state; session_inside.py runs in the sandbox
    sync.py         the same interface without asyncio
    tunnel.py       a tunnel out of a sandbox; agent/tunnel.py is its inner end
    proxy.py        a sandbox's way to the network
    gateway.py      the way of a sandbox's programs to their own session of a gateway
    cell.py         a cell whose programs an agent runs, for every backend; how a program ended
    link.py         the host's end of an agent, and how an agent is started
    agent/          the agent, which forks, confines and reaps programs, and the walls of jails
    containers/     the docker backend: every sandbox is a container
    jail.py         the jail backend: every sandbox is a jail of namespaces
    subprocess.py   the subprocess backend: processes of the host's user under kernel limits
    seccomp.py      the system-call filter of jails and containers
    cgroups.py      bounds that the programs of a sandbox share; control groups, and reaping those of dead processes
    folder.py       a working directory, and tars of its files
    owner.py        tags that tell which process made a thing, and whether it is dead
    judge/          code rewards
    tasks/          tasks as benchmarks ship them: folders with an image, tests and a solution
    tools.py        tools for agents
    conformance/    the hostile suite that every backend passes
    __main__.py     the command line: what works on this machine, the hostile suite, tidying up

The package is independent: all it imports of areal_agent is the error `SandboxError`. backends.md and
`Pool.capabilities()` say what each backend cannot stop.
"""

from sandboxes.base import Capabilities, Provider
from sandboxes.cell import Cell, Process
from sandboxes.pool import Pool, open_pool
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Access, ExecResult, Isolation, Limits, Network, Program, SandboxSpec, Status

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
