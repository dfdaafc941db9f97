"""No engine answers: that is one line, and no socket is left for the garbage collector to close."""

import asyncio
import gc
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_agent.errors import SandboxError
from sandboxes.containers.engine import Engine


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
