"""A supervised fine-tuning in its run folder, in this process: what it reads, what it leaves, how it goes on.

    config.yaml  metrics.jsonl  curve.png  summary.json  checkpoints/  logs/
    model/        the result: a Hugging Face folder, for `model:` of a training run

Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 ends it after the step under way, with a checkpoint; a second one ends the process at
once. A resume goes on from the newest checkpoint and makes the same steps that an uninterrupted run makes.
"""

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
from transformers.utils import logging as transformers_logging

from areal_agent.cluster.local import (
    describe_model,
    locked,
    obtain_model,
    read_described,
    require_model,
)
from areal_agent.errors import NO_ROOM, ArealAgentError, ConfigError, DiskFull, TrainerError
from areal_agent.files import RunFolder
from areal_agent.images import ImageFolder
from areal_agent.observe.curve import draw_losses
from areal_agent.observe.metrics import MetricsLog, Row, RowKind, evaluation_rows, numbers_of, read_metrics, step_rows
from areal_agent.observe.progress import Progress, clock_time
from areal_agent.observe.trackers import TrackedRun, require_installed, start_trackers
from areal_agent.process import INTERRUPTED_CODE, ended_by_signals, start_logging, time_of_day_s
from areal_agent.section import one_line
from areal_agent.sft.config import SftConfig
from areal_agent.sft.data import Data, load_data
from areal_agent.sft.fitting import Check, Fitted, Fitting, loaded
from areal_agent.threads import cores_for, is_on_cpu, share_out
from areal_agent.tokens.renderer import exported_template
from areal_agent.trainer.checkpoint import FOR_RESUMES, Checkpoint, FailedSaves, latest_checkpoint, newest_step
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.worker import Worker
from areal_agent.types import JsonObject

logger = logging.getLogger(__name__)
SAVE_POLL_S = 0.1
NOT_YET: JsonObject = {}


def fine_tune(config: SftConfig, *, name: str, resume: str | None = None, is_dry: bool = False) -> int:
    """Fine-tune as a config says, or only check it, and return the exit code. Raises ArealAgentError.

    `name` names the default run folder; `resume` is the folder of a run to go on with.
    """
    require_model(config.model)
    require_installed(config.observe.trackers)
    folder = RunFolder.choose(config.run_dir, name) if resume is None else RunFolder(Path(resume))
    if is_dry:
        print(describe(config, folder))
        return 0
    if folder.is_completed:
        raise ConfigError(f"--resume {str(folder.path)!r}: it is completed, and its model is {str(folder.model)!r}")
    progress = Progress(total_steps=0, mode=config.observe.progress)
    folder.make()
    with alone_in(folder):
        code, last_words = _run(config, folder, progress, is_resumed=resume is not None)
    print(last_words, flush=True)
    return code


def _run(config: SftConfig, folder: RunFolder, progress: Progress, *, is_resumed: bool) -> tuple[int, str]:
    """Return the exit code and the last words. A new run that makes no checkpoint for a fault of its config goes."""
    try:
        with told_failures(folder):
            start_logging(folder.logs / "main.log", show=progress.note)
            transformers_logging.disable_progress_bar()
            folder.config.write_text(config.to_yaml())
            return SftRun(config, folder, progress).run()
    except (ConfigError, KeyboardInterrupt):
        if not is_resumed and newest_step(folder.checkpoints) == 0:  # nothing is lost
            folder.give_up(keep_logs=False)
        raise
    finally:
        progress.close()


@contextmanager
def alone_in(folder: RunFolder) -> Generator[None]:
    """Hold the lock of a run folder, which has one writer. Raises ConfigError when another process has it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder.path))
        except OSError:
            raise ConfigError(
                f"run_dir {str(folder.path)!r}: another process is at work there; wait until it has ended"
            ) from None
        yield


def describe(config: SftConfig, folder: RunFolder) -> str:
    """Return what a run would do. Every row is read and made into sequences; nothing is started or written."""
    model = asyncio.run(describe_model(config.model, config.seed))
    if model is None:
        return f"fine-tunes {config.model} in {folder.path}\nits rows were not checked: the model is not built yet"
    with TemporaryDirectory() as images:
        data = load_data(config, model, context_of(model), ImageFolder(Path(images)))
    num_steps = data.num_steps(config.epochs, config.batch_size)
    return f"fine-tunes {config.model} for {num_steps} steps in {folder.path}\n{data}\ndry run: nothing was started"


def context_of(model: Path) -> int | None:
    """Return the number of tokens that a model was made for, where its config.json says so."""
    fields = read_described(model)
    return (fields.get("text_config") or fields).get("max_position_embeddings")


class SftRun:
    """One run, new or resumed, in a folder that is there."""

    def __init__(self, config: SftConfig, folder: RunFolder, progress: Progress) -> None:
        self._config = config
        self._folder = folder
        self._progress = progress
        self._images = ImageFolder(folder.images)
        self._saved = latest_checkpoint(folder.checkpoints)
        self._loss: float | None = None  # of the newest evaluation
        self._is_asked_to_end = False  # by a signal
        self._saving: int | None = None  # the step of a save under way
        self._failed_saves = FailedSaves(folder.checkpoints)

    def run(self) -> tuple[int, str]:
        """Make all steps that are left, and return the exit code and the last words."""
        config, folder = self._config, self._folder
        model = asyncio.run(obtain_model(config.model, config.seed, folder.logs, self._progress))
        self._progress.phase("reading the chats")
        data = load_data(config, model, context_of(model), self._images)
        num_steps = data.num_steps(config.epochs, config.batch_size)
        if config.until_flat and config.until_flat.decay_steps > num_steps:
            raise ConfigError(
                f"until_flat.decay_steps is {config.until_flat.decay_steps}, and there are only {num_steps} steps; "
                "lower it, or raise epochs"
            )
        self._progress.note(str(data))
        self._progress.phase("loading the model")
        with ended_by_signals(self._ask_to_end, self._tell_of_signal):
            if self._train(model, data, num_steps):
                return 0, self._close()
        assert self._saved is not None  # the step under way is saved
        hint = f"python -m areal_agent.sft --resume {folder.path}"
        return INTERRUPTED_CODE, f"interrupted after step {self._saved.step}; go on with: {hint}"

    def _ask_to_end(self) -> None:
        self._is_asked_to_end = True

    def _tell_of_signal(self, name: str) -> None:
        self._progress.note(
            f"interrupted ({name}): ending once the step under way is saved; a second signal ends the run at once"
        )

    def _train(self, model: Path, data: Data, num_steps: int) -> bool:
        """Make the steps that are left, and save the last one. Return whether all were made."""
        with self._metrics(), loaded(self._setup(model, num_steps), self._folder.logs) as trainer:
            fitting = self._fitting(trainer, data, num_steps)
            if fitting.step == 0 and data.held_out:
                self._note_check(fitting.check())
            for fitted in self._steps(fitting):
                is_last, is_asked = fitted.step >= fitting.num_steps, self._is_asked_to_end
                if fitted.step % self._config.trainer.checkpoint_every == 0 or is_asked or is_last:
                    self._save(trainer, fitting, is_final=is_asked or is_last)
                if is_asked and not is_last:
                    return False
        return True

    # ------------------------------------------------------------------ the parts

    def _setup(self, model: Path, num_steps: int) -> TrainerSetup:
        config, trainer = self._config, self._config.trainer
        cores = cores_for(model) if is_on_cpu(trainer.device) else 1
        _, threads = share_out(cores, "auto", 0, trainer.threads, trainer.num_ranks)
        return TrainerSetup(
            model=self._saved.path if self._saved else model,
            base=model,
            trainer=trainer.model_copy(update={"threads": threads}),
            seed=config.seed,
            shared_memory=self._folder.path,
            publishes=False,
            resume=self._saved is not None,
            chat_template=exported_template(model, config.history_thinking, given=config.read_chat_template()),
            num_steps=num_steps,
        )

    def _fitting(self, trainer: Worker, data: Data, num_steps: int) -> Fitting:
        config, num_done = self._config, self._saved.step if self._saved else 0
        return Fitting(
            trainer,
            data.batches(config.batch_size, config.seed, num_done),
            [record for row in data.held_out for record in row.records()],
            num_steps=num_steps,
            every=config.held_out.every,
            flat=config.until_flat,
            step=num_done,
            state=self._saved.run_state() if self._saved else None,
            images=self._images,
        )

    @contextmanager
    def _metrics(self) -> Generator[None]:
        """Open metrics.jsonl, without the rows that follow the checkpoint, and the trackers."""
        folder, num_done = self._folder, self._saved.step if self._saved else 0
        if folder.metrics.exists():
            kept = [row for row in read_metrics(folder.metrics) if row["step"] <= num_done and self._saved]
            folder.metrics.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in kept))
        self._log = MetricsLog(folder.metrics)
        tracked = TrackedRun(
            id=folder.path.resolve().name,
            name=folder.path.resolve().name,
            project=self._config.observe.project,
            folder=folder.path,
            config=self._config.model_dump(mode="json"),
            first_step=num_done + 1,
        )
        self._trackers = start_trackers(self._config.observe.trackers, tracked)
        try:
            yield
        finally:
            self._log.close()
            asyncio.run(self._trackers.aclose())

    def _steps(self, fitting: Fitting) -> Iterator[Fitted]:
        """Make the steps, and tell of each."""
        self._progress.phase("fine-tuning")
        for fitted in fitting.steps():
            metrics = {f"sft/{name}": value for name, value in fitted.metrics.items()}
            rate = fitted.metrics["num_input_tokens"] / fitted.seconds
            self._note(RowKind.STEP, fitted.step, metrics | {"sft/tokens_per_s": rate, "sft/seconds": fitted.seconds})
            if fitted.check is not None:
                self._note_check(fitted.check)
            measured = "" if self._loss is None else f", {self._loss:.3f} held out"
            text = f"step {fitted.step}/{fitting.num_steps}, loss {fitted.metrics['loss']:.3f}{measured}"
            self._progress.phase_progress(fitted.step / fitting.num_steps, text)
            yield fitted

    def _note_check(self, check: Check) -> None:
        self._loss = check.loss
        self._progress.note(f"step {check.step}: {check.loss:.4f} nats a token held out")
        self._note(RowKind.EVALUATION, check.step, {"sft/held_out_loss": check.loss})

    def _note(self, kind: RowKind, step: int, metrics: Mapping[str, float]) -> None:
        row: Row = {"kind": kind, "step": step, "incarnation": 0, "time": time_of_day_s(), **metrics}
        self._log.append(row)
        self._trackers.log(step, numbers_of(row))

    def _save(self, trainer: Worker, fitting: Fitting, *, is_final: bool) -> None:
        """Save once the save before has ended. Wait for a final one, and raise TrainerError if that fails."""
        self._finish_save(trainer)
        arguments = {"directory": str(self._folder.checkpoints), "step": fitting.step, "incarnation": 0}
        self._saving = fitting.step
        ended = trainer.call("save", {**arguments, "run_state": fitting.state})
        if ended or is_final:
            self._finish_save(trainer, ended)
        if is_final:
            self._failed_saves.check()

    def _finish_save(self, trainer: Worker, ended: JsonObject = NOT_YET) -> None:
        """Wait until a save under way has ended, and note how."""
        step, self._saving = self._saving, None
        if step is None:
            return
        while not (ended := ended or trainer.call("saved", {})):
            time.sleep(SAVE_POLL_S)
        if "fault" in ended:
            self._progress.note(self._failed_saves.add(step, ended["fault"]))
        else:
            self._failed_saves.clear()
            self._saved = Checkpoint(path=Path(ended["path"]), step=step, incarnation=0)

    def _close(self) -> str:
        """Leave the model, the picture and the summary, and return the last words."""
        folder, saved = self._folder, self._saved
        assert saved is not None  # the last step is saved
        half = folder.path / ".model"
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(saved.path, half, ignore=shutil.ignore_patterns(*FOR_RESUMES))
        shutil.rmtree(folder.model, ignore_errors=True)  # of a process that was killed before it left the summary
        half.rename(folder.model)
        rows = read_metrics(folder.metrics)
        steps, losses = step_rows(rows), [_number(row["sft/held_out_loss"]) for row in evaluation_rows(rows)]
        draw_losses(rows, folder.curve)
        train_s = sum(row["sft/seconds"] for row in steps)
        summary = {
            "status": "completed",
            "steps": saved.step,
            "loss": _number(steps[-1]["sft/loss"]),
            "held_out_loss_before": losses[0] if losses else None,
            "held_out_loss_after": losses[-1] if losses else None,
            "trained_tokens": sum(row["sft/num_loss_tokens"] for row in steps),
            "train_s": train_s,
        }
        folder.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        held_out = f", held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else ""
        return (
            f"{saved.step} steps in {clock_time(train_s)}: loss {summary['loss']:.3f}{held_out}\n"
            f"  model    {folder.model}  (model: {folder.model} in a training run)\n"
            f"  curve    {folder.curve}\n  metrics  {folder.metrics}"
        )


def _number(value: float | None) -> float:
    """Return a loss as it was: JSON has no NaN."""
    return math.nan if value is None else value


@contextmanager
def told_failures(folder: RunFolder) -> Generator[None]:
    """Turn whatever fails inside into an ArealAgentError, with a note on how to go on."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the boundary: torch may fail in any way
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            error = DiskFull.at(Path(error.filename or folder.path / "a file"))
        told = error if isinstance(error, ArealAgentError) else TrainerError(f"fine-tuning failed: {one_line(error)}")
        if not isinstance(told, DiskFull):
            logger.exception("the run failed")
            told.add_note(f"the traceback is in {folder.logs / 'main.log'}")
        told.add_note(f"go on with: python -m areal_agent.sft --resume {folder.path}")
        raise told from error
