"""`python -m areal_agent.gateway`: a stand-alone gateway. It has a ledger of its own; engine and trainer run elsewhere.

::

    agents ── HTTP ──▶ gateway ── HTTP ──▶ engine
    trainer ── lease ──▶  └──▶ ledger

Ctrl-C and SIGTERM drain it: nothing new begins, calls in flight finish, open sessions end as `cancelled`. A second
signal ends it at once; the ledger still holds every answered turn.
"""

import asyncio
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.command import Parser, run_command
from areal_agent.engine.address import Backend, EngineAddress
from areal_agent.errors import ConfigError, EngineError, LedgerError
from areal_agent.gateway.app import Gateway
from areal_agent.gateway.auth import KEY_VARIABLE, AdminKey
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.online.consumer import DEFAULT_GROUP_WAIT_S, Consumer
from areal_agent.gateway.online.groups import Bound
from areal_agent.images import IMAGES, SOURCE, ImageFolder
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.questions import STATUS_NOTE
from areal_agent.process import collect_garbage_rarely, exit_with_parent
from areal_agent.tokens.formats.answer_format import ToolFormat
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.template import HistoryThinking
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, TranscriptSettings

DEFAULT_LEDGER = Path("runs/gateway")
LEDGER_FILE = "ledger.sqlite"
INTERRUPTED_CODE = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, connect and serve; return the exit code."""
    exit_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parser().parse_args(None if argv is None else list(argv))
    _check(options)
    admin_key = AdminKey.obtain(
        given=options.admin_key,
        file=options.admin_key_file,
        environment=os.environ,
        host=options.host,
        folder=_made_folder(ledger_file(options).parent),
    )
    asyncio.run(_serve(options, admin_key))
    return 0


def parser() -> Parser:
    made = Parser(
        prog="python -m areal_agent.gateway",
        description="Serve agents with a running engine, record every token, and lease the rollouts to a trainer.",
    )

    def add(name: str, text: str, **options: Any) -> None:
        made.add_argument(name, help=text, **options)

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
    add(
        "--images",
        "take images, and keep them beside the ledger; a trainer that leases from here cannot train them",
        action="store_true",
    )
    add(
        "--image-source",
        "a host or a folder (file:///...) from which images are fetched that agents name by URL; repeatable",
        action="append",
        default=[],
        metavar="HOST",
    )
    add("--ledger", "the folder of the ledger (default %(default)s)", type=Path, metavar="PATH", default=DEFAULT_LEDGER)
    add("--admin-key", "the admin key; other users of this machine can see it, so prefer the file", metavar="KEY")
    add(
        "--admin-key-file", "a file with the admin key (default: $AREAL_AGENT_ADMIN_KEY, else a key is made)", type=Path
    )
    add("--model", "the name of the model (default: that of its folder)", metavar="NAME")
    add(
        "--model-alias",
        "another name by which agents may call the model; repeatable; '*' stands for every name",
        action="append",
        default=[],
        metavar="NAME",
    )
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
    return made


def _check(options: Namespace) -> None:
    """Check what argparse cannot. Raises ConfigError."""
    if not options.engine.startswith(("http://", "https://")):
        raise ConfigError(f"--engine is {options.engine!r}; give a URL, for example http://127.0.0.1:30000")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}; give a port from 1 to 65535, or 0 for any free one")
    if strange := [one for one in options.image_source if not SOURCE.fullmatch(one)]:
        raise ConfigError(
            f"--image-source is {strange[0]!r}; give a host as example.org or 10.0.0.7:80, or a folder as file:///srv/x"
        )
    if options.image_source and not options.images:
        raise ConfigError("--image-source has no effect without --images; add that, or leave it out")
    if (options.max_staleness is None) != (options.batch_answers is None):
        raise ConfigError("--max-staleness and --batch-answers are one bound: give both, or leave both to the trainer")
    bounds = {"max_staleness": 0, "batch_answers": 1, "group_wait": 0, "session_timeout": 0, "drain_timeout": 0}
    for name, low in (bounds | {"max_sessions": 1}).items():
        value = getattr(options, name)
        if value is not None and not low <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; give a number of at least {low}")


def ledger_file(options: Namespace) -> Path:
    path: Path = options.ledger
    return path if path.suffix == ".sqlite" else path / LEDGER_FILE


def _made_folder(path: Path) -> Path:
    """Make the folder private to its owner: it holds prompts, answers and key hashes."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--ledger: the folder {path} cannot be made: {error.strerror}") from None
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class Standalone:
    """A gateway that listens."""

    gateway: Gateway
    base_url: str
    backend: Backend  # of the engine, as the engine reports it
    model_name: str
    tool_format: str  # of the calls in answers, or what happens to them
    num_orphans: int  # sessions that the process before it left open
    num_waiting: int  # rollouts that wait to be trained


@asynccontextmanager
async def open_standalone(options: Namespace, admin_key: str) -> AsyncGenerator[Standalone]:
    """Connect to the engine, open the ledger and listen; close all on exit. Raises ConfigError if any fails."""
    bound = None
    if options.max_staleness is not None:
        bound = Bound(batch_answers=options.batch_answers, max_staleness=options.max_staleness)
    async with AsyncExitStack() as stack:
        reading = TranscriptSettings(
            tokenizer=str(options.tokenizer.absolute()),
            history_thinking=HistoryThinking(options.history_thinking),
            tool_format=options.tool_format and ToolFormat(options.tool_format),
            reasoning_format=options.reasoning_format and ReasoningFormat(options.reasoning_format),
        )
        renderer = await asyncio.to_thread(reading.load_renderer)
        await asyncio.to_thread(renderer.vision)  # which takes seconds
        try:
            address = await (await EngineAddress.of_server(options.engine)).where_others_push()
            engine = address.connect()
            stack.push_async_callback(engine.aclose)
            info = await engine.info()
        except EngineError as error:
            raise ConfigError(f"--engine {options.engine}: {error}") from error
        try:
            ledger = await Ledger.open(ledger_file(options), create=True)
            stack.push_async_callback(ledger.aclose)
            incarnation = await ledger.begin_incarnation(None)
            stack.push_async_callback(ledger.set_note, STATUS_NOTE, "interrupted")  # its rollouts wait for the next one
            await ledger.set_note(TRANSCRIPT_NOTE, reading.note())
            consumer = await Consumer.open(ledger, bound=bound, group_wait_s=options.group_wait)
        except LedgerError as error:
            raise ConfigError(f"--ledger: {error}") from error
        model_name = options.model or Path(info.model_path).name
        gateway = Gateway(
            sampler=engine,
            renderer=renderer,
            journal=consumer,
            model_name=model_name,
            model_aliases=options.model_alias,
            admin_key=admin_key,
            max_context_tokens=info.max_context_tokens,
            vocab_size=info.vocab_size,
            has_grammar=info.has_grammar,
            limits=Limits(
                max_sessions=options.max_sessions,
                session_timeout_s=options.session_timeout or None,
                image_sources=tuple(options.image_source),
            ),
            allowed_hosts=options.allowed_host or (),
            archive=ledger,
            consumer=consumer,
            images=ImageFolder(ledger_file(options).parent / IMAGES) if options.images else None,
        )
        served = await gateway.serve(options.host, options.port)
        stack.push_async_callback(served.aclose)
        yield Standalone(
            gateway=gateway,
            base_url=served.base_url,
            backend=address.backend,
            model_name=model_name,
            tool_format=renderer.answer_format.tool_format if renderer.reads_calls else "none: tools are refused",
            num_orphans=incarnation.num_orphans,
            num_waiting=consumer.state().num_finished,
        )


async def _serve(options: Namespace, admin_key: AdminKey) -> None:
    stopped = asyncio.Event()

    def stop() -> None:
        if stopped.is_set():
            os._exit(INTERRUPTED_CODE)  # at once: what was answered is in the ledger
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    async with open_standalone(options, admin_key.key) as standalone:
        collect_garbage_rarely()
        admin_key.keep()  # only now, so that a failed start leaves no key behind
        print(_welcome(standalone, options, admin_key), flush=True)
        await stopped.wait()
        print("closing: calls in flight may finish; Ctrl-C again ends at once", file=sys.stderr, flush=True)
        num_ended = await standalone.gateway.drain(options.drain_timeout)
    print(f"gateway closed; {num_ended} open sessions ended as cancelled", flush=True)


def _welcome(standalone: Standalone, options: Namespace, admin_key: AdminKey) -> str:
    """Return the lines that tell a user how to go on. The first says that the gateway serves, and where."""
    url = standalone.base_url
    key_file = f"rollout.gateway_admin_key_file={admin_key.file}" if admin_key.file else f"(key: set {KEY_VARIABLE})"
    return "\n".join(
        (
            f"gateway ready at {url}",
            f"model {standalone.model_name!r} on the engine at {options.engine}, which is {standalone.backend}",
            f"tool format {standalone.tool_format}",
            f"admin key {admin_key.source}",
            f"ledger {ledger_file(options)}: {standalone.num_waiting} rollouts wait to be trained, "
            f"{standalone.num_orphans} were cut off and are orphans",
            f"next: POST {url}/rl/start_session with the admin key and a task_id returns an agent's base_url and key;",
            f"to train: python -m areal_agent.train --config FILE rollout.gateway_url={url} "
            f"engine.url={options.engine} {key_file}",
            "  (its FILE needs neither workflow nor tasks: you run the agents, environments and rewards)",
        )
    )


if __name__ == "__main__":
    run_command(main)
