"""One foreign server: what its kind provides (`ForeignServer`), and the weights that it serves (`ServerWeights`).

Weights are pushed, verified, loaded while the server is paused, and put back after a failure:

push     begin ──▶ send: a folder is written and verified; or the server's processes receive the weights from the
         trainer, verify them and hold them ──▶ commit: the server loads them, and confirms it
failed   a server may report a failure although its weights have changed, so the previous ones are loaded again.
         If that fails, or their source is unknown, it is unknown which weights serve, and the server may not
         sample until a commit succeeds
"""

import asyncio
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import orjson

from areal_agent.engine.foreign.weight_folders import (
    TIED_HEAD,
    WeightFolders,
    is_adapter,
    prove_adapter,
    prove_fits,
    read_shapes,
)
from areal_agent.engine.pushes import size_of_folder
from areal_agent.engine.transport import AnswerReader, Transport
from areal_agent.engine.wire.control import EngineStats
from areal_agent.engine.wire.fields import UNLABELLED, WireError, as_integer, as_object, decode_json
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, PushConflict, WeightUpdateError
from areal_agent.types import (
    DeviceWeights,
    DistributedWeights,
    GenerateRequest,
    JsonObject,
    PauseMode,
    TensorEntry,
    Weights,
    WeightVersion,
)


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

    def __init__(self, base_url: str, *, key: str | None = None, takes_unlabelled: bool = False) -> None:
        """If `takes_unlabelled`, weights that nobody has labelled count as the first version."""
        self.transport = Transport(base_url, key=key, keeps_connections=False)  # uvicorn closes them after 5 s
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model behind a server, read from its folder because servers do not report it.

    SGLang dies of a token id outside the vocabulary, and servers load weights of any shape: both are checked here.
    """

    folder: Path
    vocab_size: int
    is_tied: bool  # its head is its embedding
    shapes: Mapping[str, tuple[int, ...]]
    takes_images: bool = False
    has_adapters: bool = False  # the server applies adapters as it samples, so merged weights would contain them twice

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a Hugging Face folder. Raises EngineRejected if it is not one, or is on another machine."""
        try:
            fields = as_object(decode_json((folder / "config.json").read_bytes()), "config.json")
            takes_images = "vision_config" in fields
            if "text_config" in fields:  # of a model that takes images, too
                fields = {**as_object(fields["text_config"], "text_config"), **fields}
            vocab_size = as_integer(fields.get("vocab_size"), "vocab_size")
            shapes = read_shapes(folder)
        except (OSError, WireError, EngineError) as error:
            raise EngineRejected(
                f"the server reports that it serves {str(folder)!r}, which cannot be read here: {error}; start it "
                "with the path of a folder that this machine can read, too"
            ) from error
        is_tied = fields.get("tie_word_embeddings", TIED_HEAD not in shapes) is True
        return cls(folder=folder, vocab_size=vocab_size, is_tied=is_tied, shapes=shapes, takes_images=takes_images)

    def prove(self, weights: Path) -> None:
        """Raise WeightUpdateError unless all weights in this folder fit. A server with adapters only takes adapters."""
        if is_adapter(weights):
            if not self.has_adapters:
                raise WeightUpdateError(
                    f"{str(weights)!r} has adapters, but the server was started without any; set trainer.lora.push to "
                    "'merged'"
                )
            prove_adapter(weights, self.shapes)
        else:
            self._require_plain()
            prove_fits(read_shapes(weights), self.shapes, is_tied=self.is_tied, where=f"in {str(weights)!r}")

    def prove_entries(self, entries: Sequence[TensorEntry]) -> None:
        """Raise WeightUpdateError unless these weights of a whole model, which are not on this machine's disk, fit."""
        self._require_plain()
        shapes = {entry.name: entry.shape for entry in entries}
        prove_fits(shapes, self.shapes, is_tied=self.is_tied, where="that were published")

    def _require_plain(self) -> None:
        if self.has_adapters:
            raise WeightUpdateError(
                "the server applies adapters, and would apply them a second time to merged weights; push adapters"
            )


FIRST_LOOK_S = 0.02
LAST_LOOK_S = 0.5


async def receive(server: ForeignServer, push_id: str, weights: DistributedWeights, *, beside: str | None) -> None:
    """Make all processes of a server receive, verify and hold these weights. Raises EngineError when one does not.

    Of the weights held before, they keep those of the push `beside`. A process receives in a thread of its own
    (reception.py), because a long call would hold up its requests; so it is asked for its progress, at growing
    intervals.
    """
    told = {**asdict(weights), "group": secrets.token_hex(8)}
    await server.ask("receive_weights", [push_id, orjson.dumps(told).decode(), beside or ""])
    look_s = FIRST_LOOK_S
    while unproved := [state for state in await server.ask("received", [push_id]) if state != "proved"]:
        if failed := [state for state in unproved if state != "receiving"]:
            raise WeightUpdateError(f"the server did not take the weights: {failed[0]}")
        await asyncio.sleep(look_s)
        look_s = min(2 * look_s, LAST_LOOK_S)


@dataclass(kw_only=True, slots=True)
class _Push:
    """The open push, and what it has sent."""

    id: str
    source: Path | Held | None = None


class ServerWeights:
    """The weights that one server serves (`serving`), and those that it is to serve next."""

    def __init__(self, server: ForeignServer, folders: WeightFolders, model: ServedModel, serving: Served) -> None:
        self.serving = serving
        self._server = server
        self._base_url = server.transport.base_url
        self._folders = folders
        self._model = model
        self._push: _Push | None = None
        self._broken: str | None = None  # why it is unknown which weights serve
        self.epoch = 0  # odd while a load is in progress

    def require_known(self) -> None:
        """Raise EngineUnreachable if it is unknown which weights serve."""
        if self._broken is not None:
            raise EngineUnreachable(
                f"it is unknown which weights {self._base_url} serves, so it may not sample: {self._broken}"
            )

    async def found(self, served: Served, epoch: int) -> None:
        """Note what the server, asked in `epoch`, reported as serving. Ignored if a load has come between.

        A different label comes from somebody else's push, or from a restart of the server.
        """
        if epoch == self.epoch and epoch % 2 == 0 and served.label != self.serving.label:
            before, self.serving, self._broken = self.serving, served, None
            await self._let_go_of(before.source)

    async def begin(self, push_id: str) -> None:
        """Open a push and forget one that is open."""
        await self.forget_push()
        self._push = _Push(id=push_id)

    async def send(self, push_id: str, weights: Weights) -> None:
        """Put the weights where the server can load them: in a folder, or in its own processes."""
        push = self._open_push(push_id)
        try:
            if isinstance(weights, DeviceWeights):
                raise WeightUpdateError(f"{self._base_url} opens no memory of the trainer's GPU; publish a folder")
            if isinstance(weights, DistributedWeights):
                await self._receive(push, weights)
            else:
                push.source = folder = await self._folders.take(push_id, weights)
                await asyncio.to_thread(self._model.prove, folder)
        except BaseException:
            await self.forget_push()
            raise

    async def commit(self, push_id: str, version: WeightVersion, *, flush_cache: bool) -> None:
        """Make the paused server load what was sent."""
        push, served = self._open_push(push_id), self.serving.version
        self._push = None
        try:
            if push.source is None:
                raise WeightUpdateError(f"push {push_id!r} has sent no weights; send them before the commit")
            if self._broken is None and served is not None and version <= served:
                raise WeightUpdateError(
                    f"{self._base_url} serves version {served}, and {version} is not later; push a later one"
                )
            await self._load(push.source, str(version), flush_cache=flush_cache)
        except BaseException:
            if self.serving.source is not push.source:  # it may serve already if this was cancelled after the load
                await self._let_go_of(push.source)
            raise

    async def abort(self, push_id: str) -> None:
        """Forget a push. A push that is not open is no error."""
        if self._push is not None and self._push.id == push_id:
            await self.forget_push()

    async def forget_push(self) -> None:
        """Forget the open push, if there is one."""
        push, self._push = self._push, None
        if push is not None:
            await self._let_go_of(push.source)

    async def aclose(self) -> None:
        """Release all folders; from then on nothing can be put back."""
        await self.forget_push()
        await self._let_go_of(self.serving.source)

    async def load(self, folder: Path, version: WeightVersion) -> None:
        """Make the paused server load a model folder, whatever it has served."""
        await asyncio.to_thread(self._model.prove, folder)
        await self._load(folder, str(version), flush_cache=True)

    async def _receive(self, push: _Push, weights: DistributedWeights) -> None:
        self._model.prove_entries(weights.entries)
        serving = self.serving.source
        beside = serving.push_id if isinstance(serving, Held) else None
        await receive(self._server, push.id, weights, beside=beside)
        push.source = Held(push_id=push.id)

    async def _load(self, source: Path | Held, label: str, *, flush_cache: bool) -> None:
        before = self.serving
        self.epoch += 1
        try:
            await self._tell(source, label, flush_cache=flush_cache)
            self.serving, self._broken = Served(source=source, label=label), None
        except EngineError as failure:
            await self._undo(failure, before, flush_cache=flush_cache)
            raise WeightUpdateError(f"{failure}; the previous weights were loaded again") from failure
        finally:
            self.epoch += 1
        await self._let_go_of(before.source)

    async def _let_go_of(self, source: Path | Held | None) -> None:
        if isinstance(source, Path):
            await self._folders.release(source)

    async def _undo(self, failure: EngineError, before: Served, *, flush_cache: bool) -> None:
        if before.source is None:
            self._broken = f"{failure}; the source of the previous weights is unknown here"
            raise WeightUpdateError(self._broken) from failure
        try:
            await self._tell(before.source, before.label, flush_cache=flush_cache)
        except EngineError as error:
            self._broken = f"{failure}; loading the previous weights again failed, too: {error}"
            raise WeightUpdateError(self._broken) from failure

    async def _tell(self, source: Path | Held, label: str, *, flush_cache: bool) -> None:
        try:
            await self._server.load(source, label, flush_cache=flush_cache)
        except asyncio.CancelledError:
            self._broken = f"the load of version {label} was cancelled"
            raise

    def _open_push(self, push_id: str) -> _Push:
        if self._push is None or self._push.id != push_id:
            raise PushConflict(f"push {push_id!r} is not open at {self._base_url}; begin one")
        return self._push


_FIRST = str(WeightVersion())


def label_first(fields: JsonObject, name: str = "version") -> JsonObject:
    """Label weights that nobody has labelled as the first version.

    Before the first push of a trainer elsewhere these are what serves. If this process pushes, it labels every server's
    weights before the server samples, so an unlabelled token is an error and this is not used.
    """
    return {**fields, name: _FIRST} if fields.get(name) == UNLABELLED else fields


def label_spans(spans: Sequence[Any]) -> list[JsonObject]:
    """Label the version spans of an answer in the same way.

    >>> label_spans([{"version": "default", "start": 0, "end": 2}, {"version": "1:0", "start": 2, "end": 3}])
    [{'version': '0:0', 'start': 0, 'end': 2}, {'version': '1:0', 'start': 2, 'end': 3}]
    """
    return [label_first(as_object(span, "a span of weight_versions")) for span in spans]
