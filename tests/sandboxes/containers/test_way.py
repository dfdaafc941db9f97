"""An engine on another machine, by DOCKER_HOST: here the same engine behind TCP, and behind an `ssh` of our own.

1. programs and builds work, and `doctor` names the host; 2. nothing is left of the way, nor of the containers of a
process that was killed; 3. a host that does not answer, and one of another kind, are one line.
"""

import asyncio
import os
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from sandboxes import open_pool
from sandboxes.__main__ import print_findings
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE, build_image
from sandboxes.containers.way import DIAL
from tests.sandboxes.containers.test_provider import GONE_WITHIN_S, HOST, unstarted


@pytest_asyncio.fixture(params=["tcp", "ssh"], loop_scope="module")
async def host(
    request: pytest.FixtureRequest, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    if request.param == "ssh":
        (tmp_path / "ssh").write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexec env DOCKER_HOST={engine.host} docker system dial-stdio\n'
        )
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("DOCKER_HOST", "ssh://me@far.example:2222")
        yield "ssh://me@far.example:2222"
        asked = (tmp_path / "asked").read_text().splitlines()[0]
        assert asked.endswith("-l me -p 2222 -- far.example docker system dial-stdio")
        return

    class Lead(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            environ = {**os.environ, "DOCKER_HOST": engine.host}
            subprocess.run(DIAL, stdin=self.request, stdout=self.request, env=environ, check=False)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Lead) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_address[1]}")
        yield os.environ["DOCKER_HOST"]
        await asyncio.to_thread(server.shutdown)


async def test_engine_elsewhere(host: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (await build_image(dockerfile=f"FROM {DEFAULT_IMAGE}\nLABEL of={host}\n")).startswith(
        "areal-agent-sandbox-of:"
    )
    async with open_pool(backend="docker", wall_s=60.0) as pool, pool.acquire() as box:
        big = os.urandom(2**20)
        await box.write("big", big)
        assert await box.read("big") == big
        assert (await box.exec(["sort"], stdin=b"b\na\n")).stdout == b"a\nb\n"
    await print_findings(as_json=False)
    assert f" at {host}, runtimes" in capsys.readouterr().out


async def test_way_leaves_nothing(host: str) -> None:
    engine = await Engine.connect()
    folder = Path(engine.socket_path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    await engine.aclose()
    assert not folder.exists()


async def test_after_kill_of_its_process_nothing_is_left(host: str, engine: Engine, tmp_path: Path) -> None:
    folder = {"TMPDIR": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOST, stdout=asyncio.subprocess.PIPE, env=os.environ | folder
    )
    assert process.stdout is not None
    label = (await process.stdout.readline()).decode().strip()
    await engine.create(unstarted(dict([label.split("=")])))  # has no agent, which would end it: the keeper has to
    assert len(await engine.containers(label)) == 2 and folders_of_ways(tmp_path)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(GONE_WITHIN_S):
        while await engine.containers(label) or folders_of_ways(tmp_path):
            pass


def folders_of_ways(folder: Path) -> list[Path]:
    return [*folder.glob("areal-agent-engine-*")]


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("tcp://127.0.0.1:1", r"no Docker engine answers at tcp://127.0.0.1:1"),
        ("http://x", "give unix:///path, tcp://"),
    ],
)
async def test_no_engine_elsewhere(monkeypatch: pytest.MonkeyPatch, host: str, told: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(SandboxError, match=told):
        await Engine.connect()
