"""How a program ended. It knows no backend."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a program ended. OK alone means that it ran to its end and exited with 0."""

    OK = "ok"
    NONZERO = "nonzero"  # it exited with another code
    SIGNALED = "signaled"  # a signal ended it that none of the limits below explains
    TIMEOUT = "timeout"  # wall-clock or CPU time was over
    MEMORY = "memory"  # it failed for want of memory
    PIDS = "pids"  # it started more processes than allowed
    DISK = "disk"  # it wrote more than allowed
    OUTPUT_LIMIT = "output_limit"  # it printed more than allowed; what was printed until then is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """How a program ended and what it printed, as raw bytes: nothing in them is ever read as a status.

    >>> result = ExecResult(status=Status.NONZERO, exit_code=3, signal=None, stdout=b"", stderr=b"no such city",
    ...                     truncated=False, wall_s=0.01, cpu_s=0.01, peak_memory_bytes=9_000_000)
    >>> result.is_ok, result.stderr.decode()
    (False, 'no such city')
    """

    status: Status
    exit_code: int | None  # None when a signal ended it
    signal: int | None  # None when it exited
    stdout: bytes
    stderr: bytes
    truncated: bool  # whether it printed more than is kept here
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int  # resident, of its largest process
    oom_kills: int = 0  # processes that the kernel killed for want of memory, where the backend can count them
    is_state_lost: bool = False  # of a session's run: what the runs before it left is gone as well

    @property
    def is_ok(self) -> bool:
        return self.status is Status.OK
