"""No engine answers: that is one line, and no socket is left for the garbage collector to close. Nor does one hang."""

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_agent.errors import SandboxError
from sandboxes.containers import engine as engine_module
from sandboxes.containers.engine import Engine, EngineSilent


@contextmanager
def none_left_open() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert [str(one.message) for one in caught if one.category is ResourceWarning] == []


def refusing(path: Path) -> str:
    """A socket at which nobody listens."""
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(path))
    return str(path)


@pytest.mark.parametrize("is_there", [False, True])
async def test_no_engine_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    path = tmp_path / "engine.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{refusing(path) if is_there else path}")
    with none_left_open():
        with pytest.raises(SandboxError, match=rf"no Docker engine answers: {path}: .*; start dockerd"):
            await Engine.connect()
        await asyncio.to_thread(int)  # the thread has forgotten its last call


async def test_engine_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells its version, and then answers no attach."""
    path = str(tmp_path / "engine.sock")
    told = b'{"ApiVersion": "1.41", "Architecture": "x86_64", "ServerVersion": "1"}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while b"/attach?" not in await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(told), told))
            await reader.read()
        writer.close()

    monkeypatch.setattr(engine_module, "CALL_TIMEOUT_S", 1)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    async with await asyncio.start_unix_server(answer, path), asyncio.timeout(20):
        engine = await Engine.connect()
        with pytest.raises(EngineSilent, match="timed out"):
            await engine.attach("some")
        await engine.aclose()
