"""The model plays a sample of an inspect_ai task, and its first score is the reward."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from areal_agent import Rollout, SandboxError
from envs.inspect_ai.tasks import require_inspect_ai

SERVE = Path(__file__).with_name("serve.py")


async def solve(task: dict[str, Any], rollout: Rollout) -> float | None:
    """Return the sample's first score, None without one; all of them are named parts."""
    require_inspect_ai()
    socket = await rollout.shared(opener_of(task["task"], json.dumps(task["args"], sort_keys=True)))
    model = {"base_url": rollout.base_url, "api_key": rollout.api_key, "model": rollout.model}
    result = await ask(socket, {"sample": task["sample"], **model})
    if result["error"] is not None:
        raise SandboxError(f"inspect_ai could not finish sample {task['sample']!r}: {result['error']}")
    rollout.log(limit=result["limit"])
    for name, value in result["scores"].items():
        if value is not None:
            rollout.reward(value, name=name)
    return next(iter(result["scores"].values()), None)


async def ask(socket: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what serve.py answers. A cancellation closes the connection, which interrupts the sample."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            answer = await reader.read()
        finally:
            writer.close()
    except OSError as error:
        raise SandboxError(f"the process of inspect_ai is gone: {error}") from error
    if not answer:
        raise SandboxError("inspect_ai's process for the sample died without an answer")
    return json.loads(answer)


@cache
def opener_of(task: str, args: str) -> Callable[[Rollout], AbstractAsyncContextManager[Path]]:
    """Return what opens the server of one task: the same for the same task, so that its rollouts share it."""
    return partial(open_server, task, args)


@asynccontextmanager
async def open_server(task: str, args: str, _rollout: Rollout) -> AsyncGenerator[Path]:
    """Start serve.py for a task, and end it on leaving."""
    with tempfile.TemporaryDirectory() as folder:
        socket, log = Path(folder, "socket"), Path(folder, "log")
        with log.open("wb") as stderr:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(SERVE), str(socket), task, args),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            assert process.stdout
            if await process.stdout.readline() != b"ready\n":
                raise SandboxError(f"inspect_ai does not start: {log.read_text().strip().rpartition(chr(10))[2]}")  # noqa: ASYNC240
            yield socket
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
