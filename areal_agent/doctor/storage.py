"""Room for what a run writes: checkpoints on the disk of its folder, and new weights on their way to the engine."""

import os
import shutil
import tempfile
from pathlib import Path

from areal_agent.config import Config
from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.machine import Machine, gib
from areal_agent.doctor.memory_parts import uses_gpu
from areal_agent.doctor.shape import ModelShape
from areal_agent.doctor.trainer_memory import NUM_SLOTS, TrainerMemory

SHARED_MEMORY = Path("/dev/shm")
FOLDERS_OF_SERVERS = 2
"""Of SGLang and vLLM, which load folders: the one that serves and the next."""
FOLDERS_OF_DISK = 3
"""weights/disk.py keeps two, and writes a third."""


async def storage_findings(shape: ModelShape, config: Config, machine: Machine) -> list[Finding]:
    """One for checkpoints, one for weights."""
    memory = TrainerMemory(shape=shape, config=config, is_gpu=uses_gpu(config.trainer.device, machine))
    return [_checkpoints(memory, config), _weights(memory, config)]


def _checkpoints(memory: TrainerMemory, config: Config) -> Finding:
    """The newest is whole before the oldest goes."""
    number = config.trainer.keep_last + 1
    needed = number * memory.checkpoint_bytes
    place = nearest_folder(Path(config.run_dir or "runs"))
    free = shutil.disk_usage(place).free
    found = (
        f"{number} checkpoints of {gib(memory.checkpoint_bytes)} (trainer.keep_last {config.trainer.keep_last}, and "
        f"the next one): {gib(needed)} of {gib(free)} that are free at {place}"
    )
    if needed > free:
        return Finding(
            check="disk",
            state=State.FAIL,
            found=found,
            change="free some, or set run_dir to another disk, or trainer.keep_last=1",
        )
    return Finding(check="disk", state=State.OK, found=found)


def _weights(memory: TrainerMemory, config: Config) -> Finding:
    if config.trainer.transfer == "cuda_ipc":
        return Finding(check="transfer", state=State.OK, found="new weights stay within the GPU")
    if config.trainer.transfer == "distributed":
        found = f"new weights go to the engine from {config.trainer.transfer_host}, over no file"
        return Finding(check="transfer", state=State.OK, found=found)
    in_memory = config.trainer.transfer == "shared_memory" and os.access(SHARED_MEMORY, os.W_OK)
    place = SHARED_MEMORY if in_memory else Path(tempfile.gettempdir())
    copies = NUM_SLOTS if config.trainer.transfer == "shared_memory" else FOLDERS_OF_DISK
    may_load_folders = config.engine.backend != "embedded" or config.engine.url is not None  # it says which
    if may_load_folders and config.trainer.transfer == "shared_memory":
        copies += FOLDERS_OF_SERVERS
    needed, free = copies * memory.published_bytes, shutil.disk_usage(place).free
    found = (
        f"new weights travel by {place}: {copies} copies of {gib(memory.published_bytes)}, {gib(needed)} of "
        f"{gib(free)} that are free"
    )
    if needed <= free:
        return Finding(check="transfer", state=State.OK, found=found)
    remedy = "give it more (docker run --shm-size), or set trainer.transfer=disk" if in_memory else "free some"
    return Finding(check="transfer", state=State.FAIL, found=found, change=remedy)


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the first above it that exists.

    >>> nearest_folder(Path("/none/such/folder"))
    PosixPath('/')
    """
    return next(one for one in (path, *path.absolute().parents) if one.is_dir())
