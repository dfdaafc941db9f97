"""The cost of a process: CPU nanoseconds of all its threads, instructions, resident bytes; and a bound on its CPU.

Linux only.
"""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/cpu")  # version 1
PERIOD_US = 20_000


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process since its start, without threads that have ended."""
    return _scheduled(pid, 0)


def waited_ns(pid: int) -> int:
    """Return how long its threads could have run and had no core: on an idle machine next to nothing."""
    return _scheduled(pid, 1)


def _scheduled(pid: int, column: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text().split()[column])
    return total


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class InstructionCounter:
    """Counts a process's instructions in user space, whatever runs beside it; `command` has to start the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: set[Path] = set()  # the counts of earlier stops
        out = f"--callgrind-out-file={folder / 'counts'}"
        self.command = ("valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", out)

    def start(self, pid: int) -> None:
        self._tell(pid, "--instr=on")

    def stop(self, pid: int) -> int:
        """Return the instructions since the start."""
        self._tell(pid, "--instr=off")
        self._tell(pid, "--dump")
        new = set(self._folder.iterdir()) - self._read
        self._read |= new
        lines = (line for path in new for line in path.read_text(errors="replace").splitlines())
        return max(int(line.split()[1]) for line in lines if line.startswith(("summary:", "totals:")))

    def _tell(self, pid: int, order: str) -> None:
        subprocess.run(["callgrind_control", str(pid), order], check=True, capture_output=True)

    @staticmethod
    def is_possible() -> bool:
        return shutil.which("callgrind_control") is not None


class CpuBound:
    """Gives a process at most `cores` of CPU, where cgroups of version 1 can be made."""

    def __init__(self, name: str, pid: int, cores: float) -> None:
        self._group = CGROUP / f"areal-agent-benchmark-{os.getpid()}-{name}"
        self._group.mkdir()
        (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._group / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD_US)))
        (self._group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the cgroup, after the process has ended."""
        with suppress(OSError):
            self._group.rmdir()

    @staticmethod
    def is_possible() -> bool:
        return os.access(CGROUP / "cgroup.procs", os.W_OK) and (CGROUP / "cpu.cfs_quota_us").exists()


def pin(pid: int, cores: set[int]) -> None:
    """Bind a process and all its threads to these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
