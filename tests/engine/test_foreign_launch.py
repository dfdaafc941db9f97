"""SGLang's and vLLM's servers as processes of a run, with stand-ins for them that serve nothing:

- the options of the config are arguments of the server; those of `server_args` come last, so that they hold
- on a CPU, SGLang sleeps when it has nothing to do, and vLLM's model has no process of its own
- with `device: cuda` each of several servers has GPUs of its own; vLLM's are shown them, out of those that the run
  sees; too few are a ConfigError
- on another machine they listen at its address, have its GPUs to choose from, and are told the key that they demand,
  but not as an argument
- a missing Python is a ConfigError; one without the package ends with its log; a server that never serves is an error,
  and is ended
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

from areal_agent.cluster import servers
from areal_agent.cluster.hosts import LocalHost
from areal_agent.config import Config
from areal_agent.engine.address import Backend
from areal_agent.engine.config import EngineConfig, visible_gpus
from areal_agent.errors import ConfigError, EngineUnreachable, ProcessDied
from areal_agent.run.preflight import check_engine
from areal_agent.types import WeightVersion

MODEL = os.path.abspath("model")
VERSION = WeightVersion(incarnation=1, step=9)
DEADLINE_S = 300.0  # only a hang is longer
BACKENDS = ("sglang", "vllm")

SERVER = {"sglang": "sglang/launch_server.py", "vllm": "vllm/entrypoints/openai/api_server.py"}
"""The program that our launcher runs."""

SERVES_NOTHING = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "100000"])
print("child", child.pid, "of", *sys.argv, flush=True)
time.sleep(100000)
"""

NO_GPU = """
class current_platform:
    is_cpu = staticmethod(lambda: True)
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
def stand_in(tmp_path: Path, program: Callable[[str], str]) -> Callable[[str, str], str]:
    """A Python with a package `sglang` or `vllm` whose server is this program."""

    def make(backend: str, server: str) -> str:
        path = tmp_path / SERVER[backend]
        path.parent.mkdir(parents=True)
        path.write_text(server)
        (tmp_path / backend / "platforms.py").write_text(NO_GPU)
        return program(f'PYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"')

    return make


def config(backend: str, python: str, **options: object) -> EngineConfig:
    """A config for a CPU, which vLLM's build decides by itself."""
    device = {"device": "cpu"} if backend == "sglang" else {}
    return EngineConfig.model_validate({"backend": backend, "python": python} | device | options)


async def start(options: EngineConfig, logs: Path) -> None:
    async with getattr(servers, f"start_{options.backend}")(options, Path("model"), VERSION, logs):
        pass


def child_named_in(log: Path) -> int | None:
    found = re.search(r"child (\d+) of", log.read_text()) if log.exists() else None
    return int(found[1]) if found else None


async def child_in(log: Path) -> psutil.Process:
    """The child of the stand-in, once it is there."""
    async with asyncio.timeout(DEADLINE_S):
        while (pid := child_named_in(log)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return psutil.Process(pid)


async def until_gone(process: psutil.Process) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


ARGUMENTS = {
    "sglang": (
        *(f"--model-path {MODEL}", "--weight-version 1:9", "--max-total-tokens 999", "--max-running-requests 7"),
        *("--context-length 508", "--device cpu", "--sleep-on-idle"),
    ),
    "vllm": (
        *(f"--model {MODEL}", "--max-model-len 500", "--max-num-seqs 7", "--logprobs-mode processed_logprobs"),
        *("--enable-scale-out", "--dtype float32"),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
async def test_options_are_arguments_of_a_server_that_is_ended_with_its_children(stand_in, tmp_path, backend):
    limits = {"kv_tokens": 999, "max_context_tokens": 500, "max_running_requests": 7, "startup_timeout_s": DEADLINE_S}
    python = stand_in(backend, SERVES_NOTHING)
    options = config(backend, python, port=12345, server_args=["--dtype", "bfloat16"], **limits)
    starting = asyncio.ensure_future(start(options, tmp_path))
    child = await child_in(tmp_path / "engine.log")
    words = (tmp_path / "engine.log").read_text()
    for argument in ("--port 12345", *ARGUMENTS[backend]):
        assert argument in words
        assert words.index(argument) < words.index("--dtype bfloat16")  # the last one holds
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until_gone(child)


@pytest.mark.parametrize(
    "options",
    [{"server_args": ["--tp-size", "2", "--base-gpu-id", "2"]}, {"server_args": ["--tp-size", "2"], "first_gpu": 2}],
)
async def test_each_server_of_sglang_has_gpus_of_its_own(program, tmp_path, options):
    told = tmp_path / "told"
    both_told = f'until [ "$(wc -l < {told})" = 2 ]; do sleep 0.02; done'  # the first that ends is the end of both
    asked = {"device": "cuda", "num_servers": 2, **options}
    with pytest.raises(ProcessDied):
        await start(config("sglang", program(f'echo "$@" >> {told}; {both_told}; exit 3'), **asked), tmp_path)
    last = [re.findall(r"--base-gpu-id (\d)", line)[-1] for line in told.read_text().splitlines()]
    assert sorted(last) == ["2", "4"]


@pytest.mark.parametrize(
    ("options", "seen", "shown"),
    [
        ({}, None, ["0"]),
        ({"num_servers": 3}, None, ["0", "1", "2"]),
        ({"num_servers": 2, "first_gpu": 4, "server_args": ["-tp", "2"]}, None, ["4,5", "6,7"]),
        ({"num_servers": 2, "first_gpu": 1}, "7,GPU-5,3", ["GPU-5", "3"]),
    ],
)
def test_each_server_of_vllm_is_shown_gpus_of_its_own(options, seen, shown):
    asked = config("vllm", "python", device="cuda", **options)
    assert [
        visible_gpus(asked, number, {"CUDA_VISIBLE_DEVICES": seen or ""}) for number in range(asked.num_servers)
    ] == [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in shown]


def test_servers_that_share_what_is_there_are_shown_all_of_it():
    assert visible_gpus(config("vllm", "python", num_servers=2), 1, {"CUDA_VISIBLE_DEVICES": "3"}) == {}


def test_too_few_gpus_are_a_config_error():
    with pytest.raises(ConfigError, match=r"engine 1 is to have GPUs 1 to 1, but CUDA_VISIBLE_DEVICES is .3."):
        visible_gpus(config("vllm", "python", device="cuda", num_servers=2), 1, {"CUDA_VISIBLE_DEVICES": "3"})


@pytest.mark.parametrize(
    ("variable", "options", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", {"device": "cuda", "first_gpu": 2, "server_args": ["-tp=2"]}, "2,3"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", {}, "0"),  # a model on a CPU has no process of its own
    ],
)
async def test_vllm_finds_its_gpus_and_where_its_model_runs_in_the_environment(
    stand_in, tmp_path, variable, options, value
):
    shows = f"import os, sys; print('shown', os.environ['{variable}']); sys.exit(3)"
    with pytest.raises(ProcessDied, match=f"shown {value}"):
        await start(config("vllm", stand_in("vllm", shows), **options), tmp_path)


SGLANGS_APP = """
class app:
    add_middleware = staticmethod(lambda one: print(f"--middleware launcher.{one.__name__}"))
"""


class Elsewhere(LocalHost):
    """A machine of a cluster."""

    address = "127.0.0.7"
    chooses_gpus = True

    def engine_key(self, backend: Backend) -> str:
        return "sk-of-this-run"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_server_elsewhere(stand_in, tmp_path, backend):
    shows = "import os, sys; print(*sys.argv, 'key', os.environ['AREAL_AGENT_ENGINE_KEY']); sys.exit(3)"
    options = EngineConfig(backend=backend, python=stand_in(backend, shows), device="cuda", first_gpu=2)
    (tmp_path / backend / "srt" / "entrypoints").mkdir(parents=True)
    (tmp_path / backend / "srt" / "entrypoints" / "http_server.py").write_text(SGLANGS_APP)
    with pytest.raises(ProcessDied, match="the engine process exited with 3") as death:
        async with getattr(servers, f"start_{backend}")(options, Path("model"), VERSION, tmp_path, Elsewhere()):
            pass
    arguments, _, key = str(death.value).partition(" key ")
    assert "--host 127.0.0.7" in arguments and "--middleware launcher.KeyDemanded" in arguments
    assert "--base-gpu-id" not in arguments and "sk-of-this-run" not in arguments
    assert key.startswith("sk-of-this-run")


async def test_a_python_without_the_package(tmp_path):
    with pytest.raises(ProcessDied, match=r"No module named .*vllm"):
        await start(config("vllm", sys.executable), tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_server_that_never_serves(program, tmp_path, backend):
    with pytest.raises(EngineUnreachable, match=r"did not serve within 0\.2 s"):
        await start(config(backend, program("exec sleep 100000"), startup_timeout_s=0.2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_run_that_is_killed_leaves_no_server(stand_in, tmp_path, backend):
    python = stand_in(backend, SERVES_NOTHING)
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, backend, python, str(tmp_path))
    child = await child_in(tmp_path / "engine.log")
    os.kill(run.pid, signal.SIGKILL)
    await run.wait()
    await until_gone(child)


def test_a_python_that_is_not_there():
    values = {"workflow": "m:f", "tasks": "m:f", "engine": {"backend": "sglang", "python": "/nowhere/python"}}
    with pytest.raises(ConfigError, match=r"engine.python = '/nowhere/python': there is no such program"):
        check_engine(Config.parse(values).engine)
