"""A worker process: `python -m areal_agent.rollout.worker --fd N`. A run starts it; N is its end of a socket pair."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from areal_agent.command import Parser, run_command
from areal_agent.errors import ArealAgentError
from areal_agent.ledger.shard import LedgerShard
from areal_agent.process import collect_garbage_rarely, exit_with_parent, start_logging
from areal_agent.rollout.local import open_local
from areal_agent.rollout.worker.messages import Channel, Ready, Refused, Warned, WorkerSettings, decode_settings, encode
from areal_agent.rollout.worker.server import MeteredSampler, WorkerServer
from areal_agent.rollout.workflow import load_workflow


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m areal_agent.rollout.worker",
        description="A process of a run that runs workflows; `areal_agent.train` starts it.",
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited socket that calls come over")
    arguments = parser.parse_args(None if argv is None else list(argv))
    exit_with_parent()
    start_logging()
    try:
        sock = socket.socket(fileno=arguments.fd)
    except OSError as error:
        parser.error(f"--fd {arguments.fd} is not an open socket ({error.strerror}); only a run starts a worker")
    asyncio.run(_work(sock))
    return 0


async def _work(sock: socket.socket) -> None:
    channel = await Channel.over(sock)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, channel.end)
    try:
        settings = decode_settings(await channel.receive())
        async with AsyncExitStack() as stack:
            try:
                server = await stack.enter_async_context(_open(settings, channel))
            except ArealAgentError as error:
                channel.send(encode(Refused(message=str(error))))
                return
            collect_garbage_rarely()
            channel.send(encode(Ready()))
            await server.serve()
    finally:
        await channel.aclose()


@asynccontextmanager
async def _open(settings: WorkerSettings, channel: Channel) -> AsyncGenerator[WorkerServer]:
    """Set up everything that a worker has, ready for calls."""
    sys.path[:] = settings.sys_path
    workflow = load_workflow(settings.workflow)
    async with AsyncExitStack() as stack:
        shard = await LedgerShard.open(Path(settings.shard), create=True)
        stack.push_async_callback(shard.aclose)
        engine = settings.engine.connect()
        stack.push_async_callback(engine.aclose)
        metered = MeteredSampler(engine)
        rollouts = await stack.enter_async_context(
            open_local(settings.local, workflow, engine=metered, info=await engine.info(), journal=shard)
        )
        _hand_on_warnings(lambda text: channel.send(encode(Warned(message=text))))
        yield WorkerServer(channel, rollouts, metered.busy, engine.follow)


def _hand_on_warnings(send: Callable[[str], None]) -> None:
    """Send warnings, also those of threads, to the main process, where a person sees them."""
    logging.getLogger().addHandler(_HandedOn(asyncio.get_running_loop(), send))


class _HandedOn(logging.Handler):
    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._loop = loop
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().encode(errors="replace").decode()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, text)


if __name__ == "__main__":
    run_command(main)
