"""A stand-alone gateway: it has a ledger of its own, and its engine and trainer run elsewhere.

::

    agents ── HTTP ──▶ gateway ── HTTP ──▶ engine
    trainer ── lease ──▶  └──▶ ledger

`open_standalone` builds and closes the parts. `AdminKey` finds or makes the admin key; messages say where a key is,
never the key itself.
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

VARIABLE = "AREAL_AGENT_ADMIN_KEY"
FILE_NAME = "admin_key"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The settings of a stand-alone gateway."""

    engine_url: str
    tokenizer: Path
    history_thinking: HistoryThinking
    tool_format: ToolFormat | None  # None: as in the chat template
    reasoning_format: ReasoningFormat | None
    ledger: Path  # the file
    host: str
    port: int
    admin_key: str
    model_name: str | None  # None: the name of the engine's model folder
    bound: Bound | None
    group_wait_s: float
    limits: Limits
    allowed_hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standalone:
    """A gateway that listens. `num_orphans` sessions were left open by the process before it."""

    gateway: Gateway
    base_url: str
    backend: Backend  # of the engine, as the engine reports it
    model_name: str
    num_orphans: int
    num_waiting: int


@asynccontextmanager
async def open_standalone(place: Place) -> AsyncGenerator[Standalone]:
    """Connect to the engine, open the ledger and listen; close all on exit. Raises ConfigError if any fails."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminKey:
    """An admin key and where to find it."""

    key: str = field(repr=False)
    source: str
    file: Path | None = None  # the file that holds it
    is_new: bool = False  # `keep` has yet to write the file

    @classmethod
    def obtain(
        cls, *, given: str | None, file: Path | None, environment: Mapping[str, str], host: str, folder: Path
    ) -> Self:
        """Take the key from the command line, a file, the environment or `folder`; else make one to keep there.

        A gateway that other machines can reach needs a key chosen by its owner. Raises ConfigError.
        """
        if given is not None and file is not None:
            raise ConfigError("--admin-key and --admin-key-file both give a key; use one of them")
        if given is not None:
            return cls(key=_checked(given, "--admin-key"), source="as given on the command line")
        if file is not None:
            return cls(key=_read(file), source=f"in {file}", file=file)
        if VARIABLE in environment:
            return cls(key=_checked(environment[VARIABLE], VARIABLE), source=f"in the environment, as {VARIABLE}")
        if host not in LOOPBACK_NAMES:
            raise ConfigError(
                f"--host {host} lets other machines connect, and there is no admin key: give --admin-key-file or set "
                f"{VARIABLE}, or listen on 127.0.0.1"
            )
        own, source = folder / FILE_NAME, f"in {folder / FILE_NAME} (mode 0600)"
        if own.exists():
            return cls(key=_read(own), source=source, file=own)
        return cls(key=new_key(), source=source, file=own, is_new=True)

    def keep(self) -> None:
        """Write a newly made key to its file with mode 0600. Call it once the gateway serves. Raises ConfigError."""
        if self.file is None or not self.is_new:
            return
        try:
            create_private(self.file, self.key)
        except OSError as error:
            raise ConfigError(f"the admin key file {self.file} cannot be written: {error.strerror}") from None


def find_admin_key(file: str | Path | None, environment: Mapping[str, str]) -> str:
    """Return the key of a gateway elsewhere, from a file or else the environment. Raises ConfigError."""
    if file is not None:
        if not Path(file).exists():
            raise ConfigError(
                f"rollout.gateway_admin_key_file: there is no {file}; start the gateway first, from this folder, or "
                "give the file that it printed when it started"
            )
        return _read(Path(file))
    if VARIABLE not in environment:
        raise ConfigError(
            f"the gateway's admin key is missing; set {VARIABLE}, or rollout.gateway_admin_key_file to the file that "
            "the gateway printed when it started"
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
    """Check that a key can be sent in an HTTP header."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} holds no usable key: a key is one word of printable ASCII characters")
    return key
