"""The config of a supervised fine-tuning. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_agent.config import ConfigFile
from areal_agent.errors import ConfigError
from areal_agent.observe.trackers import ObserveConfig
from areal_agent.section import Section
from areal_agent.tokens.template import HistoryThinking
from areal_agent.trainer.config import TrainerConfig


class DataConfig(Section):
    """The chats to learn: JSONL files, the best rollouts of a run, or both. A file's name alone means `files`."""

    files: tuple[str, ...] = ()
    """JSONL files of UTF-8: in each line an object with `messages`, as OpenAI writes them, and perhaps `tools`."""
    from_run: str | None = None
    """The folder of a run whose rollouts are learnt, by the very tokens that were sampled; `--from-run` sets it."""
    min_reward: float | None = None
    """The reward that a rollout of `from_run` needs at least, in total; `--min-reward` sets it."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """The length of the longest sequence; by default the context that the model was made for."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What to do with a row that has a longer sequence. `refuse`: its line is an error. `drop`: it is left out whole,
    and counted. No sequence is cut."""

    @field_validator("files", mode="before")
    @classmethod
    def _one_file(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not self.files and self.from_run is None:
            raise ValueError("names no chats; set data to a JSONL file, or data.from_run to a run's folder")
        if (self.from_run is None) != (self.min_reward is None):
            raise ValueError("from_run and min_reward belong together: set both, or neither")
        return self


class HeldOutConfig(Section):
    """The chats that are not learnt, on which the loss is measured. A file's name alone means `file`."""

    file: str | None = None
    """A JSONL file; by default a share of `data` is held out."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """The share of the rows of `data` that is held out, drawn by `seed`; 0: none, and nothing is measured."""
    every: Annotated[int, Field(ge=1)] = 25
    """Steps between evaluations. There is also one before the first step and one after the last."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.file is not None and self.share != type(self).model_fields["share"].default:
            raise ValueError("share has no effect beside file; leave one of them out")
        if not self.is_measured and self.every != type(self).model_fields["every"].default:
            raise ValueError("every has no effect with share 0, since nothing is measured; leave it out")
        return self

    @property
    def is_measured(self) -> bool:
        return self.file is not None or self.share > 0


class FlatConfig(Section):
    """When fine-tuning ends before its last epoch: once the evaluation loss is flat, the learning rate decays."""

    checks: Annotated[int, Field(ge=1)] = 4
    """The loss is flat when it has not fallen by `min_fall` in so many evaluations."""
    min_fall: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """The share of the best loss so far by which a new one has to be lower."""
    decay_steps: Annotated[int, Field(ge=1)] = 50
    """The number of last steps, over which the learning rate falls linearly, though never below a fiftieth. They begin
    when the loss is flat, or in time for the last of all steps."""


class SftConfig(ConfigFile):
    """Everything that defines a supervised fine-tuning."""

    shorthands: ClassVar[Mapping[str, str]] = {"data": "files", "held_out": "file"}

    model: Annotated[str, Field(min_length=1)]
    """A Hugging Face folder, a hub name (`org/name`), or `tiny`, as in a training run."""
    data: DataConfig
    """A JSONL file, or a section."""
    held_out: HeldOutConfig = HeldOutConfig()
    run_dir: str | None = None
    """The run's folder; by default `runs/<name of the config file>`, with a number when that is taken."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of the order of rows, of those held out, and of new adapters."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """How often each row is learnt; the last epoch may be a part."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Rows (chats) a step."""
    chat_template: str | None = None
    """A Jinja file in place of the model's own chat template, for a model without one, or without tools in it. It is
    saved with the model."""
    history_thinking: HistoryThinking = HistoryThinking.TEMPLATE
    """The thinking of earlier answers, as in `rollout.history_thinking`: `template` lets the template strip it, so that
    the next answer begins a sequence; `keep` keeps it, by a template that is saved with the model."""
    until_flat: FlatConfig | None = None
    """End when the evaluation loss is flat; `{}` uses the defaults below. Without this key all epochs are learnt."""
    trainer: TrainerConfig = TrainerConfig()
    """As in a training run, without what pushes weights to engines. `schedule` spans all steps."""
    observe: ObserveConfig = ObserveConfig()
    """As in a training run; without a terminal there is a line an evaluation."""

    def read_chat_template(self) -> str | None:
        """Return the text of `chat_template`; None without one. Raises ConfigError when it cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"chat_template is {self.chat_template!r}, and cannot be read: {error}") from error

    @model_validator(mode="after")
    def _has_no_idle_options(self) -> Self:
        trainer, flat = self.trainer, self.until_flat
        plain = TrainerConfig()
        idle = [name for name in ("transfer", "startup_timeout_s") if getattr(trainer, name) != getattr(plain, name)]
        if trainer.lora is not None and trainer.lora.push != "merged":
            idle.append("lora.push")
        if idle:
            raise ValueError(f"trainer.{idle[0]} has no effect here: there is no engine to push to; leave it out")
        if self.observe.token_records != ObserveConfig().token_records:
            raise ValueError("observe.token_records has no effect here: it is for what rewards teach; leave it out")
        if flat is not None and not self.held_out.is_measured:
            raise ValueError("until_flat needs chats to measure on; set held_out.share, or leave until_flat out")
        if flat is not None and trainer.schedule != "constant":
            raise ValueError(
                f"trainer.schedule is {trainer.schedule!r}, and until_flat has a decay of its own; set it to 'constant'"
            )
        return self
