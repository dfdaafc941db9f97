"""An engine and a trainer, started as a run starts them, and tried out. What it starts is gone when it returns.

    trainer process ─▶ engine ─▶ ids in and out ─▶ interruption ─▶ trainer's model ─▶ a train step ─▶ a push

An engine that belongs to a gateway elsewhere is asked, and nothing else: agents are at work there.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from areal_agent.cluster.adapters import engine_weights
from areal_agent.cluster.engines import open_engine
from areal_agent.cluster.local import start_trainer
from areal_agent.cluster.weights_folder import weights_folder
from areal_agent.config import Config
from areal_agent.doctor.attempt import attempt, examined
from areal_agent.doctor.finding import Finding, State
from areal_agent.doctor.pushing import parity_finding, push_findings, push_once
from areal_agent.doctor.report import Report
from areal_agent.doctor.rollouts import batch_of
from areal_agent.doctor.sampling import Asker, Sampled, interruption_findings, sample, sampling_finding
from areal_agent.engine.gpus import may_be_on
from areal_agent.engine.served import ServedEngine
from areal_agent.errors import ConfigError
from areal_agent.online_rollouts import connect_engine
from areal_agent.protocols import MemoryHolder
from areal_agent.tokens.renderer import Renderer
from areal_agent.trainer.client import TrainerClient
from areal_agent.trainer.reports import TrainerInfo
from areal_agent.types import WeightVersion

QUESTION = {"role": "user", "content": "Count from one to twenty."}
FIRST = WeightVersion()
NEXT = WeightVersion(step=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is tried: the engine and the trainer of a config, with the model in the folder `model`."""

    config: Config
    model: Path
    renderer: Renderer
    logs: Path
    report: Report

    async def run(self) -> None:
        """As far as it goes."""
        async with AsyncExitStack() as stack:
            if self.config.is_online:
                await self._ask_elsewhere(stack)
            else:
                await self._try_here(stack)

    async def _ask_elsewhere(self, stack: AsyncExitStack) -> None:
        engine = await attempt(self.report, "engine", connect_engine(self.config.engine))
        if engine is not None:
            stack.push_async_callback(engine.aclose)
            await attempt(self.report, "engine", self._ask(engine))
        self.report.skip("interruption", "trainer", "push", why="agents are at work with that engine")

    async def _try_here(self, stack: AsyncExitStack) -> None:
        """In the order of a run: where engine and trainer share a GPU, the engine takes its part of it first."""
        in_memory = self.config.trainer.transfer == "shared_memory"
        shared_memory = stack.enter_context(weights_folder(in_memory=in_memory))
        _, trainer = await stack.enter_async_context(start_trainer(self.config.trainer.threads, self.logs))
        weights = await asyncio.to_thread(engine_weights, self.config.trainer, self.model, None, shared_memory)
        opening = stack.enter_async_context(open_engine(self.config.engine, weights, FIRST, self.logs))
        engine = await attempt(self.report, "engine", opening, limit_s=None)  # it has a limit of its own
        asked = None
        if engine is not None:
            asked = await attempt(self.report, "engine", self._ask(engine.client))
        if engine is None or asked is None:
            self.report.skip("interruption", why="the engine does not answer as it must")
        else:
            await examined(self.report, "interruption", interruption_findings(engine.client, asked.asker))
        loaded = await attempt(
            self.report, "trainer", self._load(trainer, shared_memory), limit_s=self.config.trainer.startup_timeout_s
        )
        if engine is None or asked is None or loaded is None:
            self.report.skip("parity", "push", "spans", why="that takes an engine and a trainer")
            return
        await examined(self.report, "parity", self._train(trainer, asked, loaded, engine.memory))
        await examined(self.report, "push", self._push(engine.client, trainer, asked.asker))

    async def _ask(self, engine: ServedEngine) -> "Asked":
        info = await engine.info()
        asker = Asker(
            prompt_ids=tuple(self.renderer.ids_of(self.renderer.render([QUESTION]))),
            stop_token_ids=self.renderer.stop_token_ids,
            temperature=self.config.rollout.temperature or 1.0,
            info=info,
        )
        if asker.room < 1:
            raise ConfigError(
                f"a short question takes {len(asker.prompt_ids)} tokens, and the engine's context has "
                f"{info.max_context_tokens}: no answer fits; raise engine.max_context_tokens"
            )
        answers = await sample(engine, asker)
        self.report.add(sampling_finding(answers, info))
        return Asked(asker=asker, answers=tuple(answers))

    async def _load(self, trainer: TrainerClient, shared_memory: Path) -> TrainerInfo:
        config = self.config
        started_s = time.perf_counter()
        info = await trainer.init(
            model=self.model,
            trainer=config.trainer,
            algorithm=config.algorithm,
            seed=config.seed,
            shared_memory=shared_memory,
            resume=False,
            num_steps=config.steps,
            shares_gpu=may_be_on(config.engine, config.trainer.num_ranks),
        )
        ranks = f" on {config.trainer.num_ranks} ranks" if config.trainer.num_ranks > 1 else ""
        found = (
            f"{info.num_parameters:,} parameters on {info.device}{ranks}, in {time.perf_counter() - started_s:.1f} s"
        )
        self.report.add(Finding(check="trainer", state=State.OK, found=found))
        return info

    async def _train(
        self, trainer: TrainerClient, asked: "Asked", info: TrainerInfo, memory: MemoryHolder | None
    ) -> list[Finding]:
        batch = batch_of([one.request for one in asked.answers], [one.result for one in asked.answers])
        if memory is not None:
            await memory.release_memory()
        try:
            report = await trainer.train_step(batch)
        finally:
            if memory is not None:
                await memory.resume_memory()
        return [parity_finding(report, is_float32=info.device == "cpu")]

    async def _push(self, engine: ServedEngine, trainer: TrainerClient, asker: Asker) -> list[Finding]:
        pushed = await push_once(engine, trainer, asker, NEXT)
        return push_findings(pushed, self.config.trainer.transfer, FIRST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """An engine that has answered: how it is asked, and what it said."""

    asker: Asker
    answers: tuple[Sampled, ...]
