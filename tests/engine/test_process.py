"""`python -m areal_agent.engine` as a process: it says where it serves; SIGTERM and Ctrl-C answer what is in flight and
end it cleanly; a port that is taken is one line and exit code 2.
"""

import asyncio
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_agent.engine.http import HttpEngine
from areal_agent.types import FinishReason, PauseMode, WeightVersion


@asynccontextmanager
async def process(folder: Path, *options: str):
    """The command, with its output piped."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "areal_agent.engine", "--model", str(folder), "--device", "cpu"),
        *("--max-context", "512", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(300):  # only a hang is longer
            yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_answers_what_is_in_flight_and_ends_it(number, exit_code, tiny, ask, tmp_path):
    announce = tmp_path / "url"
    async with process(tiny, "--weight-version", "2:5", "--announce", str(announce)) as child:
        line = (await child.stdout.readline()).decode().strip()
        assert line == f"engine ready at {announce.read_text()}"
        engine = HttpEngine(announce.read_text())
        assert (await engine.info()).weight_version == WeightVersion(incarnation=2, step=5)
        await engine.pause(PauseMode.RETRACT)  # so that the request cannot end by itself
        answer = asyncio.create_task(engine.generate(ask(1)))
        while (await engine.stats()).num_queued == 0:
            pass
        child.send_signal(number)
        result = await answer
        await engine.aclose()
        assert await child.wait() == exit_code
        assert result.finish_reason is FinishReason.ABORT
        assert b"Traceback" not in await child.stderr.read()


async def test_with_a_drain_time_what_is_in_flight_ends_by_itself(tiny, ask, tmp_path):
    announce = tmp_path / "url"
    async with process(tiny, "--drain", "60", "--announce", str(announce)) as child:
        await child.stdout.readline()
        engine = HttpEngine(announce.read_text())
        answer = asyncio.create_task(engine.generate(ask(1, max_tokens=480)))
        while (await engine.stats()).generated_tokens == 0:
            pass
        child.send_signal(signal.SIGTERM)
        result = await answer
        await engine.aclose()
        assert await child.wait() == 0
        assert (result.finish_reason, len(result.token_ids)) == (FinishReason.LENGTH, 480)


async def test_a_port_in_use_is_one_line_and_exit_code_2(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with process(tiny, "--port", str(port)) as child:
            _, errors = await child.communicate()
    assert child.returncode == 2
    assert errors.decode().splitlines()[-1].startswith(f"error: the engine cannot listen on 127.0.0.1:{port}")
    assert b"Traceback" not in errors
