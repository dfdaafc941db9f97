"""SGLang's servers as processes of a run, with a stand-in for SGLang that serves nothing:

- the options of the config are arguments of the server; a missing Python is a ConfigError
- a server on a CPU sleeps when it has nothing to do
- with `device: cuda` each of several servers has GPUs of its own
- a Python without SGLang ends with its log; a server that never serves is an error, and is ended
- a server's children end with it, also when the run is killed
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from areal_agent.cluster.servers import start_sglang
from areal_agent.config import Config
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError, EngineUnreachable, ProcessDied
from areal_agent.run.preflight import check_engine
from areal_agent.types import WeightVersion

VERSION = WeightVersion(incarnation=1, step=9)
MODEL = os.path.abspath("model")
DEADLINE_S = 300.0  # only a hang is longer

SERVES_NOTHING = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "100000"])
print("child", child.pid, "of", *sys.argv, flush=True)
time.sleep(100000)
"""

RUN = """
import asyncio, sys
from pathlib import Path
from areal_agent.cluster import servers
from areal_agent.engine.config import EngineConfig
from areal_agent.types import WeightVersion

async def run(backend, python, logs):
    config = EngineConfig(backend=backend, python=python)
    async with getattr(servers, f"start_{backend}")(config, Path("model"), WeightVersion(), Path(logs)):
        pass

asyncio.run(run(*sys.argv[1:]))
"""


async def kill_a_run(backend: str, python: str, logs: Path) -> None:
    """Kill a run that starts a server; return once the server's child is gone."""
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, backend, python, str(logs))
    child = await child_in(logs / "engine.log")
    os.kill(run.pid, signal.SIGKILL)
    await run.wait()
    await until_gone(child)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """A shell script to be taken for a Python."""

    def make(script: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        return str(path)

    return make


@pytest.fixture
def stand_in(tmp_path: Path, program: Callable[[str], str]) -> str:
    """A Python with a package `sglang` that serves nothing."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVES_NOTHING)
    return program(f'PYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"')


def config(python: str, **options: object) -> EngineConfig:
    return EngineConfig.model_validate({"backend": "sglang", "python": python, "device": "cpu"} | options)


async def start(options: EngineConfig, logs: Path) -> None:
    async with start_sglang(options, Path("model"), VERSION, logs):
        pass


def child_named_in(log: Path) -> int | None:
    found = re.search(r"child (\d+) of", log.read_text()) if log.exists() else None
    return int(found[1]) if found else None


async def child_in(log: Path) -> psutil.Process:
    """The child of the stand-in, once it is there."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if (pid := child_named_in(log)) is not None:
                return psutil.Process(pid)
            await asyncio.sleep(0.05)


async def until_gone(process: psutil.Process) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_options_are_arguments(program, tmp_path):
    options = config(
        program('echo "$@"; exit 3'),
        port=12345,
        kv_tokens=999,
        max_context_tokens=500,
        max_running_requests=7,
        server_args=["--mem-fraction-static", "0.6"],
    )
    with pytest.raises(ProcessDied, match="the engine process exited with 3") as death:
        await start(options, tmp_path)
    for argument in (
        f"--model-path {MODEL}",
        "--port 12345",
        "--weight-version 1:9",
        "--max-total-tokens 999",
        "--max-running-requests 7",
        "--context-length 508",
        "--device cpu",
        "--mem-fraction-static 0.6",
    ):
        assert argument in str(death.value)


@pytest.mark.parametrize(
    "options",
    [{"server_args": ["--tp-size", "2", "--base-gpu-id", "2"]}, {"server_args": ["--tp-size", "2"], "first_gpu": 2}],
)
async def test_each_server_has_gpus_of_its_own(program, tmp_path, options):
    told = tmp_path / "told"
    both_told = f'until [ "$(wc -l < {told})" = 2 ]; do sleep 0.02; done'  # the first that ends is the end of both
    asked = {"device": "cuda", "num_servers": 2, **options}
    with pytest.raises(ProcessDied):
        await start(config(program(f'echo "$@" >> {told}; {both_told}; exit 3'), **asked), tmp_path)
    last = [re.findall(r"--base-gpu-id (\d)", line)[-1] for line in told.read_text().splitlines()]
    assert sorted(last) == ["2", "4"]


async def test_a_python_without_sglang(tmp_path):
    with pytest.raises(ProcessDied, match=r"No module named .*sglang"):
        await start(config(sys.executable), tmp_path)


async def test_a_server_that_never_serves(program, tmp_path):
    with pytest.raises(EngineUnreachable, match=r"did not serve within 0\.2 s"):
        await start(config(program("exec sleep 100000"), startup_timeout_s=0.2), tmp_path)


async def test_a_server_on_a_cpu_sleeps_when_idle_and_is_ended_with_its_children(stand_in, tmp_path):
    starting = asyncio.ensure_future(start(config(stand_in, startup_timeout_s=DEADLINE_S), tmp_path))
    child = await child_in(tmp_path / "engine.log")
    assert "--sleep-on-idle" in (tmp_path / "engine.log").read_text()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until_gone(child)


@pytest.mark.slow
async def test_a_run_that_is_killed_leaves_no_server(stand_in, tmp_path):
    await kill_a_run("sglang", stand_in, tmp_path)


def test_a_python_that_is_not_there():
    values = {"workflow": "m:f", "tasks": "m:f", "engine": {"backend": "sglang", "python": "/nowhere/python"}}
    with pytest.raises(ConfigError, match=r"engine.python = '/nowhere/python': there is no such program"):
        check_engine(Config.parse(values))
