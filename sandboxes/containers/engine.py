"""The container engine: calls to its daemon, and raw streams to its containers.

`Engine` makes the few calls of a container's life through the `docker` package, in threads. `EngineStream` is what runs
between: one HTTP request on the engine's socket that turns into raw bytes both ways. It unpacks the engine's frames,
which separate stdout from stderr, on the event loop; no thread waits for a container.
"""

import asyncio
import contextlib
import json
import logging
import os
import posixpath
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from areal_agent.errors import SandboxError

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


NUM_THREADS = 4
"""The number of concurrent calls: the daemon makes only a few containers a second, however many callers there are."""
CALL_TIMEOUT_S = 60
SIGNS_OF_NO_PROGRAM = ("executable file not found", "no such file or directory")
CONFLICT = 409
UNIX_SCHEME = "unix://"
DEFAULT_HOST = f"{UNIX_SCHEME}/var/run/docker.sock"


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
    volumes: tuple[str, ...] = ()  # paths that it declares as volumes


class Engine:
    """The engine's daemon. Make it with `connect`, end it with `aclose`. Every failure is a SandboxError."""

    def __init__(self, client: Any, path: str, info: Mapping[str, Any]) -> None:
        self.socket_path = path
        self.machine: str = info["Architecture"]
        self.runtimes: frozenset[str] = frozenset(info.get("Runtimes") or ())
        self.version: str = info["ServerVersion"]
        self._client = client
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="container-engine")

    @classmethod
    async def connect(cls) -> Self:
        """Connect to the daemon that `DOCKER_HOST` names, or to this machine's."""
        path = socket_path()
        try:
            await asyncio.to_thread(knock, path)
            client = await asyncio.to_thread(open_client, path)
            return cls(client, path, await asyncio.to_thread(client.info))
        except (DockerException, requests.RequestException) as error:
            raise EngineSilent(f"no Docker engine answers: {error}; start dockerd, or set DOCKER_HOST") from error

    async def is_there(self) -> bool:
        """Return whether the daemon answers."""
        try:
            return await self._call(lambda: self._client.ping())
        except SandboxError:
            return False

    async def image(self, name: str) -> Image:
        """Look an image up; SandboxError when it is not on this machine, as none is fetched."""
        try:
            found = await self._call(lambda: self._client.inspect_image(name))
        except SandboxError as error:
            if not isinstance(error.__cause__, ImageNotFound):
                raise
            raise SandboxError(
                f"there is no image {name!r} on this machine, and images are not fetched; build it "
                "(`python -m sandboxes image` makes the default one) or `docker pull` it"
            ) from None
        config = found.get("Config") or {}
        pairs = (text.partition("=") for text in config.get("Env") or ())
        return Image(
            id=found["Id"],
            num_bytes=found["Size"],
            env={name: value for name, _, value in pairs},
            volumes=tuple(config.get("Volumes") or ()),
        )

    async def has_image(self, name: str) -> bool:
        return bool(await self._call(lambda: self._client.images(name)))

    async def label_of_image(self, name: str, label: str) -> str | None:
        """Return an image's label; None where there is no such image or label."""
        found = await self._call(lambda: self._client.images(name))
        return (found[0].get("Labels") or {}).get(label) if found else None

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

    async def limit(self, container: str, limits: Mapping[str, Any]) -> None:
        """Change the bounds on all of a running container."""
        url = f"{self._client.base_url}/v{self._client.api_version}/containers/{container}/update"
        response = await self._call(lambda: self._client.post(url, json=dict(limits), timeout=CALL_TIMEOUT_S))
        if not response.ok:
            raise SandboxError(f"the container engine refused to change the limits: {response.text.strip()}")

    async def new_exec(self, container: str, argv: Sequence[str], env: Mapping[str, str], folder: str) -> str:
        """Make an exec and return its id; `folder` is relative to the working directory."""
        details = await self._call(lambda: self._client.inspect_container(container))
        workdir = posixpath.join(details["Config"]["WorkingDir"], folder)
        made = await self._call(
            lambda: self._client.exec_create(container, list(argv), stdin=True, environment=dict(env), workdir=workdir)
        )
        return made["Id"]

    async def exit_code(self, number: str) -> int | None:
        """Return the exit code of an exec; None while it runs."""
        return (await self._call(lambda: self._client.exec_inspect(number)))["ExitCode"]

    async def remove(self, container: str) -> None:
        """Kill and remove a container; returns when it is gone. Harmless when it is."""
        await self._call(lambda: remove_and_wait(self._client, container))

    async def containers(self, label: str) -> list[Mapping[str, Any]]:
        """Return all containers that bear a label, running or not."""
        return await self._call(lambda: self._client.containers(all=True, filters={"label": label}))

    async def aclose(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._client.close()

    async def _call(self, act: Callable[[], Answer]) -> Answer:
        """Run `act` in a thread. A cancelled caller does not wait for it."""

        def knock_and_act() -> Answer:
            knock(self.socket_path)
            return act()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, knock_and_act)
        except APIError as error:
            raise SandboxError(f"the container engine refused: {error.explanation or error}") from error
        except (DockerException, requests.RequestException) as error:
            raise EngineSilent(f"the container engine does not answer: {error}; is dockerd running?") from error


def socket_path() -> str:
    """Return the socket of the daemon that `DOCKER_HOST` names, or of this machine's."""
    host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    if not host.startswith(UNIX_SCHEME):
        raise SandboxError(f"DOCKER_HOST is {host!r}; only an engine of this machine is used: give unix:///path")
    return host.removeprefix(UNIX_SCHEME)


def knock(path: str) -> None:
    """Raise requests.ConnectionError if nobody listens; the docker package would leave the refused socket unclosed."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(CALL_TIMEOUT_S)
        try:
            door.connect(path)
        except OSError as error:
            raise requests.ConnectionError(f"{path}: {error}") from error


def open_client(path: str) -> Any:
    """Return a `docker.APIClient`, which has no type stubs. It asks the daemon for its version."""
    return docker.APIClient(base_url=f"{UNIX_SCHEME}{path}", version="auto", timeout=CALL_TIMEOUT_S)


def remove_and_wait(client: Any, container: str) -> None:
    """Kill and remove a container; blocks until it is gone."""
    with contextlib.suppress(NotFound):
        try:
            client.remove_container(container, force=True, v=True)
        except APIError as error:
            if error.status_code != CONFLICT:
                raise
            client.wait(container, condition="removed", timeout=CALL_TIMEOUT_S)  # somebody else removes it already


CONNECT_TIMEOUT_S = 60.0
FRAME_HEADER_BYTES = 8  # stream number, three zero bytes, length of what follows
STDERR = 2
MAX_HEAD_BYTES = 65_536


class EngineStream(asyncio.Protocol):
    """One stream, made with `open`. `on_data` gets stdout, `on_error` stderr; `on_end` is called once, at the end."""

    def __init__(
        self, on_data: Callable[[bytes], None], on_error: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        self._on_data = on_data
        self._on_error = on_error
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    @classmethod
    async def open(
        cls,
        socket_path: str,
        path: str,
        body: Mapping[str, Any],
        *,
        on_data: Callable[[bytes], None],
        on_error: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> Self:
        """Ask for the stream at `path` and wait until the engine has granted it."""
        stream = cls(on_data, on_error, on_end)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await stream._loop.create_unix_connection(lambda: stream, socket_path)
                stream._ask(path, json.dumps(body).encode())
                await stream._answered
        except BaseException as error:
            stream.close()
            if isinstance(error, OSError):  # this includes TimeoutError
                raise SandboxError(f"the container engine did not open a stream: {error or 'no answer'}") from error
            raise
        return stream

    @classmethod
    async def attach(
        cls,
        socket_path: str,
        container: str,
        *,
        on_end: Callable[[], None],
        on_data: Callable[[bytes], None] = lambda _data: None,
        on_error: Callable[[bytes], None] = lambda _data: None,
    ) -> Self:
        """Open the stream of the first process of a container, which may not have started yet."""
        path = f"/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        return await cls.open(socket_path, path, {}, on_data=on_data, on_error=on_error, on_end=on_end)

    def write(self, data: bytes) -> None:
        """Send data; does nothing when the stream has ended."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the engine has room for more."""
        await self._has_room.wait()

    def close_write(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ── asyncio.Protocol ──────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._answered.done():
            self._read_head()
        if self._answered.done():
            self._read_frames()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._has_room.set()
        if self._answered.done():
            self._on_end()
        else:
            self._answered.set_exception(ConnectionResetError("it closed the connection"))

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    # ── HTTP, and the engine's frames ─────────────────────────────────────────────────────────────────────────────

    def _ask(self, path: str, body: bytes) -> None:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.write(head.encode() + body)

    def _read_head(self) -> None:
        head, end, _ = bytes(self._received).partition(b"\r\n\r\n")
        if not end:
            if len(self._received) > MAX_HEAD_BYTES:
                self._answered.set_exception(ConnectionResetError("it does not speak HTTP"))
            return
        status = head.split(b" ", 2)[1:2]
        if status in ([b"101"], [b"200"]):
            del self._received[: len(head) + len(end)]
            self._answered.set_result(None)
        else:
            told = bytes(self._received[len(head) + len(end) :]) or head
            self._answered.set_exception(ConnectionResetError(told.decode(errors="replace").strip()))

    def _read_frames(self) -> None:
        received = self._received
        while len(received) >= FRAME_HEADER_BYTES:
            end = FRAME_HEADER_BYTES + int.from_bytes(received[4:FRAME_HEADER_BYTES], "big")
            if len(received) < end:
                return
            stream, data = received[0], bytes(received[FRAME_HEADER_BYTES:end])
            del received[:end]
            (self._on_error if stream == STDERR else self._on_data)(data)
