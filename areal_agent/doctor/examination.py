"""The checks of the doctor in their order, from a config file to an exit code.

    settings ─▶ machine ─▶ model ─▶ tokenizer ─▶ template ─▶ memory ─▶ storage ─▶ sandboxes ─▶ engine and trainer

A check that fails hides no other; checks that need its result are skipped. Cheap ones come first; those that start
processes come last, and can be left out.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agent.cluster.local import TOKENIZER
from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, Report, State, attempt, examined
from areal_agent.doctor.machines import Machine, dtype_finding, this_machine, uses_gpu
from areal_agent.doctor.memory import memory_findings
from areal_agent.doctor.model import (
    ModelShape,
    find_model,
    has_weights,
    model_findings,
    shape_of,
    template_findings,
    tokenizer_findings,
)
from areal_agent.doctor.settings import check_settings, sandbox_findings, storage_findings
from areal_agent.doctor.trial import NO_ENGINE, Trial
from areal_agent.run.serving import transcript_settings
from areal_agent.threads import num_cores
from areal_agent.tokens.renderer import Renderer


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """One examination. `elsewhere` are the machines of the run, where it is not this one: then nothing is started."""

    config: Config
    name: str  # of the run's default folder
    report: Report
    starts_engine: bool = True
    elsewhere: Machine | None = None

    async def run(self) -> None:
        """Run all checks and report them."""
        await check_settings(self.config, self.name, self.report, is_here=self.elsewhere is None)
        machine = self.elsewhere or await this_machine()
        self.report.add(self._machine_finding(machine))
        with tempfile.TemporaryDirectory(prefix="areal-agent-doctor-") as folder:
            logs = Path(folder)
            model, shape, renderer = await self._model(logs)
            if shape is None:
                self.report.skip("memory", "disk", "transfer", why="the sizes of the model are not known")
            else:
                config = self.config
                is_here = self.elsewhere is None and not config.is_online and config.cluster.address is None
                if is_here and config.engine.backend == "embedded":  # other engines choose for themselves
                    self.report.add(dtype_finding(shape, self.config, machine))
                if self.elsewhere is None and self.config.cluster.address is not None:
                    self.report.skip("memory", why="it is that of other machines; describe them: --gpus, --nodes, ...")
                else:
                    await examined(self.report, "memory", memory_findings(shape, self.config, machine))
                await examined(self.report, "disk", storage_findings(shape, self.config, machine))
            if self.elsewhere is None:
                await examined(self.report, "sandboxes", sandbox_findings(self.config.sandbox))
            await self._try(model, renderer, logs)

    async def _model(self, logs: Path) -> tuple[Path | None, ModelShape | None, Renderer | None]:
        """Find the model's folder, sizes and tokenizer; None for each that could not be had."""
        config, report = self.config, self.report
        with report.progress() as progress:
            finding = find_model(
                config, logs, progress, with_weights=self.starts_engine, is_here=self.elsewhere is None
            )
            found = await attempt(report, "model", finding, limit_s=None)
        if found is None:
            report.skip("tokenizer", "template", why="there is no model that can be trained")
            return None, None, None
        folder = found.folder
        shape = await attempt(report, "model", shape_of(config, folder))
        if shape is not None:
            await examined(report, "model", model_findings(config, folder, shape))
        if folder is None:
            report.skip("tokenizer", "template", why="the model is not built yet")
            return None, shape, None
        if self.elsewhere is not None and not (folder / TOKENIZER).is_file():
            report.skip("tokenizer", "template", why=f"there is no {TOKENIZER} beside {folder}")
            return None, shape, None
        loading = asyncio.to_thread(transcript_settings(config, folder).load_renderer)  # as the gateway of a run does
        renderer = await attempt(report, "tokenizer", loading)
        if renderer is None:
            report.skip("template", why="it needs the tokenizer")
        else:
            await examined(report, "tokenizer", tokenizer_findings(renderer, shape))
            await examined(report, "template", template_findings(renderer, config))
        return folder, shape, renderer

    async def _try(self, model: Path | None, renderer: Renderer | None, logs: Path) -> None:
        checks = ("engine", "interruption", "trainer", "parity", "push", "spans")
        if self.elsewhere is not None:
            self.report.skip("sandboxes", *checks, why="run the doctor on that machine")
        elif self.config.is_online and not self.starts_engine:
            self.report.skip(*checks, why=NO_ENGINE)
        elif model is None or renderer is None or not has_weights(model):
            self.report.skip(*checks, why="it needs a model here, with its weights and tokenizer")
        else:
            trial = Trial(config=self.config, model=model, renderer=renderer, logs=logs, report=self.report)
            await attempt(self.report, "engine", trial.run(with_engine=self.starts_engine), limit_s=None)

    def _machine_finding(self, machine: Machine) -> Finding:
        """Report what the machine has, and whether its cores are enough for the threads of engine and trainer."""
        if machine.is_elsewhere:
            return Finding("machine", State.OK, f"elsewhere: {machine}")
        config, cores = self.config, num_cores()
        of_trainer, of_engine = config.trainer, config.engine
        found = f"{machine}, {cores} cores"
        if config.cluster.address is not None:
            return Finding("machine", State.OK, f"{found}; engine and trainer are on machines of the cluster")
        trainer = 0 if uses_gpu(of_trainer.device, machine) else of_trainer.num_threads * of_trainer.num_ranks
        is_engine_here = not (config.is_online or of_engine.urls or uses_gpu(of_engine.device, machine))
        engine = of_engine.num_threads * of_engine.num_servers if is_engine_here else 0
        found += f"; engine and trainer compute with {engine} and {trainer} threads"
        if engine + trainer > cores:
            several = "engine.num_servers, " if of_engine.num_servers > 1 else ""
            found += ": more threads than cores make both many times slower"
            return Finding("machine", State.WARN, found, f"lower {several}engine.threads or trainer.threads")
        return Finding("machine", State.OK, found)


async def check_up(
    file: str,
    overrides: Sequence[str],
    *,
    starts_engine: bool,
    elsewhere: Machine | None = None,
) -> int:
    """Return 1 when a check failed, else 0. Raises ConfigError when the config cannot be read."""
    config = Config.load(file, overrides)
    if elsewhere is None:
        config = config.with_threads()
    report = Report()
    starts_engine = starts_engine and elsewhere is None
    try:
        await Examination(
            config=config, name=Path(file).stem, report=report, starts_engine=starts_engine, elsewhere=elsewhere
        ).run()
    finally:
        report.close()
    report.sum_up("here" if elsewhere is None else "there")
    return 1 if report.has_failed else 0
