"""The config section of tasks (their sources, mixture and order), and objects of the user's by their import path."""

import importlib
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from areal_agent.errors import ConfigError
from areal_agent.section import Section

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class SourceKind(StrEnum):
    """The kind of a source, told by how it is written."""

    FUNCTION = "function"  # package.module:function
    JSONL = "jsonl"  # a path that ends in .jsonl
    PARQUET = "parquet"  # a path that ends in .parquet
    DATASET = "dataset"  # a folder, or a name on the Hugging Face hub


ImportPath = Annotated[str, Field(pattern=rf"^{IMPORT_PATH.pattern}$")]


class SourceConfig(Section):
    """One source of tasks."""

    source: Annotated[str, Field(min_length=1)]
    """`package.module:function`, called as `function(split, seed, **args)`; the path of a .jsonl or .parquet file; or a
    Hugging Face data set: a folder, or a name on the hub."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, Any])
    """Further arguments of the function, or of `datasets.load_dataset` (`{name: main, revision: ...}`)."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """The split of a data set, `train[:90%]` for example; by default `train` to train on and `test` to evaluate."""
    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """The workflow's names for columns, `{question: prompt}`; a task then has only these. By default all, as named."""
    filter: ImportPath | None = None
    """`package.module:predicate`, called with the data of each task; tasks for which it is false are left out."""
    name: Annotated[str, Field(pattern=r"^[^/\s]+$")] | None = None
    """The name of this source where sources are mixed; the ids of its tasks are `name/id`. By default the name of the
    file, the data set or the module.
    """
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """The weight of this source where sources are mixed: its share of the tasks is weight / sum of all weights."""

    @property
    def kind(self) -> SourceKind:
        """The kind, told from the form of `source`.

        >>> SourceConfig(source="data/gsm8k.jsonl").kind, SourceConfig(source="openai/gsm8k").kind
        (<SourceKind.JSONL: 'jsonl'>, <SourceKind.DATASET: 'dataset'>)
        """
        if IMPORT_PATH.fullmatch(self.source):
            return SourceKind.FUNCTION
        suffixes = {".jsonl": SourceKind.JSONL, ".parquet": SourceKind.PARQUET}
        return suffixes.get(Path(self.source).suffix, SourceKind.DATASET)

    @property
    def label(self) -> str:
        """`name`, or the default.

        >>> SourceConfig(source="envs.calculator.tasks:load").label, SourceConfig(source="data/gsm8k.jsonl").label
        ('envs.calculator.tasks', 'gsm8k')
        """
        if self.name is not None:
            return self.name
        is_function = self.kind is SourceKind.FUNCTION
        return self.source.partition(":")[0] if is_function else Path(self.source).stem or self.source

    @property
    def has_held_out_split(self) -> bool:
        """True when it has a separate split to evaluate on."""
        return self.kind is SourceKind.FUNCTION or (self.kind is SourceKind.DATASET and self.split is None)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.split is not None and self.kind is not SourceKind.DATASET:
            raise ValueError(
                f"split has no effect on the source {self.source!r}: it is for Hugging Face data sets; leave it out"
            )
        if self.args and self.kind in (SourceKind.JSONL, SourceKind.PARQUET):
            raise ValueError(f"args have no effect on the source {self.source!r}: a file takes none; leave them out")
        return self


class TasksConfig(SourceConfig):
    """The sources of tasks. In YAML a bare string is `source`."""

    mix: tuple[SourceConfig, ...] = ()
    """Further sources, each with the keys of this section up to `weight`, or the bare string."""

    @field_validator("mix", mode="before")
    @classmethod
    def _sources_alone(cls, value: object) -> object:
        return [{"source": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _mixes_what_has_names(self) -> Self:
        labels = [one.label for one in self.sources]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"two sources have the name {twice!r}; set another name for one of them")
        if not self.mix and (self.name is not None or self.weight != 1.0):
            raise ValueError("name and weight have no effect on a single source: they are for mixing; leave them out")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """This source, and those mixed with it."""
        return (self, *self.mix)


class CurriculumConfig(Section):
    """Draw tasks that nearly always succeed or fail more rarely. `eval.success_reward` defines a success."""

    low: Annotated[float, Field(ge=0, le=1)] = 0.1
    """A task with a lower success rate is outside the band."""
    high: Annotated[float, Field(ge=0, le=1)] = 0.9
    """A task with a higher success rate is outside the band."""
    outside: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The probability that a task outside the band is drawn when its turn comes; otherwise it is passed over."""
    by: Annotated[str, Field(min_length=1)] | None = None
    """A key of the tasks' data, `level` for example: tasks with the same value share one success rate. By default each
    task has its own, which is known from its second epoch on.
    """

    @model_validator(mode="after")
    def _is_a_band(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; low must be less than high")
        return self


class TrainingTasksConfig(TasksConfig):
    """The sources of tasks and the order of their use. In YAML a bare string is `source`."""

    shuffle: bool = True
    """Shuffle each epoch of each source by `seed`; otherwise tasks come in their order."""
    curriculum: CurriculumConfig | None = None
    """Draw tasks by success rate; without this section every task comes once per epoch."""


def import_object(path: str, what: str) -> Any:
    """Import `package.module:name`. Raises ConfigError that says which half is wrong."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{what}: {path!r} is not of the form 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way at import
        raise ConfigError(
            f"{what}: importing {module_name!r} failed: {one_line(error)}; "
            "check the name and that it can be imported from this folder"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{what}: module {module_name!r} has no {name!r}") from None


def one_line(error: BaseException) -> str:
    """Return `ValueError: text` on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
