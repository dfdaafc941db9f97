"""Grades a model with a config's workflow on its held-out tasks. Nothing is trained.

The tasks, seeds and sampling are those of the evaluations of `train`, so a checkpoint graded here gives the figure that
`summary.json` has.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import orjson

from areal_agent.cluster.models import obtain_model
from areal_agent.config import Config
from areal_agent.errors import ConfigError, RolloutsFailing
from areal_agent.eval_report import EvalAnswer, EvalReport
from areal_agent.ledger.ledger import Ledger
from areal_agent.observe.logging import log_to_file, show_warnings
from areal_agent.observe.progress import Progress
from areal_agent.preflight import Preflight
from areal_agent.serving import open_serving
from areal_agent.types import WeightVersion


def evaluate(file: str, overrides: Sequence[str]) -> int:
    """Evaluate as a config says; the exit code. Raises ArealAgentError."""
    config = Config.load(file, overrides)
    preflight = Preflight.check(config, name=f"{Path(file).stem}-eval")
    if not preflight.eval_tasks:
        raise ConfigError("eval.num_tasks is 0: there is nothing to evaluate")
    report = asyncio.run(_evaluate(preflight))
    summary = {
        "status": "failed" if report.num_failed == report.num_tasks else "completed",
        "model": config.model,
        "success": report.success,
        "reward_mean": report.reward_mean,
        "num_tasks": report.num_tasks,
        "num_failed": report.num_failed,
    }
    preflight.folder.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    print(
        f"success on {report.num_tasks} held-out tasks: {report.success:.3f} (mean reward {report.reward_mean:.3f}, "
        f"{report.num_failed} rollouts failed)\n"
        f"in {preflight.folder.path}: summary.json, and the ledger with every token"
    )
    if report.num_failed == report.num_tasks:
        raise RolloutsFailing(f"every rollout failed; the causes are in {preflight.folder.logs / 'main.log'}")
    return 0


async def _evaluate(preflight: Preflight) -> EvalReport:
    config, folder = preflight.config, preflight.folder
    assert preflight.workflow is not None  # held-out tasks are for a workflow
    progress = Progress(total_steps=config.steps, mode=config.observe.progress)
    folder.make()
    log_to_file(folder.logs / "main.log")
    show_warnings(progress.note)
    folder.config.write_text(config.to_yaml())
    num_done = 0

    def on_answer(_: EvalAnswer) -> None:
        nonlocal num_done
        num_done += 1
        progress.phase_progress(num_done / len(preflight.eval_tasks), f"{num_done}/{len(preflight.eval_tasks)} tasks")

    model = await obtain_model(config.model, config.seed, folder.logs, progress)
    ledger = await Ledger.open(folder.ledger, create=True)
    try:
        await ledger.begin_incarnation(0)
        progress.phase("starting the engine")
        async with open_serving(
            config,
            preflight.workflow,
            ledger,
            workflow_path=preflight.workflow_path,
            weights=model,
            tokenizer=model,
            version=WeightVersion(),
            logs=folder.logs,
        ) as serving:
            progress.phase("evaluating")
            return await serving.evaluate(preflight.eval_tasks, "eval", on_answer, len(preflight.eval_tasks))
    finally:
        await ledger.aclose()
        progress.close()
