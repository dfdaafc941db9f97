"""The container engine: calls to its daemon through the `docker` package, in threads, and raw streams to containers.

A stream is one request that turns into raw bytes both ways, which are read and written on the event loop: no thread
waits for a container. `frames` unpacks what the engine sends, which separates stdout from stderr.
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.utils import decode_json_header

from areal_agent.errors import SandboxError

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

NUM_THREADS = 4
"""The number of concurrent calls: the daemon makes only a few containers a second, however many callers there are."""
CALL_TIMEOUT_S = 60
DEATH_PATIENCE_S = 5
SIGNS_OF_NO_PROGRAM = ("executable file not found", "no such file or directory")
NOT_FOUND, CONFLICT = 404, 409
CHUNK_BYTES = 2**20
UNIX_SCHEME = "unix://"
REMOTE_SCHEMES = ("tcp://", "ssh://")
WAY = Path(__file__).with_name("way.py")
DEFAULT_HOST = f"{UNIX_SCHEME}/var/run/docker.sock"
STREAMS = ("stdin", "stdout", "stderr", "stream")
FRAME_HEADER_BYTES = 8  # stream number, three zero bytes, length of what follows
STDERR = 2


class NoSuchProgram(SandboxError):
    """The image lacks the program that the container is to start."""


class EngineSilent(SandboxError):
    """The daemon does not answer: it may be restarting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """The properties of an image that matter to a container of it."""

    id: str
    num_bytes: int  # of all its layers
    env: Mapping[str, str]
    labels: Mapping[str, str]
    volumes: tuple[str, ...]  # paths that it declares as volumes
    user: str  # empty: root
    workdir: str
    entrypoint: tuple[str, ...]


class Engine:
    """The engine's daemon. Make it with `connect`, end it with `aclose`. Every failure is a SandboxError."""

    def __init__(self, client: Any, way: "Way", info: Mapping[str, Any]) -> None:
        self.host = way.host
        self.socket_path = way.path
        self.lifeline = way.lifeline
        self._way = way
        self.machine: str = info["Architecture"]
        self.runtimes: frozenset[str] = frozenset(info.get("Runtimes") or ())
        self.version: str = info["ServerVersion"]
        self._client = client
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="container-engine")

    @classmethod
    async def connect(cls) -> Self:
        """Connect to the daemon that `DOCKER_HOST` names (unix, tcp or ssh), or to this machine's."""
        host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST

        way = await asyncio.to_thread(Way, host)

        def open_client() -> tuple[Any, Mapping[str, Any]]:
            knock(way.path)  # the package has no type stubs
            client: Any = docker.APIClient(base_url=f"{UNIX_SCHEME}{way.path}", version="auto", timeout=CALL_TIMEOUT_S)
            client.post = partial(client.post, timeout=CALL_TIMEOUT_S)  # attaching gives none
            return client, client.info()

        try:
            client, info = await asyncio.to_thread(open_client)
            return cls(client, way, info)
        except (DockerException, requests.RequestException) as error:
            way.close()
            at = "" if way.is_local else f" at {host}"
            raise EngineSilent(f"no Docker engine answers{at}: {error}; start dockerd, or set DOCKER_HOST") from error

    async def is_there(self) -> bool:
        """Return whether the daemon answers."""
        try:
            return await self._call(lambda: self._client.ping())
        except SandboxError:
            return False

    async def find_image(self, name: str) -> Image | None:
        """Look an image up; None when it is not on this machine."""
        found = await self._find(lambda: self._client.inspect_image(name))
        if found is None:
            return None
        config = found.get("Config") or {}
        pairs = (text.partition("=") for text in config.get("Env") or ())
        return Image(
            id=found["Id"],
            num_bytes=found["Size"],
            env={name: value for name, _, value in pairs},
            labels=config.get("Labels") or {},
            volumes=tuple(config.get("Volumes") or ()),
            user=config.get("User") or "",
            workdir=config.get("WorkingDir") or "/",
            entrypoint=tuple(config.get("Entrypoint") or ()),
        )

    async def image(self, name: str) -> Image:
        """Look an image up; SandboxError when it is not on this machine, as none is fetched."""
        found = await self.find_image(name)
        if found is None:
            raise SandboxError(
                f"there is no image {name!r} on this machine, and images are not fetched; build it "
                "(`python -m sandboxes image` makes the default one) or `docker pull` it"
            )
        return found

    async def import_image(self, files: Path, name: str, labels: Mapping[str, str]) -> None:
        """Make an image of one layer from a tar of its root folder."""
        repository, _, tag = name.partition(":")
        changes = [f'LABEL {label}="{value}"' for label, value in labels.items()]
        await self._call(
            lambda: self._client.import_image(src=str(files), repository=repository, tag=tag, changes=changes)
        )

    async def remove_image(self, name: str) -> None:
        """Remove an image, and the layers that nothing else uses."""
        await self._call(lambda: self._client.remove_image(name, force=True))

    async def create(self, config: Mapping[str, Any]) -> str:
        """Make a container, without starting it, and return its id."""
        made = await self._call(lambda: self._client.create_container_from_config(dict(config)))
        for warning in made.get("Warnings") or ():
            logger.debug("container engine: %s", warning)
        return made["Id"]

    async def start(self, container: str) -> None:
        try:
            await self._call(lambda: self._client.start(container))
        except SandboxError as error:
            if any(sign in str(error) for sign in SIGNS_OF_NO_PROGRAM):
                raise NoSuchProgram(str(error)) from error
            raise

    async def run(self, config: Mapping[str, Any]) -> int:
        """Run a container to its end, remove it, and return its exit code."""
        container = await self.create(config)
        try:
            await self.start(container)
            return (await self._call(lambda: self._client.wait(container, timeout=CALL_TIMEOUT_S)))["StatusCode"]
        finally:
            await asyncio.shield(self.remove(container))

    async def find_container(self, container: str) -> Mapping[str, Any] | None:
        """Return the engine's description of a container; None when it is gone."""
        return await self._find(lambda: self._client.inspect_container(container))

    async def save(self, container: str, path: str, target: BinaryIO, max_bytes: int) -> None:
        """Write a tar of a file or folder of a container to `target`; OSError if it is a link, missing or too long."""

        def fetch() -> None:
            asked = {"params": {"path": path}, "stream": True, "timeout": CALL_TIMEOUT_S}
            with self._client.get(self._url(container, "archive"), **asked) as response:
                if response.status_code == NOT_FOUND and "No such container" not in response.text:
                    raise FileNotFoundError(errno.ENOENT, "not in the sandbox", path)
                self._client._raise_for_status(response)
                if decode_json_header(response.headers["X-Docker-Container-Path-Stat"])["linkTarget"]:
                    raise OSError(errno.ELOOP, "a link, not a file or folder", path)
                for chunk in response.iter_content(CHUNK_BYTES):
                    if target.tell() + len(chunk) > max_bytes:
                        raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", path)
                    target.write(chunk)

        await self._call(fetch)

    async def load(self, container: str, tar: BinaryIO | bytes, folder: str) -> None:
        """Unpack a tar in a folder of a container, which must be there, with the owners, modes and links in it."""
        await self._call(lambda: self._client.put_archive(container, folder, tar))

    async def has_run_out_of_memory(self, container: str) -> bool:
        """Return whether a process of a container, whose stream has ended, was killed because memory ran out."""

        def look() -> bool:
            self._client.wait(container, timeout=DEATH_PATIENCE_S)
            return self._client.inspect_container(container)["State"]["OOMKilled"]

        try:
            return await self._call(look)
        except SandboxError:  # it was removed, or lives on without its stream
            return False

    async def limit(self, container: str, limits: Mapping[str, Any]) -> None:
        """Change the bounds on all of a running container."""
        url = self._url(container, "update")
        await self._call(lambda: self._client._raise_for_status(self._client.post(url, json=dict(limits))))

    async def attach(self, container: str) -> Stream:
        """Open the stream of the first process of a container, which may not have started yet."""

        def take_socket() -> socket.socket:
            channel = self._client.attach_socket(container, params=dict.fromkeys(STREAMS, 1))
            with channel, contextlib.closing(channel._response):  # which would close the socket when it is collected
                return socket.socket(fileno=os.dup(channel.fileno()))

        taking = asyncio.ensure_future(self._call(take_socket))
        try:
            return await asyncio.open_unix_connection(sock=await asyncio.shield(taking))
        except asyncio.CancelledError:
            taking.add_done_callback(lambda taken: taken.cancelled() or taken.exception() or taken.result().close())
            raise
        except OSError as error:
            raise SandboxError(f"a container's stream could not be opened: {error}") from error

    async def remove(self, container: str) -> None:
        """Kill and remove a container; returns when it is gone. Harmless when it is."""

        def remove_and_wait() -> None:
            try:
                self._client.remove_container(container, force=True, v=True)
            except APIError as error:
                if error.status_code != CONFLICT:
                    raise
                # somebody else removes it already
                self._client.wait(container, condition="removed", timeout=CALL_TIMEOUT_S)

        await self._find(remove_and_wait)

    async def containers(self, label: str, *, with_size: bool = False) -> list[Mapping[str, Any]]:
        """Return all containers that bear a label, running or not; `SizeRw` is what each has written to its image."""
        filters = {"label": label}
        return await self._call(lambda: self._client.containers(all=True, size=with_size, filters=filters))

    async def aclose(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._client.close()
        self._way.close()

    def _url(self, container: str, action: str) -> str:
        return f"{self._client.base_url}/v{self._client.api_version}/containers/{container}/{action}"

    async def _find(self, look: Callable[[], Answer]) -> Answer | None:
        """Run `look` in a thread; None where the engine has no such thing."""
        try:
            return await self._call(look)
        except SandboxError as error:
            if isinstance(error.__cause__, NotFound):
                return None
            raise

    async def _call(self, act: Callable[[], Answer]) -> Answer:
        """Run `act` in a thread. A cancelled caller does not wait for it."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, act)
        except APIError as error:
            raise SandboxError(f"the container engine refused: {error.explanation or error}") from error
        except (DockerException, requests.RequestException) as error:
            raise EngineSilent(f"the container engine does not answer: {error}; is dockerd running?") from error


def knock(path: str) -> None:
    """Raise requests.ConnectionError if nobody listens; the docker package would leave the refused socket unclosed."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(CALL_TIMEOUT_S)
        try:
            door.connect(path)
        except OSError as error:
            raise requests.ConnectionError(f"{path}: {error}") from error


class Way:
    """The socket at which an engine answers: its own, or that of a process (`way.py`) that leads to its machine."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_local = host.startswith(UNIX_SCHEME)
        self.path = host.removeprefix(UNIX_SCHEME)
        self.lifeline: tuple[int, ...] = ()
        """The file descriptor that keeps it open as long as any process has it."""
        if self.is_local:
            return
        if not host.startswith(REMOTE_SCHEMES):
            raise SandboxError(f"DOCKER_HOST is {host!r}; give unix:///path, tcp://host:port or ssh://user@host")
        if shutil.which("docker") is None:
            raise SandboxError(
                f"DOCKER_HOST is {host!r}, and the program `docker`, which leads there, is not installed"
            )
        self._folder = tempfile.mkdtemp(prefix="areal-agent-engine-")
        self.path = f"{self._folder}/socket"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WAY), self.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self.lifeline = (self._process.stdin.fileno(),)
        self._process.stdout.readline()  # it listens, or has said what is wrong

    def close(self) -> None:
        if not self.is_local:
            self._process.kill()
            self._process.communicate()
            shutil.rmtree(self._folder, ignore_errors=True)


async def frames(reader: asyncio.StreamReader) -> AsyncGenerator[tuple[bool, bytes], None]:
    """Yield the data of a stream as it comes, each piece with whether it is stderr's, until the stream ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            header = await reader.readexactly(FRAME_HEADER_BYTES)
            yield header[0] == STDERR, await reader.readexactly(int.from_bytes(header[4:]))
