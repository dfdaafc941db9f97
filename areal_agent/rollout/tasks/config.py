"""The config section of tasks: their sources, how they are mixed, in which order they are used. It opens none.

Objects of the user's by their import path, and his faults on one line. It knows not what an object is for.
"""

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
    """What a source is, told by how it is written."""

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
    """Which split of a data set, `train[:90%]` for example; by default `train` to train on and `test` to evaluate."""
    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """The workflow's names for columns, `{question: prompt}`; a task then has these alone. By default all, as named."""
    filter: ImportPath | None = None
    """`package.module:predicate`, called with the data of each task; those for which it is false are left out."""
    name: Annotated[str, Field(pattern=r"^[^/\s]+$")] | None = None
    """Where sources are mixed: what this one is called, `name/id` being the ids of its tasks. By default the file's,
    the data set's or the module's own name."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Where sources are mixed: its share of the tasks is weight / sum of all weights."""

    @property
    def kind(self) -> SourceKind:
        """
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
        """Whether it can be asked for a split of its own to evaluate on."""
        return self.kind is SourceKind.FUNCTION or (self.kind is SourceKind.DATASET and self.split is None)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.split is not None and self.kind is not SourceKind.DATASET:
            raise ValueError(f"split has no effect on the source {self.source!r}: it is of Hugging Face data sets")
        if self.args and self.kind in (SourceKind.JSONL, SourceKind.PARQUET):
            raise ValueError(f"args have no effect on the source {self.source!r}: a file takes none")
        return self


class TasksConfig(SourceConfig):
    """Where tasks come from. In YAML a bare string is `source`."""

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
            raise ValueError(f"two sources are called {twice!r}; give one of them a name of its own")
        if not self.mix and (self.name is not None or self.weight != 1.0):
            raise ValueError("name and weight have no effect on a source alone: they are for sources that are mixed")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """This one, and those mixed with it."""
        return (self, *self.mix)


class CurriculumConfig(Section):
    """Tasks that nearly always succeed or fail are drawn more rarely. A success is what `eval.success_reward` says."""

    low: Annotated[float, Field(ge=0, le=1)] = 0.1
    """A task whose success rate is less is outside the band."""
    high: Annotated[float, Field(ge=0, le=1)] = 0.9
    """A task whose success rate is more is outside the band."""
    outside: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The probability that a task outside the band is drawn when its turn comes; else it is passed over."""
    by: Annotated[str, Field(min_length=1)] | None = None
    """A key of the tasks' data, `level` for example: those with the same value share one success rate. By default each
    task has its own, which is known from its second epoch on."""

    @model_validator(mode="after")
    def _is_a_band(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; low must be less")
        return self


class TrainingTasksConfig(TasksConfig):
    """Where tasks come from and in which order they are used. In YAML a bare string is `source`."""

    shuffle: bool = True
    """Each epoch of each source in an order of its own, by `seed`; otherwise as they come."""
    curriculum: CurriculumConfig | None = None
    """Draw by success rate; without this section every task once an epoch."""


def import_object(path: str, what: str) -> Any:
    """Import `package.module:name`; raises ConfigError that says which half is wrong."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{what}: {path!r} is not of the form 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user's may fail in any way at import
        raise ConfigError(
            f"{what}: importing {module_name!r} failed: {one_line(error)}; "
            "check the name and that it can be imported from this folder"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{what}: module {module_name!r} has no {name!r}") from None


def one_line(error: BaseException) -> str:
    """`ValueError: text`, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
