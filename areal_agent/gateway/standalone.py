"""A gateway that stands alone: before an engine that runs elsewhere, over a ledger of its own, for a trainer elsewhere.

::

    agents ── HTTP ──▶ gateway ── HTTP ──▶ engine
    trainer ── lease ──▶  └──▶ ledger

It builds and closes the parts; it knows no command line and no signal.

Where the admin key of a gateway that stands alone comes from. It never says a key, only where it is.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from areal_agent.engine.address import Backend, EngineAddress
from areal_agent.errors import ConfigError, EngineError, LedgerError
from areal_agent.files import create_private
from areal_agent.gateway.app import Gateway
from areal_agent.gateway.auth import LOOPBACK_NAMES, new_key
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.online.consumer import Consumer
from areal_agent.gateway.online.groups import Bound
from areal_agent.ledger.ledger import Ledger
from areal_agent.tokens.formats.answer_format import ReasoningFormat, ToolFormat
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking


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


VARIABLE = "AREAL_AGENT_ADMIN_KEY"
FILE_NAME = "admin_key"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminKey:
    """A key, and where a person finds it."""

    key: str = field(repr=False)
    source: str
    file: Path | None = None  # that holds it
    is_new: bool = False  # the file is yet to be written: `keep`

    @classmethod
    def obtain(
        cls, *, given: str | None, file: Path | None, environment: Mapping[str, str], host: str, folder: Path
    ) -> Self:
        """The key from the command line, a file or the environment; else its own, in `folder` or to be kept there.

        A gateway that is reached from other machines makes none: its key has to be chosen. Raises ConfigError.
        """
        if given is not None and file is not None:
            raise ConfigError("--admin-key and --admin-key-file both name a key; give one of them")
        if given is not None:
            return cls(key=_checked(given, "--admin-key"), source="as given on the command line")
        if file is not None:
            return cls(key=_read(file), source=f"in {file}", file=file)
        if VARIABLE in environment:
            return cls(key=_checked(environment[VARIABLE], VARIABLE), source=f"in the environment, as {VARIABLE}")
        if host not in LOOPBACK_NAMES:
            raise ConfigError(
                f"--host {host} lets other machines in, and there is no admin key: give --admin-key-file or set "
                f"{VARIABLE}, or listen on 127.0.0.1"
            )
        own, source = folder / FILE_NAME, f"in {folder / FILE_NAME} (mode 0600)"
        if own.exists():
            return cls(key=_read(own), source=source, file=own)
        return cls(key=new_key(), source=source, file=own, is_new=True)

    def keep(self) -> None:
        """Write a key that was made into its file, for its owner alone; once the gateway serves. Raises ConfigError."""
        if self.file is None or not self.is_new:
            return
        try:
            create_private(self.file, self.key)
        except OSError as error:
            raise ConfigError(f"the admin key file {self.file} cannot be written: {error.strerror}") from None


def find_admin_key(file: str | Path | None, environment: Mapping[str, str]) -> str:
    """The key of a gateway elsewhere, for a trainer: from a file, else from the environment. Raises ConfigError."""
    if file is not None:
        if not Path(file).exists():
            raise ConfigError(
                f"rollout.gateway_admin_key_file: there is no {file}; start the gateway first, from this folder, or "
                "name the file that it named when it started"
            )
        return _read(Path(file))
    if VARIABLE not in environment:
        raise ConfigError(
            f"the gateway's admin key is missing; set {VARIABLE}, or rollout.gateway_admin_key_file to the file that "
            "the gateway named when it started"
        )
    return _checked(environment[VARIABLE], VARIABLE)


def _read(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the admin key file {path} cannot be read: {cause}") from None
    return _checked(text.strip(), str(path))


def _checked(key: str, where: str) -> str:
    """A key has to pass through an HTTP header."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} holds no usable key: a key is one word of printable ASCII characters")
    return key
