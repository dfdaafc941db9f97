"""Plays samples of one task by inspect_ai's `eval`, each in a process that is forked from this one.

`python -P serve.py SOCKET TASK ARGS` loads the package and the task once, and writes `ready`. Then each connection to
the UNIX socket SOCKET sends one line, the arguments of `evaluate` as JSON, and reads what that returns. A process runs
one `eval` at a time, and importing the package takes seconds: hence the forks. A connection that is closed early
interrupts its `eval`, which then cleans up its sandboxes.
"""

import importlib
import json
import math
import os
import signal
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from envs.inspect_ai.tasks import open_task

CLEANUP_S = 30.0
"""The time that an interrupted `eval` has to clean up."""

WORDS = {"c", "p", "i", "n", "yes", "no", "true", "false"}
"""The texts that inspect_ai counts as numbers. It counts all others as 0."""


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 100_000  # the run limits its rollouts
    request_queue_size = 1024
    parent = os.getppid()
    task: Any

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self.parent:
            os._exit(0)  # the run has died


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        request = json.loads(self.rfile.readline())
        threading.Thread(target=self.interrupt_when_closed, daemon=True).start()
        assert isinstance(self.server, Server)
        self.wfile.write(json.dumps(evaluate(self.server.task, **request)).encode())

    def interrupt_when_closed(self) -> None:
        self.connection.recv(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(CLEANUP_S)
        os._exit(1)


def evaluate(task: Any, sample: int | str, base_url: str, api_key: str, model: str) -> dict[str, Any]:
    """Return the scores of one sample by name, its error, if any, and the limit that it reached."""
    from inspect_ai import eval as run  # pyright: ignore
    from inspect_ai.model import GenerateConfig, get_model  # pyright: ignore

    once = GenerateConfig(max_retries=0)
    asked = get_model(f"openai-api/areal/{model}", base_url=base_url, api_key=api_key, config=once)
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"display": "none", "ctl_server": False, "score_display": False, "log_realtime": False}
        alone: dict[str, Any] = {"sample_id": sample, "epochs": 1, "retry_on_error": 0, "fail_on_error": False}
        (log,) = run(task, model=asked, log_dir=folder, log_samples=True, **alone, **quiet)
        played = log.samples[0] if log.samples else None  # read from the folder
    error = (played and played.error) or log.error
    return {
        "error": error.message if error else None if played else f"the eval ended as {log.status} without a sample",
        "limit": played.limit.type if played and played.limit else None,
        "scores": named((played and played.scores) or {}),
    }


def named(scores: Mapping[str, Any]) -> dict[str, float | None]:
    """Return scores as numbers; a score of several values gives one each, by SCORER/NAME."""
    values: dict[str, float | None] = {}
    for name, score in scores.items():
        parts = score.value if isinstance(score.value, Mapping) else {"": score.value}
        values |= {f"{name}/{part}".rstrip("/"): number_of(value) for part, value in parts.items()}
    return values


def number_of(value: Any) -> float | None:
    """Return a value of a score as inspect_ai counts it, None for one that says nothing, such as NaN or "unclear"."""
    from inspect_ai.scorer import value_to_float  # pyright: ignore

    try:
        number = value_to_float()(value) if str(value).lower() in WORDS else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def main(path: str, task: str, args: str) -> None:
    for module in ("inspect_ai.hooks", "inspect_ai.model._providers.openai_compatible", "openai.resources.chat", "acp"):
        importlib.import_module(module)  # once, not in each fork

    with Server(path, Handler) as server:
        server.task = open_task(task, json.loads(args))
        print("ready", flush=True)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads what a task prints
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
