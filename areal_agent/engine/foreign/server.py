"""`ForeignServer`: what the client and the weights of a server need from its kind, with what all kinds share."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from areal_agent.engine.pushes import size_of_folder
from areal_agent.engine.transport import AnswerReader, Transport
from areal_agent.engine.wire.control import EngineStats
from areal_agent.engine.wire.fields import UNLABELLED, as_object
from areal_agent.errors import EngineError, WeightUpdateError
from areal_agent.types import GenerateRequest, JsonObject, PauseMode, WeightVersion

FIRST = str(WeightVersion())


def label_first(fields: JsonObject, name: str = "version") -> JsonObject:
    """Label weights that nobody has labelled as the first version.

    Before the first push of a trainer elsewhere these are what serves. If this process pushes, it labels every server's
    weights before the server samples, so an unlabelled token is an error and this is not used.
    """
    return {**fields, name: FIRST} if fields.get(name) == UNLABELLED else fields


def label_spans(spans: Sequence[Any]) -> list[JsonObject]:
    """Label the version spans of an answer in the same way.

    >>> label_spans([{"version": "default", "start": 0, "end": 2}, {"version": "1:0", "start": 2, "end": 3}])
    [{'version': '0:0', 'start': 0, 'end': 2}, {'version': '1:0', 'start': 2, 'end': 3}]
    """
    return [label_first(as_object(span, "a span of weight_versions")) for span in spans]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Weights of a push that the server's processes hold in memory besides the serving ones."""

    push_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The current weights of a server, and its label for them."""

    source: Path | Held | None
    """None: somebody else loaded them, and this server does not say from where."""
    label: str

    @property
    def version(self) -> WeightVersion | None:
        """The version that the label names; None if it is not one of ours."""
        try:
            return WeightVersion.parse(self.label)
        except ValueError:
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """A server's report about itself."""

    model: Path  # the model that it was started with
    served: Served
    max_context_tokens: int
    has_grammar: bool
    applies_adapters: bool = False  # True: every request names them


class ForeignServer(ABC):
    """One server of some kind. Implementations: `sglang.server.SglangServer`, `vllm.server.VllmServer`.

    Each call raises EngineUnreachable if the server does not answer, or its answer cannot be read. The owner of this
    object closes `transport`.
    """

    kind: ClassVar[str]  # the name of the server software
    launcher: ClassVar[Path]
    generate_path: ClassVar[str]

    def __init__(self, base_url: str, *, takes_unlabelled: bool = False) -> None:
        """If `takes_unlabelled`, weights that nobody has labelled count as the first version."""
        self.transport = Transport(base_url, keeps_connections=False)  # uvicorn closes them after 5 s
        self.takes_unlabelled = takes_unlabelled

    # ------------------------------------------------------------------------------------------- requests

    @abstractmethod
    def encode(self, request: GenerateRequest, rid: str, label: str) -> dict[str, Any]:
        """Return the body of a streamed request with the id `rid`. `label` is that of the serving weights."""

    @abstractmethod
    def reader(self, request: GenerateRequest) -> AnswerReader:
        """Return a reader for the events of the request's answer."""

    @abstractmethod
    async def abort(self, rid: str) -> None:
        """Make the server end a request that has begun."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. With `wait`, this client's requests have ended before."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue sampling."""

    # -------------------------------------------------------------------------------------------- weights

    async def load(self, source: Path | Held, label: str, *, flush_cache: bool) -> None:
        """Make the paused server load weights under a label. Raises EngineError unless it confirms the label.

        Weights that it holds are lost when its processes end. With `flush_cache`, the keys and values of all requests
        are computed again.
        """
        if isinstance(source, Held):
            await self.load_received(source.push_id, label, flush_cache=flush_cache)
        else:
            path = os.path.abspath(source)  # noqa: ASYNC240 (no disk: the server has a working directory of its own)
            num_bytes = await asyncio.to_thread(size_of_folder, source)
            await self.load_folder(path, label, flush_cache=flush_cache, num_bytes=num_bytes)
        served = await self.label()
        if served != label:
            raise WeightUpdateError(
                f"{self.transport.base_url} reports that it serves {served} after an update to {label}"
            )

    @abstractmethod
    async def load_folder(self, path: str, label: str, *, flush_cache: bool, num_bytes: int) -> None: ...

    @abstractmethod
    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None: ...

    @abstractmethod
    async def label(self) -> str:
        """Return the server's label of the weights that serve."""

    @abstractmethod
    async def ask(self, method: str, arguments: Sequence[str]) -> Sequence[str]:
        """Call a method of ours in the server's processes and return the answers. Raises EngineError if one fails."""

    async def call(self, path: str, body: dict[str, Any], read: Callable[[object], Any], num_bytes: int = 0) -> Any:
        """Ask for something that only our launcher adds to the server; return what `read` finds in the answer."""
        try:
            answer = await self.transport.post(path, body, refusal=WeightUpdateError, num_bytes=num_bytes)
        except EngineError as error:
            raise WeightUpdateError(f"{error}; see its log. Was it started by {self.launcher}?") from error
        return self.transport.decoded(read, path, answer)

    # --------------------------------------------------------------------------------------------- status

    @abstractmethod
    async def state(self) -> ServerState: ...

    @abstractmethod
    async def stats(self, version: WeightVersion) -> EngineStats:
        """Return the load of the server, which serves this version."""

    @abstractmethod
    async def probe(self, timeout_s: float) -> None:
        """Ask something that only a live scheduler answers, paused or not. Raises EngineError."""
