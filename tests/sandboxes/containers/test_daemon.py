"""A daemon of our own that is ended, killed and started anew under a pool, with and without `live-restore`.

1. what ran fails as the sandbox's fault, also what prints all the while, what is being written or unpacked, and what is
unpacked while there is no daemon; a container that is being made is made, or lost; 2. a sandbox that is asked for while
there is no daemon comes when it is back; 3. the stock is full again; 4. of the containers before nothing is left, and
with the pool go those after.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from sandboxes import Limits, Pool, SandboxSpec, open_pool
from sandboxes.containers.confinement import OWNER_LABEL
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE
from sandboxes.folder import Entry, pack

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
OF_NO_USE = ("usr/include", "usr/share", "usr/lib/gcc", "var", "boot")
MAX_FILE_BYTES = 10 * 2**20
CHATTER = "import time\nwhile True:\n    print('x' * 1000, flush=True)\n    time.sleep(0.001)"
PATIENT = Limits(wall_s=1000.0, output_bytes=2**30)
WRITABLE = SandboxSpec(is_writable=True, user="0", limits=PATIENT)
NOT_IN_STOCK = SandboxSpec(limits=Limits(wall_s=601.0))
FILES = pack([Entry(path=f"{number}", data=bytes(2**20)) for number in range(24)])


class Daemon:
    """A daemon with containers, images and runtime files of its own, below one folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket_path = folder / "engine.sock"
        self._folder = folder
        self._options = options
        self._log = (folder / "log").open("ab")
        self._settings = folder / "daemon.json"
        self._settings.write_text("{}")
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """SandboxError with what it said when it ends instead."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.setblocking(False)
            address = self._folder / "notices"
            address.unlink(missing_ok=True)
            notices.bind(str(address))
            self._process = await asyncio.create_subprocess_exec(
                "dockerd", "--host", f"unix://{self.socket_path}", "--data-root", self._folder / "data",
                "--exec-root", self._folder / "exec", "--pidfile", self._folder / "pid",
                "--config-file", self._settings, "--bridge=none", "--iptables=false", "--ip6tables=false",
                *self._options,
                stdin=asyncio.subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
                env={**os.environ, "NOTIFY_SOCKET": str(address)},
            )  # fmt: skip
            ended = asyncio.create_task(self._process.wait())
            ready = asyncio.create_task(asyncio.get_running_loop().sock_recv(notices, 1024))
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait([ended, ready], return_when=asyncio.FIRST_COMPLETED)
            for task in (ended, ready):
                task.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)
        if self._process.returncode is not None:
            raise SandboxError((self._folder / "log").read_text()[-500:])

    async def stop(self, number: signal.Signals) -> None:
        """A killed one takes the process that it has for its containers along, and no container."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            async with asyncio.timeout(PATIENCE_S):
                await self._process.wait()
        pid_file = self._folder / "exec" / "containerd" / "containerd.pid"
        if pid_file.exists() and is_containerd(pid := int(pid_file.read_text())):
            os.kill(pid, signal.SIGKILL)
        pid_file.unlink(missing_ok=True)

    async def aclose(self) -> None:
        """With all that it has started."""
        await self.stop(signal.SIGTERM)
        self._log.close()
        await asyncio.to_thread(remove_with_shims_and_mounts, self._folder)


def remove_with_shims_and_mounts(folder: Path) -> None:
    """A shim stands between a daemon and each container, and may outlive both."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = place.read_bytes().split(b"\0")
            if b"containerd-shim" in words[0] and any(word.startswith(f"{folder}/".encode()) for word in words):
                os.kill(int(place.parent.name), signal.SIGKILL)
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if (place := line.split()[1]).startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", place], check=False)
    shutil.rmtree(folder, ignore_errors=True)


def is_containerd(pid: int) -> bool:
    try:
        return b"containerd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def image_files(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What of the default image runs Python, as a tar."""
    target = tmp_path_factory.mktemp("image") / "files.tar"
    made = subprocess.run(["docker", "create", DEFAULT_IMAGE, "true"], check=True, capture_output=True, text=True)
    container = made.stdout.strip()
    left_out: set[str] = set()
    with (
        subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export,
        tarfile.open(fileobj=export.stdout, mode="r|") as source,
        tarfile.open(target, "w") as files,
    ):
        for member in source:
            if member.name.startswith(OF_NO_USE) or member.size > MAX_FILE_BYTES or member.linkname in left_out:
                left_out.add(member.name)
            else:
                files.addfile(member, source.extractfile(member) if member.isfile() else None)
    subprocess.run(["docker", "rm", container], check=True, capture_output=True)
    return target


@pytest_asyncio.fixture(
    scope="module", params=[(), ("--live-restore",)], ids=["plain", "live-restore"], loop_scope="module"
)
async def daemon(
    request: pytest.FixtureRequest, image_files: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Daemon]:
    """One that runs, and has the image; a test leaves it so."""
    if os.getuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("a second daemon needs root, and dockerd")
    daemon = Daemon(tmp_path_factory.mktemp("d"), *request.param)
    try:
        try:
            await daemon.start()
        except SandboxError as error:
            pytest.skip(f"no second daemon can be started here: {error}")
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("DOCKER_HOST", f"unix://{daemon.socket_path}")
            engine = await Engine.connect()
            await engine.import_image(image_files, DEFAULT_IMAGE, {})
            await engine.aclose()
            yield daemon
    finally:
        await daemon.aclose()


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.1)


async def ids_of(engine: Engine) -> set[str]:
    return {container["Id"] for container in await engine.containers(OWNER_LABEL)}


async def printed(pool: Pool, spec: SandboxSpec | None = None) -> bytes:
    async with pool.acquire(spec) as box:
        return (await box.exec(["echo", "back"])).stdout


def is_running(word: str) -> bool:
    """Whether any process of this machine was started with it."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in place.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_pool_survives_a_restart_of_its_daemon(daemon: Daemon, number: signal.Signals) -> None:
    seconds = f"8640{os.getpid()}"  # of sleep: a word that no other process has
    async with open_pool(backend="docker", wall_s=600.0) as pool:
        await pool.warm(num_cells=2)
        async with pool.acquire() as box, pool.acquire(WRITABLE) as chatty:
            calls = [
                asyncio.create_task(box.exec(["sleep", seconds], limits=PATIENT)),
                asyncio.create_task(chatty.exec_python(CHATTER, limits=PATIENT)),
            ]
            assert (await box.exec(["true"], limits=PATIENT)).is_ok
            assert (await chatty.exec(["true"], limits=PATIENT)).is_ok
            process = await box.spawn(["cat"])
            archives = await chatty.archives()
            engine = await Engine.connect()
            before = await ids_of(engine)
            halfway = [
                asyncio.create_task(work)
                for work in (box.upload(FILES), archives.load(FILES, "/srv"), printed(pool, NOT_IN_STOCK))
            ]
            await asyncio.sleep(0)
            await daemon.stop(number)
            for call in calls:
                with pytest.raises(SandboxError, match="gone"):
                    await call
            with pytest.raises(SandboxError, match="gone"):
                await process.wait()
            with pytest.raises(SandboxError):
                await archives.load(FILES, "/srv")
            asked = asyncio.create_task(printed(pool))
            await daemon.start()
            assert await asked == b"back\n"
            for ended in await asyncio.gather(*halfway, return_exceptions=True):
                assert ended in (None, b"back\n") or isinstance(ended, SandboxError), ended
        await pool.warm(num_cells=2)

        async def is_clear() -> bool:
            return not before & await ids_of(engine) and not is_running(seconds)

        await until(is_clear)
        assert await printed(pool) == b"back\n"

    async def is_empty() -> bool:
        return not await ids_of(engine)

    await until(is_empty)
    await engine.aclose()
