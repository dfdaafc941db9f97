"""`python -m areal_agent.engine` as a process; fleet/test_embedded.py has what it does on SIGTERM with time to drain.

- it prints where it serves, and writes it where it is asked to
- without time to drain, on Ctrl-C and on a second SIGTERM, requests are answered with what they have; while it drains
  it takes no new ones
- a port in use is reported at once; what cannot be served, as by too many engines in one memory, is one line and exit
  code 2
"""

import asyncio
import os
import signal
import socket
import sys
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from areal_agent.engine.__main__ import main
from areal_agent.engine.client import HttpEngine
from areal_agent.errors import ConfigError, EngineUnreachable
from areal_agent.types import FinishReason, WeightVersion


@asynccontextmanager
async def process(folder: Path, *options: str):
    """Start the command, with its output piped."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "areal_agent.engine", "--model", str(folder), "--device", "cpu"),
        *("--max-context", "512", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(900):  # only a hang is longer
            yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def url_of(child) -> str:
    """Return where a newly started process serves."""
    line = (await child.stdout.readline()).decode().strip()
    assert line.startswith("engine ready at ")
    return line.split()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drain_s", "signals", "exit_code"),
    [("0", [signal.SIGTERM], 0), ("300", [signal.SIGINT], 130), ("300", [signal.SIGTERM, signal.SIGTERM], 0)],
    ids=["without time", "Ctrl-C", "a second SIGTERM"],
)
async def test_a_signal_answers_what_is_in_flight_and_ends_it(drain_s, signals, exit_code, tiny, ask, tmp_path):
    announce = tmp_path / "url"
    options = ("--drain", drain_s, "--weight-version", "2:5", "--announce", str(announce))
    async with process(tiny, *options) as child:
        url = await url_of(child)
        assert announce.read_text() == url
        async with aclosing(HttpEngine(url)) as engine:
            assert (await engine.info()).weight_version == WeightVersion(incarnation=2, step=5)
            await engine.release_memory()  # so that the request cannot end by itself
            answer = asyncio.create_task(engine.generate(ask(1)))
            while (await engine.stats()).num_queued == 0:
                pass
            for number in signals[:-1]:
                child.send_signal(number)
                while await engine.health():
                    pass
                with pytest.raises(EngineUnreachable, match="is ending"):
                    await engine.generate(ask(2))
                assert not answer.done()
            child.send_signal(signals[-1])
            assert (await answer).finish_reason is FinishReason.ABORT
        assert await child.wait() == exit_code
        assert b"Traceback" not in await child.stderr.read()


def test_a_port_in_use_is_told_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*another port"):
            main(["--model", str(tmp_path), "--port", str(port)])


@pytest.mark.slow
async def test_what_cannot_be_served_is_one_line_and_exit_code_2(tiny):
    async with process(tiny, "--sharing", "1000000000") as child:
        _, errors = await child.communicate()
    assert child.returncode == 2 and b"Traceback" not in errors
    assert errors.splitlines()[-1].startswith(b"error: ") and b"let fewer than 1000000000 engines share it" in errors
