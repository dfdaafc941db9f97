"""Containers come and go, and none is left.

1. closing a cell ends its programs, and its container is removed; 2. closing the provider removes all, also one that is
just being made, or whose caller is cancelled; 3. a closed one makes no more; 4. a container, forker or
relay that is killed from outside fails its calls, and the cell is known to be dead; a keeper may be killed; 5. after a
`kill -9` of its process nothing is left, though nobody reaps, and though the daemon is down for minutes; 6. reaping
takes what dead owners left, and nothing else.
"""

import asyncio
import io
import json
import os
import signal
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_agent.errors import SandboxError
from sandboxes.containers import keeper
from sandboxes.containers.confinement import OWNER_LABEL, Ownership
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE
from sandboxes.containers.provider import DockerProvider
from sandboxes.owner import own_tag
from sandboxes.spec import CellSpec, Limits, Program

PATIENT = Limits(wall_s=30.0)
SPEC = CellSpec(limits=PATIENT)
GONE_WITHIN_S = 30.0
HOST = """
import asyncio
from sandboxes.spec import Program
from sandboxes.containers.provider import DockerProvider
from sandboxes.spec import Limits
from sandboxes.spec import CellSpec

async def main():
    provider = await DockerProvider.start()
    cell = await provider.create(CellSpec(limits=Limits(wall_s=1000.0)))
    print(provider.ownership.filter, flush=True)
    await cell.exec(Program(argv=("sleep", "1000")), stdin=b"", limits=Limits(wall_s=1000.0))

asyncio.run(main())
"""


async def test_closed_cell_is_gone(engine: Engine, provider: DockerProvider) -> None:
    cell = await provider.create(SPEC)
    call = asyncio.create_task(cell.exec(Program(argv=("sleep", "1000")), stdin=b"", limits=PATIENT))
    process = await cell.spawn(Program(argv=("cat",)), limits=PATIENT, is_timed=False)
    await cell.close()
    with pytest.raises(SandboxError):
        await call
    with pytest.raises(SandboxError):
        await process.wait()
    assert [chunk async for chunk in process.stdout] == []
    assert not await cell.answers()
    async with asyncio.timeout(GONE_WITHIN_S):
        while await engine.containers(provider.ownership.filter):
            pass


async def test_closed_provider_leaves_nothing(engine: Engine) -> None:
    provider = await DockerProvider.start()
    await provider.create(SPEC)
    making = asyncio.create_task(provider.create(SPEC))
    while len(await engine.containers(provider.ownership.filter)) < 2 and not making.done():
        pass
    await provider.close()
    with pytest.raises(SandboxError):
        await (await making).exec(Program(argv=("true",)), stdin=b"", limits=PATIENT)
    assert await engine.containers(provider.ownership.filter) == []
    with pytest.raises(SandboxError, match="closed"):
        await provider.create(SPEC)


@pytest.mark.parametrize("cancelled_after_s", [0.0, 0.3, 0.6])
async def test_start_that_is_cancelled_as_the_provider_closes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, cancelled_after_s: float
) -> None:
    provider = await DockerProvider.start()
    client = provider._engine._client
    create = client.create_container_from_config

    def create_late(config: object) -> object:
        time.sleep(0.5)
        return create(config)

    monkeypatch.setattr(client, "create_container_from_config", create_late)
    makings = [asyncio.create_task(provider.create(SPEC)) for _ in range(2)]
    await asyncio.sleep(cancelled_after_s)
    for making in makings:
        making.cancel()
    await asyncio.gather(*makings, return_exceptions=True)
    await provider.close()
    assert await engine.containers(provider.ownership.filter) == []


@pytest.mark.parametrize("killed", ["container", "forker", "relay"])
async def test_what_is_killed_from_outside(engine: Engine, provider: DockerProvider, killed: str) -> None:
    cell = await provider.create(SPEC)
    call = asyncio.create_task(cell.exec(Program(argv=("sleep", "1000")), stdin=b"", limits=PATIENT))
    [container] = await engine.containers(provider.ownership.filter)
    if killed == "container":
        await engine.remove(container["Id"])
    else:
        details = await engine.find_container(container["Id"])
        assert details is not None
        forker = details["State"]["Pid"]
        os.kill(forker if killed == "forker" else child_of(forker), signal.SIGKILL)
    with pytest.raises(SandboxError, match="gone"):
        await call
    assert not await cell.answers()
    await cell.close()
    while await engine.containers(provider.ownership.filter):
        pass


async def test_keeper_that_is_killed(engine: Engine) -> None:
    provider = await DockerProvider.start()
    provider._keeper.kill()
    await provider._keeper.wait()
    await (await provider.create(SPEC)).close()
    await provider.close()


async def test_after_kill_of_its_process_nothing_is_left(engine: Engine) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HOST, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    label = (await process.stdout.readline()).decode().strip()
    assert len(await engine.containers(label)) == 1
    process.send_signal(signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(GONE_WITHIN_S):
        while await engine.containers(label):
            pass


def test_a_keeper_waits_for_a_daemon_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, removed = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def remove_all(path: str, label: str) -> int:
        if now_s < 300:
            raise ConnectionRefusedError
        removed.append(now_s)
        return 1 if len(removed) == 1 else 0

    monkeypatch.setattr(keeper, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s))
    monkeypatch.setattr(keeper, "remove_all", remove_all)
    monkeypatch.setattr(sys, "argv", ["keeper.py", "SOCKET", "LABEL"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    keeper.main()
    assert len(removed) == 1 + keeper.NUM_CLEAN_LOOKS


def test_a_keeper_asks_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = [(500, {"message": "not ready"}), (200, [{"Id": "a"}]), (204, None), *[(200, [])] * 3], list[str]()

    class Daemon(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path.partition('?')[0]}")
            status, body = answers[len(asked) - 1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_DELETE = do_GET
        log_request = address_string = lambda *_: ""

    monkeypatch.setattr(keeper, "PAUSE_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["keeper.py", str(tmp_path / "socket"), "LABEL"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with socketserver.UnixStreamServer(str(tmp_path / "socket"), Daemon) as server:
        threading.Thread(target=server.serve_forever).start()
        keeper.main()
        server.shutdown()
    listing = "GET /containers/json"
    assert asked == [listing, listing, "DELETE /containers/a", *[listing] * 3]


async def test_reaping_takes_what_dead_owners_left(engine: Engine, provider: DockerProvider) -> None:
    dead = await engine.create(unstarted(Ownership().labels | {OWNER_LABEL: dead_owner()}))
    unknown = await engine.create(unstarted({OWNER_LABEL: "1.1.1"}))  # of another PID namespace
    ours = Ownership()
    living = await engine.create(unstarted(ours.labels))
    assert await provider.reap() == 1
    assert [found["Id"] for found in await engine.containers(ours.filter)] == [living]
    for container in (dead, unknown, living):  # removing what is gone is harmless
        await engine.remove(container)


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def unstarted(labels: dict[str, str]) -> dict[str, object]:
    return {"Image": DEFAULT_IMAGE, "Cmd": ["true"], "Labels": labels, "HostConfig": {"NetworkMode": "none"}}


def dead_owner() -> str:
    """This process's tag with another start."""
    pid, start, namespace = own_tag().split(".")
    return f"{pid}.{int(start) + 1}.{namespace}"
