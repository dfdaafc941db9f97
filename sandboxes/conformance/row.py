"""A row of the hostile suite, the verdict on it, and the ways in which most rows are run."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from sandboxes.pool import Pool
from sandboxes.sandbox import Sandbox
from sandboxes.spec import ExecResult, Isolation, Limits, SandboxSpec, Status

MIB = 2**20
JAILED = Isolation.NAMESPACES
SURVIVES = "print('still works')"
OTHER_PROCESSES = """
import os
mine = [int(name) for name in os.listdir('/proc') if name.isdigit() and os.stat(f'/proc/{name}').st_uid == os.getuid()]
print(*set(mine) - {1, os.getpid()} if os.getppid() == 1 else '')
"""

Act = Callable[[Sandbox], Awaitable[str]]
"""Does harm in a sandbox, and returns what was seen if it is not what is required, else nothing."""


class Verdict(StrEnum):
    """The outcome of a row."""

    HELD = "held"
    BEYOND = "beyond"  # the backend says that it cannot stop this
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One kind of harm. `run` returns what was seen if it is not what is required, else nothing."""

    number: int
    harm: str
    required: str
    run: Callable[[Pool], Awaitable[str]]
    needs: Isolation = Isolation.PROCESS
    needs_groups: bool = False  # whether all processes of a program must be bounded together

    def is_within(self, pool: Pool) -> bool:
        """Return whether the backend promises to stop this."""
        capabilities = pool.capabilities()
        has_groups = "memory of many processes together" not in capabilities.cannot_stop
        return capabilities.isolation.covers(self.needs) and (has_groups or not self.needs_groups)


async def check(row: Row, pool: Pool) -> tuple[Verdict, str]:
    """Return the verdict on a row, and what was seen if it failed."""
    if not row.is_within(pool):
        return Verdict.BEYOND, ""
    seen = await row.run(pool)
    return (Verdict.FAILED, seen) if seen else (Verdict.HELD, "")


def in_box(act: Act, spec: SandboxSpec | None = None) -> Callable[[Pool], Awaitable[str]]:
    """Return a `Row.run` that acts in its own sandbox, which must still work afterwards, with no process left."""

    async def run(pool: Pool) -> str:
        async with pool.acquire(spec) as box:
            if seen := await act(box):
                return seen
            after = await box.exec_python(SURVIVES)
            if after.stdout != b"still works\n":
                return f"afterwards the sandbox gives {told(after)}"
            return await processes_left(box)

    return run


def told(result: ExecResult) -> str:
    """Describe a result in one line."""
    last = (result.stderr or result.stdout).rstrip().rpartition(b"\n")[2]
    return f"{result.status.value}, exit code {result.exit_code}, oom kills {result.oom_kills}, {last[-200:]!r}"


def ends_with(source: str, status: Status, limits: Limits) -> Callable[[Pool], Awaitable[str]]:
    """Return a `Row.run` whose program must end with this status."""

    async def act(box: Sandbox) -> str:
        result = await box.exec_python(source, limits=limits)
        return told(result) if result.status is not status else ""

    return in_box(act)


def prints(source: str, output: bytes) -> Callable[[Pool], Awaitable[str]]:
    """Return a `Row.run` whose program, which prints what it reached, must end well and print exactly `output`."""

    async def act(box: Sandbox) -> str:
        result = await box.exec_python(source)
        if result.is_ok and result.stdout == output:
            return ""
        return f"{told(result)}, printed {result.stdout[-300:]!r}"

    return in_box(act)


async def processes_left(box: Sandbox) -> str:
    """Report processes other than a jail's first one and the one that looks; without a jail a program cannot tell."""
    result = await box.exec_python(OTHER_PROCESSES)
    return f"processes are left: {result.stdout!r}" if result.stdout.strip() else ""
