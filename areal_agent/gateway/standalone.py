"""A gateway that stands alone: before an engine that runs elsewhere, over a ledger of its own, for a trainer elsewhere.

::

    agents ── HTTP ──▶ gateway ── HTTP ──▶ engine
    trainer ── lease ──▶  └──▶ ledger

It builds and closes the parts; it knows no command line and no signal.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_agent.engine.address import EngineAddress
from areal_agent.engine.backend import Backend
from areal_agent.errors import ConfigError, EngineError, LedgerError
from areal_agent.gateway.app import Gateway
from areal_agent.gateway.limits import Limits
from areal_agent.gateway.online.bound import Bound
from areal_agent.gateway.online.consumer import Consumer
from areal_agent.ledger.ledger import Ledger
from areal_agent.tokens.answers.detection import ReasoningFormat, ToolFormat
from areal_agent.tokens.keep_thinking import HistoryThinking
from areal_agent.tokens.renderer import Renderer


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the parts are, and how the gateway is to be."""

    engine_url: str
    tokenizer: Path
    history_thinking: HistoryThinking
    tool_format: ToolFormat | None  # None: as the chat template writes them
    reasoning_format: ReasoningFormat | None
    ledger: Path  # the file
    host: str
    port: int
    admin_key: str
    model_name: str | None  # None: as the engine's model folder is called
    bound: Bound | None
    group_wait_s: float
    limits: Limits
    allowed_hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standalone:
    """A gateway that listens. `num_orphans` sessions were left open by the process before."""

    gateway: Gateway
    base_url: str
    backend: Backend  # of the engine, as it says itself
    model_name: str
    num_orphans: int
    num_waiting: int


@asynccontextmanager
async def open_standalone(place: Place) -> AsyncGenerator[Standalone]:
    """Connect, open the ledger, listen; closed on leaving. Raises ConfigError for whatever stands in the way."""
    async with AsyncExitStack() as stack:
        renderer = await asyncio.to_thread(
            Renderer.load,
            place.tokenizer,
            history_thinking=place.history_thinking,
            tool_format=place.tool_format,
            reasoning_format=place.reasoning_format,
        )
        try:
            address = await (await EngineAddress.of_server(place.engine_url)).where_others_push()
            engine = address.connect()
            stack.push_async_callback(engine.aclose)
            info = await engine.info()
        except EngineError as error:
            raise ConfigError(f"--engine {place.engine_url}: {error}") from error
        try:
            ledger = await Ledger.open(place.ledger, create=True)
            stack.push_async_callback(ledger.aclose)
            incarnation = await ledger.begin_incarnation(None)
            consumer = await Consumer.open(ledger, bound=place.bound, group_wait_s=place.group_wait_s)
        except LedgerError as error:
            raise ConfigError(f"--ledger: {error}") from error
        model_name = place.model_name or Path(info.model_path).name
        gateway = Gateway(
            sampler=engine,
            renderer=renderer,
            journal=consumer,
            model_name=model_name,
            admin_key=place.admin_key,
            max_context_tokens=info.max_context_tokens,
            vocab_size=info.vocab_size,
            has_grammar=info.has_grammar,
            limits=place.limits,
            allowed_hosts=place.allowed_hosts,
            archive=ledger,
            consumer=consumer,
        )
        served = await gateway.serve(place.host, place.port)
        stack.push_async_callback(served.aclose)
        yield Standalone(
            gateway=gateway,
            base_url=served.base_url,
            backend=address.backend,
            model_name=model_name,
            num_orphans=incarnation.num_orphans,
            num_waiting=consumer.state().num_finished,
        )
