"""`python -m areal_agent.gateway`: the command line of a stand-alone gateway (standalone.py).

Ctrl-C and SIGTERM drain it: nothing new begins, calls in flight finish, open sessions end as `cancelled`. A second
signal ends it at once; the ledger still holds every answered turn.
"""

import asyncio
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_agent.command import Parser, run_command
from areal_agent.errors import ConfigError
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.online.consumer import DEFAULT_GROUP_WAIT_S
from areal_agent.gateway.online.groups import Bound
from areal_agent.gateway.standalone import VARIABLE, AdminKey, Place, Standalone, open_standalone
from areal_agent.process import collect_garbage_rarely, exit_with_parent
from areal_agent.tokens.formats.answer_format import ReasoningFormat, ToolFormat
from areal_agent.tokens.template import HistoryThinking

DEFAULT_LEDGER = Path("runs/gateway")
LEDGER_FILE = "ledger.sqlite"
INTERRUPTED_CODE = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, connect and serve; return the exit code."""
    exit_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = _parser().parse_args(None if argv is None else list(argv))
    _check(options)
    ledger = _ledger_file(options.ledger)
    admin_key = AdminKey.obtain(
        given=options.admin_key,
        file=options.admin_key_file,
        environment=os.environ,
        host=options.host,
        folder=_made_folder(ledger.parent),
    )
    asyncio.run(_serve(_place(options, ledger, admin_key), admin_key, options.drain_timeout))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m areal_agent.gateway",
        description="Serve agents with a running engine, record every token, and lease the rollouts to a trainer.",
    )

    def add(name: str, text: str, **options: Any) -> None:
        parser.add_argument(name, help=text, **options)

    add(
        "--engine",
        "a running engine: areal_agent.engine, SGLang or vLLM, for example http://127.0.0.1:30000",
        metavar="URL",
        required=True,
    )
    add("--tokenizer", "a folder with the model's tokenizer", type=Path, metavar="PATH", required=True)
    add(
        "--history-thinking",
        "what to do with the thinking of earlier answers that the chat template would strip (default %(default)s)",
        choices=[one.value for one in HistoryThinking],
        default=HistoryThinking.TEMPLATE.value,
    )
    add(
        "--tool-format",
        "the format of the model's tool calls (default: as in its chat template)",
        choices=[one.value for one in ToolFormat],
    )
    add(
        "--reasoning-format",
        "the format of the model's reasoning (default: as in its chat template)",
        choices=[one.value for one in ReasoningFormat],
    )
    add("--port", "the port for agents; 0 picks a free one", type=int, required=True)
    add(
        "--host",
        "the address to bind (default %(default)s); any other needs an admin key of your choice",
        default="127.0.0.1",
    )
    add(
        "--allowed-host",
        "another name by which clients may call the gateway; repeatable",
        action="append",
        metavar="NAME",
    )
    add("--ledger", "the folder of the ledger (default %(default)s)", type=Path, metavar="PATH", default=DEFAULT_LEDGER)
    add("--admin-key", "the admin key; other users of this machine can see it, so prefer the file", metavar="KEY")
    add(
        "--admin-key-file", "a file with the admin key (default: $AREAL_AGENT_ADMIN_KEY, else a key is made)", type=Path
    )
    add("--model", "the name of the model (default: that of its folder)", metavar="NAME")
    _add_bounds(add)
    return parser


def _add_bounds(add: Callable[..., None]) -> None:
    """Add the flags for staleness, times and numbers."""
    add(
        "--max-staleness",
        "how many versions old a trained token may be; a trainer can set it, too",
        type=int,
        metavar="N",
    )
    add(
        "--batch-answers",
        "rollouts per train step; with --max-staleness it gives the staleness bound",
        type=int,
        metavar="B",
    )
    add(
        "--group-wait",
        "seconds to wait for missing siblings and rewards (default %(default)g)",
        type=float,
        metavar="S",
        default=DEFAULT_GROUP_WAIT_S,
    )
    add(
        "--session-timeout",
        "seconds without a call after which a session ends; 0: never (default %(default)g)",
        type=float,
        metavar="S",
        default=600.0,
    )
    add(
        "--max-sessions",
        "the most sessions open at once (default %(default)s)",
        type=int,
        default=Limits().max_sessions,
    )
    add(
        "--drain-timeout",
        "seconds that calls in flight get to finish at the end (default %(default)g)",
        type=float,
        metavar="S",
        default=30.0,
    )


def _check(options: Namespace) -> None:
    """Check what argparse cannot. Raises ConfigError."""
    if not options.engine.startswith(("http://", "https://")):
        raise ConfigError(f"--engine is {options.engine!r}; give a URL, for example http://127.0.0.1:30000")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}; give a port from 1 to 65535, or 0 for any free one")
    if (options.max_staleness is None) != (options.batch_answers is None):
        raise ConfigError("--max-staleness and --batch-answers are one bound: give both, or leave both to the trainer")
    bounds = {"max_staleness": 0, "batch_answers": 1, "group_wait": 0, "session_timeout": 0, "drain_timeout": 0}
    for name, low in (bounds | {"max_sessions": 1}).items():
        value = getattr(options, name)
        if value is not None and not low <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; give a number of at least {low}")


def _ledger_file(path: Path) -> Path:
    return path if path.suffix == ".sqlite" else path / LEDGER_FILE


def _made_folder(path: Path) -> Path:
    """Make the folder private to its owner: it holds prompts, answers and key hashes."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--ledger: the folder {path} cannot be made: {error.strerror}") from None
    return path


def _place(options: Namespace, ledger: Path, admin_key: AdminKey) -> Place:
    bound = None
    if options.max_staleness is not None:
        bound = Bound(batch_answers=options.batch_answers, max_staleness=options.max_staleness)
    return Place(
        engine_url=options.engine,
        tokenizer=options.tokenizer,
        history_thinking=HistoryThinking(options.history_thinking),
        tool_format=options.tool_format and ToolFormat(options.tool_format),
        reasoning_format=options.reasoning_format and ReasoningFormat(options.reasoning_format),
        ledger=ledger,
        host=options.host,
        port=options.port,
        admin_key=admin_key.key,
        model_name=options.model,
        bound=bound,
        group_wait_s=options.group_wait,
        limits=Limits(max_sessions=options.max_sessions, session_timeout_s=options.session_timeout or None),
        allowed_hosts=tuple(options.allowed_host or ()),
    )


async def _serve(place: Place, admin_key: AdminKey, drain_timeout_s: float) -> None:
    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            os._exit(INTERRUPTED_CODE)  # at once: what was answered is in the ledger
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    async with open_standalone(place) as standalone:
        collect_garbage_rarely()
        admin_key.keep()  # only now, so that a failed start leaves no key behind
        print(_welcome(standalone, place, admin_key), flush=True)
        await stopped.wait()
        print("closing: calls in flight may finish; Ctrl-C again ends at once", file=sys.stderr, flush=True)
        num_ended = await standalone.gateway.drain(drain_timeout_s)
    print(f"gateway closed; {num_ended} open sessions ended as cancelled", flush=True)


def _welcome(standalone: Standalone, place: Place, admin_key: AdminKey) -> str:
    """Return the lines that tell a user how to go on. The first says that the gateway serves, and where."""
    url = standalone.base_url
    key_file = f"rollout.gateway_admin_key_file={admin_key.file}" if admin_key.file else f"(key: set {VARIABLE})"
    return "\n".join(
        (
            f"gateway ready at {url}",
            f"model {standalone.model_name!r} on the engine at {place.engine_url}, which is {standalone.backend}",
            f"admin key {admin_key.source}",
            f"ledger {place.ledger}: {standalone.num_waiting} rollouts wait to be trained, "
            f"{standalone.num_orphans} were cut off and are orphans",
            f"next: POST {url}/rl/start_session with the admin key and a task_id returns an agent's base_url and key;",
            f"to train: python -m areal_agent.train --config FILE rollout.gateway_url={url} "
            f"engine.url={place.engine_url} {key_file}",
            "  (its FILE needs neither workflow nor tasks: you run the agents, environments and rewards)",
        )
    )


if __name__ == "__main__":
    run_command(main)
