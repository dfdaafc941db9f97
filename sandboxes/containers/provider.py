"""The docker backend: every cell is a container that its programs cannot leave and that does not outlive its host.

The engine makes and removes containers (`engine.py`), an agent in each runs programs (`agent/`), and a keeper removes
what is left when this process is killed (`keeper.py`).
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.agent.forker import FOR_ROOT
from sandboxes.base import ENFORCED_BY_WALLS, Capabilities
from sandboxes.cell import Archives, Cells, ContainerCell, User
from sandboxes.cgroups import Bounds, SharedBounds
from sandboxes.containers.confinement import (
    OWNER_LABEL,
    Ownership,
    bound_buffers,
    check,
    config_of,
    container_config,
    refuse_volumes,
    user_of,
    workdir_of,
)
from sandboxes.containers.engine import Engine, EngineSilent, Image, NoSuchProgram, frames
from sandboxes.containers.images import DEFAULT_IMAGE
from sandboxes.containers.own_python import PYTHON, mount_of, python_volume
from sandboxes.link import COMMAND, OUT_OF_DISK, AgentLink, boot_data
from sandboxes.owner import is_abandoned
from sandboxes.proxy import connect, proxy_environment
from sandboxes.seccomp import allowing_filter
from sandboxes.spec import CellSpec, Isolation

logger = logging.getLogger(__name__)

PROGRAM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KEEPER = Path(__file__).with_name("keeper.py")
RESTART_PATIENCE_S = 60.0
RESTART_PAUSE_S = 1.0
LAYER_PAUSE_S = 5.0
DEFAULT_LAYER_BYTES = 10 * 2**30

Answer = TypeVar("Answer")


class DockerProvider:
    """The provider of containers. Make it with `start`, end it with `close`."""

    def __init__(
        self, engine: Engine, keeper: asyncio.subprocess.Process, ownership: Ownership, filters: Mapping[bool, bytes]
    ) -> None:
        self._engine = engine
        self._keeper = keeper
        self.ownership = ownership
        self._boot_data = {may_trace: boot_data(one) for may_trace, one in filters.items()}
        self._cells = Cells(self._release)
        self._without_python: set[str] = set()  # image ids
        self._python = ""  # a volume with Python for these
        self._writable: dict[str, ContainerCell] = {}  # by container: those whose image can be written to
        self._watch: asyncio.Task[None] | None = None  # of these
        self._left: set[str] = set()  # containers that could not be removed because the daemon was down
        self._tasks: set[asyncio.Task[Any]] = set()  # cells that are being made or given up, and removals

    @classmethod
    async def start(cls, *, needs_default_image: bool = False) -> Self:
        """Start the provider; SandboxError where no engine answers, or a default image that is needed was not made."""
        engine = await Engine.connect()
        ownership = Ownership()
        try:
            if needs_default_image:
                await engine.image(DEFAULT_IMAGE)
            filters = {traces: allowing_filter(engine.machine, with_tracing=traces) for traces in (False, True)}
            keeper = await start_keeper(engine, ownership.filter)
        except BaseException:
            await engine.aclose()
            raise
        logger.info("sandboxes are containers of Docker %s", engine.version)
        return cls(engine, keeper, ownership, filters)

    def capabilities(self) -> Capabilities:
        together = "memory and processes of all programs of a sandbox together"
        return Capabilities(
            backend="docker",
            isolation=Isolation.CONTAINER,
            enforces=(*ENFORCED_BY_WALLS, "no network but what is allowed", together),
            cannot_stop=("attacks on the kernel",),
        )

    def check(self, spec: CellSpec) -> None:
        check(spec, self._engine.runtimes)

    async def create(self, spec: CellSpec) -> ContainerCell:
        """Make a cell. While the daemon restarts, wait for it and try again. A cancelled caller's cell is closed."""
        self.check(spec)
        making = self._own(self._create_patiently(spec))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            self._own(give_up(making))
            raise

    async def _create_patiently(self, spec: CellSpec) -> ContainerCell:
        deadline_s = asyncio.get_running_loop().time() + RESTART_PATIENCE_S
        while True:
            self._cells.check_open()
            try:
                return await self._cells.add(await self._create(spec))
            except SandboxError as error:
                is_down = isinstance(error, EngineSilent) or not await self._engine.is_there()
                if not is_down or asyncio.get_running_loop().time() > deadline_s:
                    raise
                await asyncio.sleep(RESTART_PAUSE_S)

    async def reap(self) -> int:
        """Remove the containers of dead owners, and return their number."""
        found = await self._engine.containers(OWNER_LABEL)
        orphans = [container["Id"] for container in found if is_abandoned(container["Labels"][OWNER_LABEL])]
        await asyncio.gather(*(self._engine.remove(container) for container in orphans))
        return len(orphans)

    async def close(self) -> None:
        await self._cells.close()

    async def _create(self, spec: CellSpec) -> ContainerCell:
        image = await self._engine.image(spec.image or DEFAULT_IMAGE)
        refuse_volumes(spec, image.volumes)
        if image.id not in self._without_python:
            try:
                return await self._create_of(image, spec, COMMAND)
            except NoSuchProgram as error:
                logger.info(
                    "image %r cannot start the agent (%s): %r lends it Python", spec.image, error, DEFAULT_IMAGE
                )
        self._python = self._python or await python_volume(self._engine, self.ownership.labels)
        cell = await self._create_of(image, spec, (*PYTHON, *COMMAND[1:]), mount_of(self._python))
        self._without_python.add(image.id)
        return cell

    async def _create_of(
        self, image: Image, spec: CellSpec, command: Sequence[str], *mounts: Mapping[str, Any]
    ) -> ContainerCell:
        user, labels = user_of(spec), self.ownership.labels
        if user.uid == 0:
            command = (*command, FOR_ROOT)
        config = container_config(spec, user, image=image.id, command=command, labels=labels)
        config["HostConfig"]["Mounts"] = list(mounts)
        container = await self._engine.create(config)

        async def change(bounds: Bounds) -> None:
            await self._engine.limit(container, config_of(bounds, spec))

        bounds = SharedBounds(Bounds.of(spec.limits), change)
        env = environment_of(spec, user, image)
        try:
            cell = await self._start_agent(container, spec, user, bounds, env)
            bound_buffers(container, spec.limits)
        except BaseException:
            await asyncio.shield(self._discard(container))
            raise
        if spec.is_writable:
            save, load = partial(self._engine.save, container), partial(self._engine.load, container)
            cell.archives = Archives(save, load)
            self._writable[container] = cell
            self._watch = self._watch or asyncio.create_task(self._bound_layers())
        left, self._left = self._left, set()
        await asyncio.gather(*(self._discard(container) for container in left))
        return cell

    async def _start_agent(
        self, container: str, spec: CellSpec, user: User, bounds: SharedBounds, env: dict[str, str]
    ) -> ContainerCell:
        reader, writer = await self._engine.attach(container)
        link = AgentLink(frames(reader), writer, partial(self._engine.has_run_out_of_memory, container))
        parts = contextlib.AsyncExitStack()
        try:
            await self._engine.start(container)
            try:
                await link.boot(self._boot_data[spec.may_trace])
            except SandboxError as error:  # Python is older than 3.10, for example, or lacks ctypes
                raise NoSuchProgram(str(error)) from error
            cell = ContainerCell(
                reach=link.itself,
                home=workdir_of(spec),
                env=env | (proxy_environment() if spec.has_network else {}),
                user=user,
                limits=spec.limits,
                bounds=bounds,
                has_users=True,
                parts=parts,
            )
            if spec.network is not None and spec.has_network:
                await connect(cell, spec.network)
        except BaseException:
            link.fail("its start was given up")
            await parts.aclose()
            raise

        async def remove() -> None:
            await link.aclose()
            if link.is_given_up:  # the engine kills what its agent did not
                await self._discard(container)
            else:
                self._own(self._discard(container))  # whoever closes a cell need not wait for the engine to tidy up

        parts.push_async_callback(remove)
        return cell

    def _own(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        """Start work that `close` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _discard(self, container: str) -> None:
        """Remove a container. A failure is retried when the next one is made; `close` and the keeper also catch it.

        A daemon that was killed leaves containers running, and so does one with `live-restore`.
        """
        self._writable.pop(container, None)
        try:
            await self._engine.remove(container)
        except SandboxError as error:
            logger.warning("a container is left for now: %s", error)
            self._left.add(container)

    async def _bound_layers(self) -> None:
        """Look at times how much the containers have written to their images, and remove those with too much."""
        while True:
            await asyncio.sleep(LAYER_PAUSE_S)
            if self._writable:
                with contextlib.suppress(SandboxError):  # the daemon is down
                    for found in await self._engine.containers(self.ownership.filter, with_size=True):
                        cell, num_bytes = self._writable.get(found["Id"]), found.get("SizeRw", 0)
                        if cell and num_bytes > (max_bytes := cell.limits.disk_bytes or DEFAULT_LAYER_BYTES):
                            logger.warning("a sandbox wrote %d bytes, may %d, and is removed", num_bytes, max_bytes)
                            (await cell.reach()).blamed = OUT_OF_DISK
                            await self._discard(found["Id"])

    async def _release(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        with contextlib.suppress(SandboxError):  # there is no daemon, or the keeper has more patience than we
            left = await self._engine.containers(self.ownership.filter)
            await asyncio.gather(*(self._discard(container["Id"]) for container in left))
        with contextlib.suppress(ProcessLookupError):  # somebody else killed it
            self._keeper.kill()
        await self._keeper.wait()
        await self._engine.aclose()


async def give_up(making: asyncio.Task[ContainerCell]) -> None:
    """Close a cell, once it is made, whose caller no longer wants it."""
    with contextlib.suppress(SandboxError):
        await (await making).close()


def environment_of(spec: CellSpec, user: User, image: Image) -> dict[str, str]:
    """Return the variables of every program. Where only the working directory can be written to, it is the home."""
    workdir = workdir_of(spec)
    if not spec.is_writable:
        return {"PATH": PROGRAM_PATH, **image.env, "HOME": workdir, "TMPDIR": workdir}
    return {"PATH": PROGRAM_PATH, "HOME": "/root" if user.uid == 0 else workdir, **image.env}


async def start_keeper(engine: Engine, label: str) -> asyncio.subprocess.Process:
    devnull = asyncio.subprocess.DEVNULL  # it may outlive this process for minutes, whose output then has its end
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(KEEPER), engine.socket_path, label, pass_fds=engine.lifeline,
            stdin=asyncio.subprocess.PIPE, stdout=devnull, stderr=devnull, env={}, cwd="/", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SandboxError(f"the keeper of the containers could not be started: {error}") from error
