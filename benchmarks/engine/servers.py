"""The servers that are measured over HTTP: how each is started, and how it is asked for tokens with probabilities.

vLLM and SGLang live in environments of their own: `python` is theirs. SGLang's CPU path imports compiled operators that
PyPI has no CPU build of; a dense model calls none of them, and `sglang_cpu/` stands in for their names.
"""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from areal_agent.process import ENDING_WITH_US

PROMPT_TOKENS = 128
READY_S = 300.0
HERE = Path(__file__).parent
OURS = sys.executable

Body = Callable[[int, list[int], int], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str  # for POST requests
    health_url: str
    body: Body  # makes the body of a request of its number, ids and tokens to sample

    def freeze(self) -> None:
        """Stop its process: an idle SGLang keeps a core busy, which slows what runs on the other."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.go_on()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_ours(
    folder: Path,
    python: str,
    log: Path,
    dtype: str = "auto",
    max_context: int = 512,
    options: Sequence[str] = ("--device", "cpu"),
) -> Server:
    port = _free_port()
    argv = [python, "-m", "areal_agent.engine", "--model", str(folder), "--port", str(port)]
    argv += ["--max-running", "64", "--max-context", str(max_context), "--dtype", dtype]
    argv += options  # the last option of a name counts
    return _start(argv, log, port, "/generate", _native_body)


def start_sglang(folder: Path, python: str, log: Path, dtype: str) -> Server:
    port = _free_port()
    argv = [python, str(HERE / "sglang_cpu" / "launch.py"), "--model-path", str(folder), "--port", str(port)]
    argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    argv += ["--grammar-backend", "none", "--dtype", dtype, "--skip-server-warmup", "--host", "127.0.0.1"]
    argv += ["--max-total-tokens", "32768", "--max-running-requests", "64", "--weight-version", "0"]
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(HERE / "sglang_cpu")}
    return _start(argv, log, port, "/generate", _native_body, environment)


def start_vllm(folder: Path, python: str, log: Path, dtype: str) -> Server:
    port = _free_port()
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    argv += ["--dtype", dtype, "--enforce-eager", "--max-model-len", "512", "--host", "127.0.0.1"]
    argv += ["--served-model-name", "model", "--max-num-seqs", "64"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    return _start(argv, log, port, "/v1/completions", _vllm_body, environment)


class NotServing(Exception):
    """A server did not start, or did not answer as it should."""


async def wait_ready(client: aiohttp.ClientSession, server: Server, log: Path) -> None:
    """Wait until it serves. Raises NotServing when it ends or takes too long."""
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        if server.process.poll() is not None:
            break
        try:
            async with client.get(server.health_url) as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise NotServing(f"{server.url} does not serve; the end of its log:\n" + "\n".join(_tail(log)))


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-60:]


def random_ids(vocabulary: int, number: int = PROMPT_TOKENS) -> list[int]:
    return [random.randrange(1, vocabulary) for _ in range(number)]


def _native_body(number: int, ids: list[int], num_new: int) -> dict[str, Any]:
    params = {"temperature": 1.0, "max_new_tokens": num_new, "ignore_eos": True}
    return {"rid": f"{number:012}", "input_ids": ids, "sampling_params": params, "return_logprob": True}


def _vllm_body(_: int, ids: list[int], num_new: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": ids,
        "max_tokens": num_new,
        "temperature": 1.0,
        "logprobs": 0,
        "ignore_eos": True,
    }


def _start(
    argv: list[str], log: Path, port: int, path: str, body: Body, environment: dict[str, str] | None = None
) -> Server:
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*ENDING_WITH_US, *argv],
            stdout=output,
            stderr=output,
            env={**os.environ, **one_thread, **(environment or {})},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    return Server(process=process, url=url + path, health_url=url + "/health", body=body)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
