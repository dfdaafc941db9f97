"""One visit to the doctor: a config file examined and reported, with the exit code. It reads no command line."""

from collections.abc import Sequence
from pathlib import Path

from areal_agent.config import Config
from areal_agent.doctor.examination import Examination
from areal_agent.doctor.machine import GIB, Machine, this_machine
from areal_agent.doctor.report import Report


async def check_up(
    file: str,
    overrides: Sequence[str],
    *,
    starts_engine: bool,
    num_gpus: int | None = None,
    memory_gib: float | None = None,
) -> int:
    """1 when a check failed, else 0. `num_gpus` and `memory_gib` are those of a machine that is planned for.

    Raises ConfigError when the config cannot be read.
    """
    config = Config.load(file, overrides)
    planned = None
    if num_gpus is not None and memory_gib is not None:
        planned = plan(await this_machine(), num_gpus, int(memory_gib * GIB))
    report = Report()
    try:
        await Examination(
            config=config, name=Path(file).stem, report=report, starts_engine=starts_engine, planned=planned
        ).run()
    finally:
        report.close()
    report.sum_up()
    return 1 if report.has_failed else 0


def plan(here: Machine, num_gpus: int, memory_bytes: int) -> Machine:
    """A machine with such GPUs and the memory of this one; without GPUs, with that memory."""
    if num_gpus:
        return Machine(memory_bytes=here.memory_bytes, num_gpus=num_gpus, gpu_bytes=memory_bytes)
    return Machine(memory_bytes=memory_bytes)
