"""`task.toml`, the settings of a task folder in Harbor's format, as far as a container of ours can follow them.

The keys and defaults are those of Harbor 0.25 (its `models/task/config.py`). A key that asks for more than is done here
(several steps, GPUs, further services, a verifier's own image) is an error, as is a key that does not exist.
"""

import posixpath
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sandboxes.spec import Network

MIB = 2**20
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
SIZE = re.compile(r"([\d.]+)\s*([KMG])B?", re.IGNORECASE)
MIB_OF = {"K": 1 / 1024, "M": 1, "G": 1024}
OLD_KEYS = {"memory": "memory_mb", "storage": "storage_mb"}
RESERVED = ("/tests", "/solution", "/logs/verifier", "/proc", "/sys", "/dev")
"""Folders that no declared path may touch: the verifier's own, and those that are no files of a sandbox's own."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Networked(Section):
    """A section that may say what can be reached."""

    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: list[str] | None = None

    @model_validator(mode="after")
    def check_hosts(self) -> "Networked":
        if (self.network_mode == "allowlist") != bool(self.allowed_hosts):
            raise ValueError("give allowed_hosts together with network_mode='allowlist', and only then")
        _ = self.network
        return self

    @property
    def network(self) -> Network | None:
        """The network of a phase; None when this section does not say."""
        if self.network_mode is None:
            return None
        if self.network_mode == "allowlist":
            return Network.allow(self.allowed_hosts or [])
        return Network.full() if self.network_mode == "public" else Network.none()


class Healthcheck(Section):
    command: str
    interval_sec: float = Field(5.0, gt=0)
    timeout_sec: float = Field(30.0, gt=0)
    start_period_sec: float = Field(0.0, ge=0)
    start_interval_sec: float = Field(5.0, gt=0)
    retries: int = Field(3, ge=1)

    @property
    def wall_s(self) -> float:
        """The longest time that all tries may take together."""
        return self.start_period_sec + self.retries * (self.interval_sec + self.timeout_sec)


class Environment(Networked):
    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0)
    os: Literal["linux"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: Literal[0] | None = None
    env: dict[str, str] = Field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    workdir: str | None = Field(default=None, pattern="^/")

    @model_validator(mode="before")
    @classmethod
    def bring_up_to_date(cls, data: Any) -> Any:
        """Read the keys of older tasks: sizes as text, and `allow_internet`."""
        if not isinstance(data, dict):
            return data
        found: dict[str, Any] = dict(data)  # pyright: ignore[reportUnknownArgumentType]  # TOML's keys are text
        for old, new in OLD_KEYS.items():
            if (size := found.pop(old, None)) is not None:
                match = SIZE.fullmatch(str(size))
                if match is None or new in found:
                    raise ValueError(f"{old} is {size!r}; give {new} as a number instead")
                found[new] = int(float(match[1]) * MIB_OF[match[2].upper()])
        if (is_allowed := found.pop("allow_internet", None)) is not None:
            found.setdefault("network_mode", "public" if is_allowed else "no-network")
        return found


class Phase(Networked):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None


class Verifier(Phase):
    timeout_sec: float | None = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None


class Solution(Section):
    env: dict[str, str] = Field(default_factory=dict)


class Artifact(Section):
    source: str
    destination: str | None = None  # on the host: of no use here


class TaskToml(Section):
    """The whole file."""

    schema_version: str = "1.4"
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    source: str | None = None
    environment: Environment = Field(default_factory=Environment)
    agent: Phase = Field(default_factory=Phase)
    verifier: Verifier = Field(default_factory=Verifier)
    solution: Solution = Field(default_factory=Solution)
    artifacts: list[Artifact] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def rename_version(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"schema_version" if key == "version" else key: value for key, value in data.items()}

    @field_validator("artifacts", mode="before")
    @classmethod
    def name_sources(cls, value: list[Any]) -> list[Any]:
        return [{"source": one} if isinstance(one, str) else one for one in value]

    def declared_paths(self, workdir: str, folder: Path) -> list[str]:
        """Return the paths that are judged, none within another: the artifacts and, mostly, the working directory.

        Only a task that asks for a separate verifier and names artifacts was written for these alone.
        """
        sources = ["/logs/artifacts", *(artifact.source for artifact in self.artifacts)]
        if not (self.verifier.environment_mode == "separate" and self.artifacts):
            sources.append(workdir)
        paths = sorted({posixpath.normpath(posixpath.join(workdir, source)) for source in sources})
        for path in paths:
            if path == "/" or any(is_within(path, other) or is_within(other, path) for other in RESERVED):
                raise ValueError(
                    f"{folder}: {path!r} is to be judged, and cannot be, as it holds more than the agent's work; name "
                    "the folders that the agent may change as artifacts, or set [environment] workdir"
                )
        return [path for path in paths if not any(path != other and is_within(path, other) for other in paths)]


def is_within(path: str, folder: str) -> bool:
    return posixpath.commonpath((path, folder)) == folder


def read_task_toml(path: Path) -> TaskToml:
    """Read a `task.toml`; ValueError that names the file, the key, the value and the remedy."""
    try:
        return TaskToml.model_validate(tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        raise ValueError("; ".join(f"{path}: {told(problem)}" for problem in error.errors())) from error


def told(problem: Mapping[str, Any]) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"{key} is {problem['input']!r}, and there is no such key, or it is not supported here; leave it out"
    return f"{key} is {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"


def filled(env: Mapping[str, str], variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` replaced; ValueError for a name that is not given.

    They never come from this process by themselves: a task could ask for your keys.

    >>> filled({"A": "${X:-1} and ${Y}"}, {"Y": "2"}, "task.toml")
    {'A': '1 and 2'}
    """

    def value_of(match: re.Match[str]) -> str:
        default: str | None = match[2]
        value = variables.get(match[1], default)
        if value is None:
            raise ValueError(f"{where}: {match[0]!r} has no value; give it: HarborTask.load(..., variables={{...}})")
        return value

    return {name: VARIABLE.sub(value_of, text) for name, text in env.items()}
