"""The checks of the doctor in their order, from a config file to an exit code.

    settings ─▶ machine ─▶ model ─▶ tokenizer ─▶ template ─▶ memory ─▶ storage ─▶ sandboxes ─▶ engine and trainer

A check that fails hides no other; checks that need its result are skipped. Cheap ones come first; those that start
processes come last, and can be left out.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agent.config import Config
from areal_agent.doctor.findings import GIB, Finding, Report, State, attempt, examined
from areal_agent.doctor.memory import Machine, memory_findings, num_cores, this_machine, uses_gpu
from areal_agent.doctor.model import (
    ModelShape,
    find_model,
    load_renderer,
    model_finding,
    shape_of,
    template_findings,
    tokenizer_findings,
)
from areal_agent.doctor.settings import check_settings, sandbox_findings, storage_findings
from areal_agent.doctor.trial import Trial
from areal_agent.tokens.renderer import Renderer


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """One examination. `planned` is the machine to estimate memory for, where it is not this one."""

    config: Config
    name: str  # of the run's default folder
    report: Report
    starts_engine: bool = True
    planned: Machine | None = None

    async def run(self) -> None:
        """Run all checks and report them."""
        await check_settings(self.config, self.name, self.report)
        machine = self.planned or await this_machine()
        self.report.add(self._machine_finding(machine))
        with tempfile.TemporaryDirectory(prefix="areal-agent-doctor-") as folder:
            logs = Path(folder)
            model, shape, renderer = await self._model(logs)
            if shape is None:
                self.report.skip("memory", "disk", "transfer", why="the sizes of the model are not known")
            else:
                await examined(self.report, "memory", memory_findings(shape, self.config, machine))
                await examined(self.report, "disk", storage_findings(shape, self.config, machine))
            await examined(self.report, "sandboxes", sandbox_findings(self.config.sandbox))
            await self._try(model, renderer, logs)

    async def _model(self, logs: Path) -> tuple[Path | None, ModelShape | None, Renderer | None]:
        """Find the model's folder, sizes and tokenizer; None for each that could not be had."""
        config, report = self.config, self.report
        found = await attempt(report, "model", find_model(config, logs, with_weights=self.starts_engine), limit_s=None)
        if found is None:
            report.skip("tokenizer", "template", why="the model is not here")
            return None, None, None
        folder = found.folder
        shape = await attempt(report, "model", shape_of(config, folder))
        if shape is not None:
            report.add(model_finding(config, folder, shape))
        if folder is None:
            report.skip("tokenizer", "template", why="the model is not built yet")
            return None, shape, None
        renderer = await attempt(report, "tokenizer", load_renderer(config, folder))
        if renderer is None:
            report.skip("template", why="it needs the tokenizer")
        else:
            await examined(report, "tokenizer", tokenizer_findings(renderer, shape))
            await examined(report, "template", template_findings(renderer, config))
        return folder, shape, renderer

    async def _try(self, model: Path | None, renderer: Renderer | None, logs: Path) -> None:
        checks = ("engine", "interruption", "trainer", "parity", "push", "spans")
        if not self.starts_engine:
            self.report.skip(*checks, why="--no-engine")
        elif model is None or renderer is None:
            self.report.skip(*checks, why="it needs a model and its tokenizer")
        else:
            trial = Trial(config=self.config, model=model, renderer=renderer, logs=logs, report=self.report)
            await attempt(self.report, "engine", trial.run(), limit_s=None)

    def _machine_finding(self, machine: Machine) -> Finding:
        """Report what the machine has, and whether its cores are enough for the threads of engine and trainer."""
        if self.planned is not None:
            own = "memory, disk and /dev/shm" if machine.num_gpus else "disk and /dev/shm"
            return Finding("machine", State.OK, f"planned: {machine}; {own} are this machine's")
        config, cores = self.config, num_cores()
        found = f"{machine}, {cores} cores"
        trainer = 0 if uses_gpu(config.trainer.device, machine) else config.trainer.threads * config.trainer.num_ranks
        is_engine_here = not (config.is_online or config.engine.urls or uses_gpu(config.engine.device, machine))
        engine = config.engine.threads * config.engine.num_servers if is_engine_here else 0
        if engine + trainer > cores:
            several = "engine.num_servers, " if config.engine.num_servers > 1 else ""
            found += (
                f"; engine and trainer compute with {engine} and {trainer} threads: more threads than cores make both "
                "many times slower"
            )
            return Finding("machine", State.WARN, found, f"lower {several}engine.threads or trainer.threads")
        return Finding("machine", State.OK, found)


async def check_up(
    file: str,
    overrides: Sequence[str],
    *,
    starts_engine: bool,
    num_gpus: int | None = None,
    memory_gib: float | None = None,
) -> int:
    """Return 1 when a check failed, else 0. `num_gpus` and `memory_gib` describe a machine that is planned.

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
    """Return a machine with such GPUs and this one's memory; without GPUs, one with `memory_bytes` of memory."""
    if num_gpus:
        return Machine(memory_bytes=here.memory_bytes, num_gpus=num_gpus, gpu_bytes=memory_bytes)
    return Machine(memory_bytes=memory_bytes)
