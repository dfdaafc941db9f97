"""A task folder in Harbor's format: its settings, its sandbox, and its verdict.

The agent's sandbox is not trusted. The tests run in a fresh one of the same image, to which only the declared paths are
copied (`TaskToml.declared_paths`, `handover.py`), and are watched (`watch.py`), so a verdict says how far it can be
trusted. A task that says `environment_mode = "shared"` is judged where the agent was.

The keys of `task.toml` and their defaults are those of Harbor 0.25 (its `models/task/config.py`). A key that asks for
more than is done here (several steps, GPUs, further services, a verifier's own image) is an error, as is one that does
not exist.

`python -m sandboxes.tasks.harbor FOLDER --solution` (or `--empty`) prints the reward of the solution (or of no work).
"""

import argparse
import asyncio
import io
import logging
import math
import os
import posixpath
import re
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import orjson
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from areal_agent.errors import Reject, SandboxError
from sandboxes.cell import Archives
from sandboxes.containers.engine import Engine, Image
from sandboxes.containers.images import BuildBounds, build_image
from sandboxes.folder import Entry, entries_in, entries_of, pack
from sandboxes.pool import OnSuspicion, Pool, open_pool
from sandboxes.sandbox import Sandbox
from sandboxes.spec import ExecResult, Limits, Network, SandboxSpec, Status
from sandboxes.tasks.handover import RESERVED, Handover, Kind, Suspicion, TaskFiles, hand_over, is_within
from sandboxes.tasks.watch import READS_IN, Seen, Trust, watched_tests

logger = logging.getLogger(__name__)

MIB = 2**20
AGENT_WALL_S = 600.0
MEMORY_MB = 2048
STORAGE_MB = 10 * 1024
PROCESSES, OPEN_FILES, OUTPUT_BYTES = 1024, 2048, MIB
REWARD_TEXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
MAX_REWARD_BYTES = 64 * 1024
REFUSED = (Kind.EARLY_EXIT, Kind.EQUALS_ALL, Kind.WRITES_REWARD)
"""Suspicions with which a reward above 0 is not the tests' word, whatever is to be done about suspicions."""
TESTS_SAID = "/logs/verifier/test-stdout.txt"
RUN_TESTS = f"/tests/test.sh > {TESTS_SAID} 2>&1"
MAX_TOLD_BYTES = 2000
MAX_NAMED = 5


VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
SIZE = re.compile(r"([\d.]{1,12})\s*([KMG])B?", re.IGNORECASE)
DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")
"""A dotted key for which tomllib takes memory by the square of its length."""
MIB_OF = {"K": 1 / 1024, "M": 1, "G": 1024}
OLD_KEYS = {"memory": "memory_mb", "storage": "storage_mb"}


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

    schema_version: str = Field("1.4", validation_alias=AliasChoices("schema_version", "version"))
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    source: str | None = None
    environment: Environment = Field(default_factory=Environment)
    agent: Phase = Field(default_factory=Phase)
    verifier: Verifier = Field(default_factory=Verifier)
    solution: Solution = Field(default_factory=Solution)
    artifacts: list[str | Artifact] = Field(default_factory=list)

    def declared_paths(self, workdir: str, folder: Path) -> list[str]:
        """Return the paths that are judged, none within another: the artifacts and, mostly, the working directory.

        Only a task that asks for a separate verifier and names artifacts was written for these alone.
        """
        named = (artifact if isinstance(artifact, str) else artifact.source for artifact in self.artifacts)
        sources = ["/logs/artifacts", *named]
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


def read_task_toml(path: Path) -> TaskToml:
    """Read a `task.toml`; ValueError that names the file, the key, the value and the remedy."""
    try:
        text = path.read_text()
        if DEEP_KEY.search(text):
            raise RecursionError("a key is too deep")
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    try:
        return TaskToml.model_validate(settings)
    except ValidationError as error:
        raise ValueError("; ".join(f"{path}: {told(problem)}" for problem in error.errors())) from error


def told(problem: Mapping[str, Any]) -> str:
    value = f"{'.'.join(map(str, problem['loc']))} is {problem['input']!r:.200}"
    if problem["type"] == "extra_forbidden":
        return f"{value}, and there is no such key, or it is not supported here; leave it out"
    return f"{value}: {problem['msg'].removeprefix('Value error, ')}"


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether this is a link to outside of a task's folder. Those that go into an image as links may be."""
    parts = path.relative_to(folder).parts
    is_copied = parts[0] == "environment" and len(parts) > 1 and parts[1] != "Dockerfile"
    return path.is_symlink() and not is_copied and not Path(os.path.realpath(path)).is_relative_to(folder.resolve())


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskVerdict:
    """The verdict on an agent's work."""

    reward: float  # from 0 to 1
    rewards: Mapping[str, float]  # all that the tests reported, by name
    detail: str  # the reason for a reward of 0, and the end of what the tests printed
    trust: Trust
    reasons: Sequence[str] = ()  # why it is not proved
    left_out: Sequence[str] = ()  # what of the agent's files was not handed over, and why
    suspicions: Sequence[Suspicion] = ()

    def failed(self, reason: str) -> Self:
        return replace(self, reward=0.0, detail=f"{reason}\n{self.detail}".rstrip())

    def reward_for(self, on_suspicion: OnSuspicion) -> float:
        """Return the reward that counts in training; Reject for a suspicious verdict that is to be dropped."""
        if self.suspicions and on_suspicion == "drop":
            raise Reject(f"the verdict is suspicious: {self.suspicions[0]}")
        return 0.0 if self.suspicions and on_suspicion == "zero" else self.reward

    @property
    def logged(self) -> dict[str, Any]:
        """What `rollout.log` is to keep: numbers are metrics, and the page shows all of it."""
        counts = Counter(one.kind for one in self.suspicions)
        return {
            "trust": self.trust.value,
            "proved": self.trust is Trust.PROVED,
            "suspicious": bool(self.suspicions),
            **{f"suspicious_{kind}": counts[kind] for kind in Kind},
            **{
                name: "; ".join(map(str, values))
                for name in ("reasons", "left_out", "suspicions")
                if (values := getattr(self, name))
            },
        }


class HarborTask:
    """A task folder. `load` reads it, `prepare` finds its image, `open` and `verify` serve any number of rollouts."""

    def __init__(self, folder: Path, config: TaskToml, instruction: str, variables: Mapping[str, str]) -> None:
        where = str(folder / "task.toml")
        self.folder = folder
        self.config = config
        self.instruction = instruction
        self.is_shared = config.verifier.environment_mode == "shared"
        self.agent_wall_s = config.agent.timeout_sec or AGENT_WALL_S
        self._env, self._verifier_env, self._solution_env = (
            filled(section.env, variables, where) for section in (config.environment, config.verifier, config.solution)
        )
        self._preparing = asyncio.Lock()
        self._image: Image | None = None

    @classmethod
    def load(cls, folder: Path | str, *, variables: Mapping[str, str] | None = None) -> Self:
        """Read a task; ValueError for a folder that is not one. `variables` fill its `${NAME}`s."""
        folder = Path(folder)
        needed = ["task.toml", "instruction.md", "tests/test.sh"]
        if missing := [name for name in needed if not (folder / name).is_file()]:
            raise ValueError(f"{folder} is not a task: it lacks {', '.join(missing)}")
        if link := next((path for path in folder.rglob("*") if leads_out(path, folder)), None):
            raise ValueError(f"{link} is a link to outside of the task, perhaps to a file of yours; put the file there")
        for name in ("environment/docker-compose.yaml", "tests/Dockerfile"):
            if (folder / name).exists():
                raise ValueError(f"{folder / name} asks for more than one image, which is not supported; remove it")
        config = read_task_toml(folder / "task.toml")
        if config.environment.docker_image is None and not (folder / "environment/Dockerfile").is_file():
            raise ValueError(f"{folder} names no image; add environment/Dockerfile, or set [environment] docker_image")
        if config.environment.workdir is not None:
            config.declared_paths(config.environment.workdir, folder)
        try:
            instruction = without_canary((folder / "instruction.md").read_text())
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / 'instruction.md'}: not UTF-8: {error}") from error
        return cls(folder, config, instruction, variables or {})

    async def prepare(self) -> None:
        """Find the image, or build it unless it was built; SandboxError when neither works."""
        async with self._preparing:
            try:
                self._image = self._image or await self._find_image()
            except SandboxError as error:
                raise SandboxError(f"{self.folder}: {error}") from error

    async def _find_image(self) -> Image:
        environment, folder = self.config.environment, self.folder / "environment"
        name = environment.docker_image
        async with aclosing(await Engine.connect()) as engine:
            if name is None or (await engine.find_image(name) is None and (folder / "Dockerfile").is_file()):
                name = await build_image(folder, bounds=BuildBounds(wall_s=environment.build_timeout_sec))
            image = await engine.image(name)
        self.config.declared_paths(environment.workdir or image.workdir, self.folder)
        return image

    @property
    def image(self) -> Image:
        if self._image is None:
            raise SandboxError(f"the image of {self.folder} is not known yet; call prepare() first")
        return self._image

    @property
    def workdir(self) -> str:
        return self.config.environment.workdir or self.image.workdir

    @asynccontextmanager
    async def open(self, pool: Pool) -> AsyncGenerator[Sandbox, None]:
        """Yield a sandbox for the agent."""
        async with pool.acquire(self._spec(self.config.agent)) as box:
            await (await box.archives()).load(tar_of_folders("logs", "logs/agent", "logs/artifacts"), "/")
            yield box

    async def solve(self, box: Sandbox) -> ExecResult:
        """Run the task's own solution in the agent's sandbox."""
        if not (self.folder / "solution/solve.sh").is_file():
            raise ValueError(f"{self.folder} has no solution/solve.sh")
        await (await box.archives()).load(tar_of(self.folder / "solution", "solution"), "/")
        env = {"DEBIAN_FRONTEND": "noninteractive", **self._solution_env}
        return await box.exec(["sh", "-c", "/solution/solve.sh"], env=env)

    async def verify(self, box: Sandbox, pool: Pool) -> TaskVerdict:
        """Judge what the agent left in `box`: in a fresh sandbox, unless the task asks for the agent's own."""
        if self.is_shared:
            await box.exec(["rm", "-rf", "/tests", "/logs/verifier"])
            return await self._judge(box, None, Handover())
        status = (await box.exec(["true"])).status  # or it is gone for another reason: SandboxError
        if status in (Status.MEMORY, Status.DISK):
            return self._failed(f"the agent's sandbox has ended, since its programs used up all {status.value}")
        async with pool.acquire(replace(self._spec(self.config.verifier), may_trace=True)) as fresh:
            await (await fresh.archives()).load(tar_of_folders("logs", "logs/artifacts"), "/")
            files = self._files()
            try:
                found = await hand_over(files, await box.archives(), fresh, self._storage_bytes)
            except OSError as error:
                return self._failed(str(error))
            return await self._judge(fresh, files, found)

    def _files(self) -> TaskFiles:
        tests = [path for path in (self.folder / "tests").rglob("*") if path.is_file()]
        said = [self.folder / "instruction.md", *tests, *(self.folder / "solution").rglob("*")]
        return TaskFiles(
            scripts="\n".join(path.read_text(errors="replace") for path in tests if path.suffix == ".sh"),
            declared=self.config.declared_paths(self.workdir, self.folder),
            text="\n".join(path.read_text(errors="replace") for path in said if path.is_file()),
            is_python=any(path.suffix == ".py" for path in tests)
            or re.search("python|pytest", (self.folder / "tests/test.sh").read_text(errors="replace")) is not None,
        )

    async def _judge(self, box: Sandbox, files: TaskFiles | None, found: Handover) -> TaskVerdict:
        """Run the tests and read their reward; with the agent's `files` handed over to `box`, under watch."""
        archives = await box.archives()
        await archives.load(tar_of_folders("logs", "logs/verifier"), "/")
        await archives.load(tar_of(self.folder / "tests", "tests"), "/")
        limits = replace(box.limits, wall_s=self.config.verifier.timeout_sec or AGENT_WALL_S)
        seen = Seen(reasons=["the tests ran where the agent had worked"], end="0")
        if files is None:
            result = await box.exec(["/bin/sh", "-c", RUN_TESTS], env=self._verifier_env, limits=limits)
        else:
            result, seen = await watched_tests(
                box, RUN_TESTS, env=self._verifier_env, limits=limits,
                declared=files.declared, is_python=files.is_python,
            )  # fmt: skip
            seen.reasons += [
                f"the tests' shell runs {found[found.lastindex or 0]}" for found in READS_IN.finditer(files.scripts)
            ]
        said = (await box.exec(["tail", "-c", str(MAX_TOLD_BYTES), TESTS_SAID])).stdout.decode(errors="replace")
        verdict = TaskVerdict(
            reward=0.0, rewards={}, detail=said, trust=Trust.OWN_SANDBOX if files is None else seen.trust,
            reasons=seen.reasons, left_out=found.left_out, suspicions=[*found.suspicions, *seen.suspicions],
        )  # fmt: skip
        if result.status is Status.TIMEOUT:
            return verdict.failed(f"the tests did not end within {limits.wall_s:g} s")
        if not seen.end or int(seen.end) < 0:
            return verdict.failed(f"the tests were killed: {seen.end or result.stderr[-500:].decode(errors='replace')}")
        try:
            rewards = await reported(archives)
        except ValueError as error:
            return verdict.failed(str(error))
        if rewards["reward"] > 0:
            verdict = replace(verdict, suspicions=[*verdict.suspicions, *seen.early_ends])
        if refused := [one for one in verdict.suspicions if one.kind in REFUSED]:
            return verdict.failed(f"a pass that proves nothing: {'; '.join(map(str, refused))}")
        return replace(verdict, reward=rewards["reward"], rewards=rewards)

    def _failed(self, reason: str) -> TaskVerdict:
        return TaskVerdict(reward=0.0, rewards={}, detail=reason, trust=Trust.PROVED)

    def _spec(self, phase: Phase) -> SandboxSpec:
        environment = self.config.environment
        limits = Limits(
            wall_s=self.agent_wall_s,
            memory_bytes=(environment.memory_mb or MEMORY_MB) * MIB,
            cpus=environment.cpus,
            disk_bytes=self._storage_bytes,
            file_bytes=self._storage_bytes,
            pids=PROCESSES,
            open_files=OPEN_FILES,
            output_bytes=OUTPUT_BYTES,
        )
        user = str(self.image.user if phase.user is None else phase.user)
        if not re.fullmatch(r"(\d+(:\d+)?|root)?", user):
            raise ValueError(f"{self.folder}: the user is {user!r}; give its number in [agent] and [verifier]")
        check, entrypoint = environment.healthcheck, self.image.entrypoint
        return SandboxSpec(
            image=self.image.id,
            user="0" if user in ("", "root") else user,
            workdir=self.workdir,
            is_writable=True,
            env=self._env,
            startup=(*entrypoint, "sleep", "infinity") if entrypoint else (),
            ready=check and check.command,
            ready_wall_s=check.wall_s if check else 1.0,
            limits=limits,
            network=phase.network or environment.network or Network.full(),
        )

    @property
    def _storage_bytes(self) -> int:
        return (self.config.environment.storage_mb or STORAGE_MB) * MIB


def load_tasks(folder: Path | str, *, variables: Mapping[str, str] | None = None) -> list[HarborTask]:
    """Read all tasks below a folder, in order of their names; one warning says how many cannot be trusted."""
    paths = sorted(path.parent for path in Path(folder).rglob("task.toml"))
    if not paths:
        raise ValueError(f"there is no task.toml below {str(folder)!r}; give a task folder, or one that holds some")
    tasks = [HarborTask.load(path, variables=variables) for path in paths]
    if untrusted := [task.folder.name for task in tasks if task.is_shared]:
        logger.warning(
            "%d of %d tasks are judged in the agent's own sandbox (environment_mode = 'shared'): their rewards can be "
            "forged, and training on them teaches to; set 'separate', or leave them out: %s",
            *(len(untrusted), len(tasks), ", ".join(untrusted[:MAX_NAMED])),
        )
    return tasks


def without_canary(text: str) -> str:
    """Return an instruction without the first lines that mark a benchmark's data, which are not for the agent.

    >>> without_canary("<!-- some-canary 123 -->\\n\\nWrite a file.")
    'Write a file.'
    """
    lines = text.splitlines(keepends=True)
    while lines and (not lines[0].strip() or re.match(r"\s*(<!--|#).*canary", lines[0], re.IGNORECASE)):
        del lines[0]
    return "".join(lines)


def tar_of(folder: Path, name: str) -> bytes:
    """Return a tar of a folder under another name. Scripts can be executed, and only root may change anything."""
    entries = [Entry(path=name, data=None)]
    for entry in entries_in(folder):
        is_script = entry.is_executable or entry.path.endswith(".sh")
        entries.append(replace(entry, path=f"{name}/{entry.path}", is_executable=is_script))
    return pack(entries)


def tar_of_folders(*names: str) -> bytes:
    """Return a tar of empty folders that everybody may write to."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(member)
    return buffer.getvalue()


async def reported(archives: Archives) -> dict[str, float]:
    """Return the rewards that the tests wrote, `reward` among them; ValueError when there is no valid one.

    The engine itself reads the files: a program would be found, and loaded, as the image says, perhaps from where the
    agent worked. Two files that disagree are refused: tests write one, and code that they run may write the other.
    """
    found: list[dict[str, float]] = []
    for path, read in ((REWARD_TEXT, str), (REWARD_JSON, orjson.loads)):
        with tempfile.TemporaryFile() as tar:
            try:
                await archives.save(path, tar, MAX_REWARD_BYTES)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            tar.seek(0)
            entry, *_ = entries_of(tar.read())
        if entry.data is None:
            raise ValueError(f"{path} is a folder")
        found.append(rewards_of(read(entry.data.decode(errors="replace")), path))
    if not found:
        raise ValueError(f"the tests wrote no reward to {REWARD_TEXT} or {REWARD_JSON}")
    if any(one["reward"] != found[0]["reward"] for one in found):
        raise ValueError(f"{REWARD_TEXT} and {REWARD_JSON} disagree: {found}")
    return found[-1]


def rewards_of(told: Any, path: str) -> dict[str, float]:
    """Return rewards by name, as numbers; ValueError unless `reward`, or the only one, is from 0 to 1.

    >>> rewards_of("0.5", "reward.txt"), rewards_of({"reward": 1, "speed": 3}, "reward.json")
    ({'reward': 0.5}, {'reward': 1.0, 'speed': 3.0})
    """
    named: dict[str, Any] = told if isinstance(told, dict) else {"reward": told}  # pyright: ignore[reportUnknownVariableType]
    try:
        rewards = {name: float(value) for name, value in named.items() if not isinstance(value, bool)}
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{path} holds {str(told)[:200]!r}, which is not a number") from None
    if len(rewards) == 1:
        rewards.setdefault("reward", *rewards.values())
    if not all(map(math.isfinite, rewards.values())) or not 0 <= rewards.get("reward", -1) <= 1:
        raise ValueError(f"{path} holds {str(told)[:200]!r}; it needs a finite 'reward' from 0 to 1")
    return rewards


async def judge_solution(task: HarborTask, pool: Pool, *, is_empty: bool) -> TaskVerdict:
    """Judge a task's own solution, or no work at all."""
    await task.prepare()
    async with task.open(pool) as box:
        if not is_empty:
            result = await task.solve(box)
            if not result.is_ok:
                said = result.stderr.decode(errors="replace")[-500:].rstrip()
                logger.warning(
                    "the solution ended as %s, exit code %s: %s", result.status.value, result.exit_code, said
                )
        return await task.verify(box, pool)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sandboxes.tasks.harbor", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="that holds task.toml")
    work = parser.add_mutually_exclusive_group()
    work.add_argument("--solution", action="store_true", help="run the task's solution (the default)")
    work.add_argument("--empty", action="store_true", help="do nothing")
    options = parser.parse_args(arguments)

    async def judge() -> TaskVerdict:
        async with open_pool(backend="docker") as pool:
            return await judge_solution(HarborTask.load(options.folder), pool, is_empty=options.empty)

    try:
        verdict = asyncio.run(judge())
    except (SandboxError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{verdict.reward:g}")
    for name in ("trust", "reasons", "left_out", "suspicions"):
        if value := verdict.logged.get(name):
            print(f"{name}: {value}", file=sys.stderr)
    print(verdict.detail.rstrip(), end="\n" * bool(verdict.detail), file=sys.stderr)
    return int(verdict.reward > 0 if options.empty else verdict.reward < 1)


if __name__ == "__main__":
    sys.exit(main())
