"""`python -m areal_agent.engine` as a process:

- it prints where it serves; on SIGTERM it lets requests end, queued and paused or not, and takes no new ones
- without time to drain, on Ctrl-C and on a second SIGTERM, requests are answered with what they have
- a port in use is reported at once, and a folder without a model is one line and exit code 2
- the number of engines that share its memory counts, itself included; if they are too many, it says so
"""

import asyncio
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_agent.engine.__main__ import main
from areal_agent.engine.client import HttpEngine
from areal_agent.errors import ConfigError, EngineUnreachable
from areal_agent.types import FinishReason, PauseMode, WeightVersion


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


async def engine_of(child) -> HttpEngine:
    """Yield the client of a newly started process."""
    line = (await child.stdout.readline()).decode()
    return HttpEngine(line.split()[-1])


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
async def test_a_signal_answers_what_is_in_flight_and_ends_it(number, exit_code, tiny, ask, tmp_path):
    announce = tmp_path / "url"
    async with process(tiny, "--drain", "0", "--weight-version", "2:5", "--announce", str(announce)) as child:
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


async def test_sigterm_lets_what_is_in_flight_end(tiny, ask):
    async with process(tiny, "--drain", "300", "--max-running", "1") as child:
        engine = await engine_of(child)
        await engine.pause(PauseMode.RETRACT)
        answers = [asyncio.create_task(engine.generate(ask(number, max_tokens=200))) for number in range(3)]
        while (await engine.stats()).num_queued < 3:
            pass
        child.send_signal(signal.SIGTERM)
        results = await asyncio.gather(*answers)
        await engine.aclose()
        assert await child.wait() == 0
    assert [(one.finish_reason, len(one.token_ids)) for one in results] == [(FinishReason.LENGTH, 200)] * 3


@pytest.mark.slow
async def test_while_it_drains_it_takes_no_request_and_a_second_sigterm_ends_it(tiny, ask):
    async with process(tiny, "--drain", "300") as child:
        engine = await engine_of(child)
        await engine.release_memory()  # so that the request cannot end by itself
        answer = asyncio.create_task(engine.generate(ask(1)))
        while (await engine.stats()).num_queued == 0:
            pass
        child.send_signal(signal.SIGTERM)
        while await engine.health():
            pass
        with pytest.raises(EngineUnreachable, match="is ending"):
            await engine.generate(ask(2))
        assert not answer.done()
        child.send_signal(signal.SIGTERM)
        assert (await answer).finish_reason is FinishReason.ABORT
        await engine.aclose()
        assert await child.wait() == 0
        assert b"Traceback" not in await child.stderr.read()


def test_a_port_in_use_is_told_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*another port"):
            main(["--model", str(tmp_path), "--port", str(port)])


async def test_what_cannot_be_served_is_one_line_and_exit_code_2(tmp_path):
    async with process(tmp_path) as child:
        _, errors = await child.communicate()
    assert child.returncode == 2
    assert errors.decode().splitlines()[-1].startswith(f"error: cannot load the model {str(tmp_path)!r}")
    assert b"Traceback" not in errors


def test_an_engine_shares_its_memory_with_itself_at_least(tiny):
    with pytest.raises(ConfigError, match="--sharing is 0; it counts this engine too"):
        main(["--model", str(tiny), "--sharing", "0"])


@pytest.mark.slow
async def test_too_many_engines_on_one_machine_are_told(tiny):
    async with process(tiny, "--sharing", "1000000000") as child:
        _, errors = await child.communicate()
    assert child.returncode == 2 and b"let fewer than 1000000000 engines share it" in errors
