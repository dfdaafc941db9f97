"""How much memory a process has held at the most. It knows the files of the kernel and nobody's process."""

from pathlib import Path


def peak_memory_bytes(pid: int) -> int | None:
    """The high-water mark of a process's resident memory; None where the system does not tell (it is no Linux).

    None too for a process that is gone.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    marks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(marks[0]) * 1024 if marks else None
