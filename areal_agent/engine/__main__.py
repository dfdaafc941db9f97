"""`python -m areal_agent.engine` runs the embedded engine as a process.

It prints one line when it serves, and ends on SIGTERM, on Ctrl-C, with its parent, or when its model thread dies.
After SIGTERM it accepts no more requests. Those in flight may finish within `--drain` seconds; after that, and at once
after Ctrl-C or a second SIGTERM, they are answered with the tokens so far.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers.utils.logging import disable_progress_bar

from areal_agent.callback import announce, call_back
from areal_agent.command import Parser, run_command
from areal_agent.engine.address import KEY_VARIABLE, key_of_environment
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.server import EngineServer, cannot_listen
from areal_agent.errors import ConfigError, EngineError
from areal_agent.gateway.auth import LOOPBACK_NAMES
from areal_agent.process import allow_many_connections, exit_with_parent
from areal_agent.threads import cores_for, is_on_cpu, share_out
from areal_agent.types import WeightVersion

logger = logging.getLogger("areal_agent.engine")  # because `__name__` is __main__ here

DRAIN_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load and serve; return the exit code."""
    exit_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = _parser().parse_args(None if argv is None else list(argv))
    config, version = _config(options), _weight_version(options.weight_version)
    if not 0 <= options.drain < float("inf"):
        raise ConfigError(f"--drain is {options.drain}; it must be 0 or more seconds")
    if options.sharing < 1:
        raise ConfigError(f"--sharing is {options.sharing}; it counts this engine too, so it must be 1 or more")
    key = key_of_environment()
    if key is None and options.host not in LOOPBACK_NAMES:
        raise ConfigError(
            f"--host {options.host} lets other machines connect, and there is no key: set {KEY_VARIABLE}, here and for "
            "whoever uses this engine, or listen on 127.0.0.1"
        )
    _check_port(options.host, config.port)
    allow_many_connections()
    cores = cores_for(Path(options.model)) if is_on_cpu(config.device) else 1
    torch.set_num_threads(share_out(cores, config.threads, options.sharing, "auto", 0)[0])
    torch.set_num_interop_threads(1)
    if not is_on_cpu(config.device):
        sys.setswitchinterval(0.0005)  # by default a thread may keep others waiting for longer than a step takes
    disable_progress_bar()  # its output is a log
    runner = ModelRunner(
        options.model,
        device=config.device,
        dtype=config.dtype,
        num_slots=config.max_running_requests,
        max_context_tokens=config.max_context_tokens,
        kv_tokens=config.kv_tokens,
        leave_bytes=None if config.leave_gib is None else int(config.leave_gib * 2**30),
        num_sharing=options.sharing,
    )
    asyncio.run(_serve(runner, options, version, key))
    return 0


def _parser() -> Parser:
    fields = EngineConfig()
    parser = Parser(
        prog="python -m areal_agent.engine",
        description="Serve a Hugging Face model on SGLang's wire: continuous batching, interruption, weight updates.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="a Hugging Face folder, or a name on the hub")
    add("--port", type=int, default=fields.port, help="0 picks a free one (default)")
    add("--host", default="127.0.0.1", help=f"address to bind (default 127.0.0.1); others need a key in {KEY_VARIABLE}")
    add("--device", choices=("auto", "cpu", "cuda"), default=fields.device)
    help_of_dtype = "what the model computes in (default auto: by processor and size)"
    add("--dtype", choices=("auto", "float32", "bfloat16"), default=fields.dtype, help=help_of_dtype)
    help_of_threads = "CPU threads, or auto: for a large model all cores, else one (default %(default)s)"
    add("--threads", type=_number_or_word, default=fields.threads, help=help_of_threads)
    add(
        "--max-running",
        dest="max_running_requests",
        type=int,
        default=fields.max_running_requests,
        help="requests at once (default %(default)s)",
    )
    add(
        "--max-context",
        dest="max_context_tokens",
        type=int,
        default=fields.max_context_tokens,
        help="tokens of one request, prompt and answer (default %(default)s)",
    )
    add("--kv-tokens", type=int, help="tokens whose keys and values are kept (default: depends on the memory)")
    help_of_leave = "memory that keys and values leave free, for example for a trainer"
    add("--leave-gib", type=float, metavar="GIB", help=help_of_leave)
    add(
        "--sharing",
        type=int,
        default=1,
        metavar="N",
        help="engines that share the memory, including this one; without --kv-tokens each takes its part (default 1)",
    )
    add("--weight-version", default="0:0", help="label of the weights it starts with (default 0:0)")
    add(
        "--drain",
        type=float,
        default=DRAIN_S,
        metavar="SECONDS",
        help="on SIGTERM, let requests in flight finish for this long, or until a second SIGTERM, then answer them "
        "with the tokens so far (default %(default)s)",
    )
    add("--connect", metavar="HOST:PORT", help="where the run that starts it expects a call with the base URL")
    add("--announce", type=Path, metavar="FILE", help="file to write the base URL to once it serves")
    return parser


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _config(options: Namespace) -> EngineConfig:
    """Validate the options with the config section."""
    shared = vars(options).keys() & EngineConfig.model_fields.keys()
    try:
        return EngineConfig(**{name: getattr(options, name) for name in shared})
    except ValidationError as error:
        fault = error.errors()[0]
        where = f"{fault['loc'][0]} is {fault['input']!r}; " if fault["loc"] else ""
        raise ConfigError(f"{where}{fault['msg'].removeprefix('Value error, ').lower()}") from None


def _weight_version(text: str) -> WeightVersion:
    try:
        return WeightVersion.parse(text)
    except ValueError as error:
        raise ConfigError(f"--weight-version: {error}") from None


async def _serve(runner: ModelRunner, options: Namespace, version: WeightVersion, key: str | None) -> None:
    stopped, hurried = asyncio.Event(), asyncio.Event()  # set by the first SIGTERM, and by the second
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: hurried.set() if stopped.is_set() else stopped.set()
    )
    server = await EngineServer.start(runner, host=options.host, port=options.port, key=key, version=version)
    try:
        if options.announce is not None:
            _write_whole(options.announce, server.base_url)
        if options.connect is not None:
            with call_back(options.connect) as sock:
                announce(server.base_url, sock)
        print(f"engine ready at {server.base_url}", flush=True)
        await _until_one_ends(stopped.wait(), server.failed.wait())
        if options.drain and not server.failed.is_set():
            logger.info(
                "SIGTERM: requests in flight may finish within %g s (--drain); a second SIGTERM ends them now",
                options.drain,
            )
            await _until_one_ends(server.drain(options.drain), hurried.wait())
    finally:
        await server.aclose()
    if server.failed.is_set():
        raise EngineError("the model thread died; its traceback is above")


async def _until_one_ends(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for the first to end; cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _check_port(host: str, port: int) -> None:
    """Raise ConfigError for an address that cannot be bound, before a large model is loaded."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of the text or no file."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


if __name__ == "__main__":
    run_command(main)
