"""vLLM's servers as processes of a run, with a stand-in for vLLM that serves nothing:

- the options of the config are arguments of the server, and what a CPU wants stands in front of them
- a model on a CPU has no process of its own beside that which schedules it
- with `device: cuda` each server is shown GPUs of its own, out of those that the run sees; too few are a ConfigError
- a Python without vLLM ends with its log
- a server's own children are gone with it, also when the run is killed
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_agent.cluster.servers import start_vllm
from areal_agent.engine.config import EngineConfig, visible_gpus
from areal_agent.errors import ConfigError, ProcessDied
from areal_agent.types import WeightVersion

from ..sglang.test_launch import SERVES_NOTHING, kill_a_run, program

__all__ = ["program"]  # a fixture

MODEL = os.path.abspath("model")

NO_GPU = """
class current_platform:
    is_cpu = staticmethod(lambda: True)
"""


@pytest.fixture
def stand_in(tmp_path: Path, program: Callable[[str], str]) -> Callable[[str], str]:
    """A Python with a package `vllm` whose server is this program."""

    def make(server: str) -> str:
        package = tmp_path / "vllm"
        (package / "entrypoints" / "openai").mkdir(parents=True)
        (package / "platforms.py").write_text(NO_GPU)
        (package / "entrypoints" / "openai" / "api_server.py").write_text(server)
        return program(f'PYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"')

    return make


def config(python: str, **options: object) -> EngineConfig:
    return EngineConfig.model_validate({"backend": "vllm", "python": python} | options)


async def start(options: EngineConfig, logs: Path) -> None:
    async with start_vllm(options, Path("model"), WeightVersion(), logs):
        pass


async def test_options_are_arguments(stand_in, tmp_path):
    options = config(
        stand_in("import sys; print(*sys.argv); sys.exit(3)"),
        port=12345,
        kv_tokens=1000,
        max_context_tokens=500,
        max_running_requests=7,
        server_args=["--dtype", "bfloat16"],
    )
    with pytest.raises(ProcessDied, match="the engine process exited with 3") as death:
        await start(options, tmp_path)
    words = str(death.value)
    for argument in (
        f"--model {MODEL}",
        "--port 12345",
        "--max-model-len 500",
        "--max-num-seqs 7",
        "--logprobs-mode processed_logprobs",
        "--enable-scale-out",
    ):
        assert argument in words
    assert words.index("--dtype float32") < words.index("--dtype bfloat16")  # the last one holds


@pytest.mark.parametrize(
    ("options", "seen", "shown"),
    [
        ({"device": "cuda"}, None, ["0"]),
        ({"device": "cuda", "num_servers": 3}, None, ["0", "1", "2"]),
        ({"device": "cuda", "num_servers": 2, "first_gpu": 4, "server_args": ["-tp", "2"]}, None, ["4,5", "6,7"]),
        ({"device": "cuda", "num_servers": 2, "first_gpu": 1}, "7,GPU-5,3", ["GPU-5", "3"]),
    ],
)
def test_each_server_is_shown_gpus_of_its_own(options, seen, shown):
    asked = config("python", **options)
    assert [
        visible_gpus(asked, number, {"CUDA_VISIBLE_DEVICES": seen or ""}) for number in range(asked.num_servers)
    ] == [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in shown]


def test_servers_that_share_what_is_there_are_shown_all_of_it():
    assert visible_gpus(config("python", num_servers=2), 1, {"CUDA_VISIBLE_DEVICES": "3"}) == {}


def test_too_few_gpus_are_a_config_error():
    with pytest.raises(ConfigError, match=r"engine 1 is to have GPUs 1 to 1, but CUDA_VISIBLE_DEVICES is .3."):
        visible_gpus(config("python", device="cuda", num_servers=2), 1, {"CUDA_VISIBLE_DEVICES": "3"})


async def test_the_gpus_reach_the_server(stand_in, tmp_path):
    shows = "import os, sys; print('shown', os.environ['CUDA_VISIBLE_DEVICES']); sys.exit(3)"
    with pytest.raises(ProcessDied, match="shown 2,3"):
        await start(config(stand_in(shows), device="cuda", first_gpu=2, server_args=["-tp=2"]), tmp_path)


async def test_a_model_on_a_cpu_has_no_process_of_its_own(stand_in, tmp_path):
    shows = "import os, sys; print('own process:', os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']); sys.exit(3)"
    with pytest.raises(ProcessDied, match="own process: 0"):
        await start(config(stand_in(shows)), tmp_path)


async def test_a_python_without_vllm(tmp_path):
    with pytest.raises(ProcessDied, match=r"No module named .*vllm"):
        await start(config(sys.executable), tmp_path)


@pytest.mark.slow
async def test_a_run_that_is_killed_leaves_no_server(stand_in, tmp_path):
    await kill_a_run("vllm", stand_in(SERVES_NOTHING), tmp_path)
