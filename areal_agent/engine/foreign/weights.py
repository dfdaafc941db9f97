"""The weights of one server: pushed, proved, loaded while it is paused, and put back where that fails.

    push     begin ──▶ send: a folder is written and proved; or the server's processes receive the weights from the
             trainer, prove them and hold them ──▶ commit: the server loads that, and says so
    failed   a server may answer with a failure although its weights have changed: those before are loaded again.
             Where that fails, too, or nobody here knows where those before are, nobody knows what serves, and nothing
             may be sampled until a commit succeeds

`Loader` and `Receiver` are what the server itself does.

What has to be known of the model behind a server, and what servers do not tell: read from the model's folder.

SGLang dies of a token id outside the vocabulary, and servers load weights of any shape: both are checked on this side.

Weights that nobody has labelled: those that a server of SGLang or vLLM was started with. Knows no server.

Before the first push of a trainer elsewhere they are what serves, and count as the first version, 0:0. Where this
process pushes they are a stranger's: it gives every server a label before it samples.

Lets the processes of a server take weights from the trainer, while they sample. Knows neither servers nor pushes.

A process receives in a thread of its own (reception.py): a call that lasted as long would hold up the requests. So it
is asked again and again how that goes, seldomer each time.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import orjson

from areal_agent.engine.foreign.weight_folders import WeightFolders, is_adapter, prove_adapter, prove_fits, read_shapes
from areal_agent.engine.wire.fields import WireError, as_integer, as_object, decode_json
from areal_agent.engine.wire.weights import encode_distributed
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, PushConflict, WeightUpdateError
from areal_agent.types import DistributedWeights, JsonObject, TensorEntry, Weights, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The ids that it knows, and the names and shapes of its weights."""

    folder: Path
    vocab_size: int
    is_tied: bool  # its head is its embedding
    shapes: Mapping[str, tuple[int, ...]]
    has_adapters: bool = False  # the server applies some as it samples: merged weights would be so twice

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a Hugging Face folder. Raises EngineRejected when it is none, or on another machine."""
        try:
            fields = as_object(decode_json((folder / "config.json").read_bytes()), "config.json")
            vocab_size = as_integer(fields.get("vocab_size"), "vocab_size")
            shapes = read_shapes(folder)
        except (OSError, WireError, EngineError) as error:
            raise EngineRejected(
                f"the server says that it serves {str(folder)!r}, which cannot be read here: {error}; start it "
                "with the path of a folder that this machine sees, too"
            ) from error
        is_tied = fields.get("tie_word_embeddings") is True
        return cls(folder=folder, vocab_size=vocab_size, is_tied=is_tied, shapes=shapes)

    def prove(self, weights: Path) -> None:
        """Raises WeightUpdateError unless the weights in this folder fit, all; where it applies adapters, these."""
        if is_adapter(weights):
            if not self.has_adapters:
                raise WeightUpdateError(
                    f"{str(weights)!r} has adapters, and the server was started without any; set trainer.lora.push to "
                    "'merged'"
                )
            prove_adapter(weights, self.shapes)
        else:
            self._require_plain()
            prove_fits(read_shapes(weights), self.shapes, is_tied=self.is_tied, where=f"in {str(weights)!r}")

    def prove_entries(self, entries: Sequence[TensorEntry]) -> None:
        """The same of weights that are not here, and of a whole model."""
        self._require_plain()
        shapes = {entry.name: entry.shape for entry in entries}
        prove_fits(shapes, self.shapes, is_tied=self.is_tied, where="that were published")

    def _require_plain(self) -> None:
        if self.has_adapters:
            raise WeightUpdateError(
                "the server applies adapters to its model, and would to a whole one that has them in it; push adapters"
            )


UNLABELLED = "default"
"""What both say."""

FIRST = str(WeightVersion())


def label_spans(spans: Sequence[Any]) -> list[JsonObject]:
    """Of an answer, as the server tells them.

    >>> label_spans([{"version": "default", "start": 0, "end": 2}, {"version": "1:0", "start": 2, "end": 3}])
    [{'version': '0:0', 'start': 0, 'end': 2}, {'version': '1:0', 'start': 2, 'end': 3}]
    """
    return [_label(as_object(span, "a span of weight_versions"), "version") for span in spans]


def label_meta(meta: JsonObject) -> JsonObject:
    """Of SGLang's `meta_info`: the label of the moment, and the spans."""
    told = _label(meta, "weight_version")
    spans = told.get("weight_versions")
    return {**told, "weight_versions": label_spans(spans)} if isinstance(spans, list) else told


def _label(fields: JsonObject, name: str) -> JsonObject:
    return {**fields, name: FIRST} if fields.get(name) == UNLABELLED else fields


FIRST_LOOK_S = 0.02
LAST_LOOK_S = 0.5


class Ask(Protocol):
    """What each process of a server answers to a method of ours. Raises EngineError where one has none of it."""

    async def __call__(self, method: str, arguments: Sequence[str]) -> Sequence[str]: ...


async def receive(ask: Ask, push_id: str, weights: DistributedWeights, *, beside: str | None) -> None:
    """Let all processes receive, prove and hold these. Raises EngineError when one does not.

    Of what they held before they keep what came in the push `beside`.
    """
    told = {**encode_distributed(weights), "group": secrets.token_hex(8)}
    await ask("receive_weights", [push_id, orjson.dumps(told).decode(), beside or ""])
    look_s = FIRST_LOOK_S
    while unproved := [state for state in await ask("received", [push_id]) if state != "proved"]:
        if failed := [state for state in unproved if state != "receiving"]:
            raise WeightUpdateError(f"the server did not take the weights: {failed[0]}")
        await asyncio.sleep(look_s)
        look_s = min(2 * look_s, LAST_LOOK_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Weights that the server's own processes keep beside those that serve, since this push."""

    push_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The weights that a server has now, and how it calls them."""

    source: Path | Held | None
    """None: they were loaded by somebody else, and this server does not tell from where."""
    label: str

    @property
    def version(self) -> WeightVersion | None:
        """None when the label is none of ours."""
        try:
            return WeightVersion.parse(self.label)
        except ValueError:
            return None


class Loader(Protocol):
    """Lets one server load weights."""

    async def load(self, folder: Path, label: str, *, flush_cache: bool) -> None:
        """Let the paused server load a folder under a label. Raises EngineError unless it says that it serves that."""
        ...


class Receiver(Protocol):
    """The processes of one server, as far as they take weights from the trainer. What they hold dies with them."""

    async def ask(self, method: str, arguments: Sequence[str]) -> Sequence[str]:
        """Return what each process answers to a method that it was started with. Raises EngineError where one fails."""
        ...

    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None:
        """Let the paused server load what they hold. Raises EngineError unless it says that it serves that."""
        ...


@dataclass(kw_only=True, slots=True)
class _Push:
    """The push that is open, and what it has sent."""

    id: str
    source: Path | Held | None = None


class ServerWeights:
    """What one server serves, and what it is to serve next. `serving` is what it was found with."""

    def __init__(
        self,
        loader: Loader,
        receiver: Receiver,
        folders: WeightFolders,
        model: ServedModel,
        serving: Served,
        *,
        base_url: str,
    ) -> None:
        self.serving = serving
        self._base_url = base_url
        self._loader = loader
        self._receiver = receiver
        self._folders = folders
        self._model = model
        self._push: _Push | None = None
        self._broken: str | None = None  # why nobody knows what serves
        self.epoch = 0  # odd while a load is under way

    def require_known(self) -> None:
        """Raises EngineUnreachable when nobody knows which weights serve."""
        if self._broken is not None:
            raise EngineUnreachable(
                f"nobody knows which weights {self._base_url} serves, so it may not sample: {self._broken}"
            )

    async def found(self, served: Served, epoch: int) -> None:
        """The server was asked in this epoch, and said that it serves this. Not believed where a load came between.

        Another label is that of somebody else's push, or of a server that was started again.
        """
        if epoch == self.epoch and epoch % 2 == 0 and served.label != self.serving.label:
            before, self.serving, self._broken = self.serving, served, None
            await self._let_go_of(before.source)

    async def begin(self, push_id: str) -> None:
        """Open a push; one that is open is forgotten."""
        await self.forget_push()
        self._push = _Push(id=push_id)

    async def send(self, push_id: str, weights: Weights) -> None:
        """Have the weights where the server can load them: in a folder, or in its own processes."""
        push = self._open_push(push_id)
        try:
            if isinstance(weights, DistributedWeights):
                await self._receive(push, weights)
            else:
                push.source = folder = await self._folders.take(push_id, weights)
                await asyncio.to_thread(self._model.prove, folder)
        except BaseException:
            await self.forget_push()
            raise

    async def commit(self, push_id: str, version: WeightVersion, *, flush_cache: bool) -> None:
        """Let the paused server load what was sent."""
        push, served = self._open_push(push_id), self.serving.version
        self._push = None
        try:
            if push.source is None:
                raise WeightUpdateError(f"push {push_id!r} has sent no weights: send them before it is committed")
            if self._broken is None and served is not None and version <= served:
                raise WeightUpdateError(f"{self._base_url} serves version {served}: {version} is not later")
            await self._load(push.source, str(version), flush_cache=flush_cache)
        except BaseException:
            if self.serving.source is not push.source:  # it may serve already, and this was cancelled after that
                await self._let_go_of(push.source)
            raise

    async def abort(self, push_id: str) -> None:
        """Forget a push. One that is not open is no error."""
        if self._push is not None and self._push.id == push_id:
            await self.forget_push()

    async def forget_push(self) -> None:
        """Forget the push that is open, if one is."""
        push, self._push = self._push, None
        if push is not None:
            await self._let_go_of(push.source)

    async def aclose(self) -> None:
        """Let go of all folders: nothing will be put back."""
        await self.forget_push()
        await self._let_go_of(self.serving.source)

    async def load(self, folder: Path, version: WeightVersion) -> None:
        """Let the paused server load a model folder, whatever it has served."""
        await asyncio.to_thread(self._model.prove, folder)
        await self._load(folder, str(version), flush_cache=True)

    async def _receive(self, push: _Push, weights: DistributedWeights) -> None:
        self._model.prove_entries(weights.entries)
        serving = self.serving.source
        beside = serving.push_id if isinstance(serving, Held) else None
        await receive(self._receiver.ask, push.id, weights, beside=beside)
        push.source = Held(push_id=push.id)

    async def _load(self, source: Path | Held, label: str, *, flush_cache: bool) -> None:
        before = self.serving
        self.epoch += 1
        try:
            await self._tell(source, label, flush_cache=flush_cache)
            self.serving, self._broken = Served(source=source, label=label), None
        except EngineError as failure:
            await self._undo(failure, before, flush_cache=flush_cache)
            raise WeightUpdateError(f"{failure}; the weights before were loaded again") from failure
        finally:
            self.epoch += 1
        await self._let_go_of(before.source)

    async def _let_go_of(self, source: Path | Held | None) -> None:
        if isinstance(source, Path):
            await self._folders.release(source)

    async def _undo(self, failure: EngineError, before: Served, *, flush_cache: bool) -> None:
        if before.source is None:
            self._broken = f"{failure}; where the weights before came from is not known here"
            raise WeightUpdateError(self._broken) from failure
        try:
            await self._tell(before.source, before.label, flush_cache=flush_cache)
        except EngineError as error:
            self._broken = f"{failure}; to load the weights before again failed, too: {error}"
            raise WeightUpdateError(self._broken) from failure

    async def _tell(self, source: Path | Held, label: str, *, flush_cache: bool) -> None:
        try:
            if isinstance(source, Path):
                await self._loader.load(source, label, flush_cache=flush_cache)
            else:
                await self._receiver.load_received(source.push_id, label, flush_cache=flush_cache)
        except asyncio.CancelledError:
            self._broken = f"the load of version {label} was cut short"
            raise

    def _open_push(self, push_id: str) -> _Push:
        if self._push is None or self._push.id != push_id:
            raise PushConflict(f"push {push_id!r} is not open at {self._base_url}; begin one")
        return self._push
