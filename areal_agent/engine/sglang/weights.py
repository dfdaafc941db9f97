"""The weights of one SGLang server: pushed, proved, loaded while it is paused, and put back where that fails.

    push     begin ──▶ send: a folder is written and proved ──▶ commit: the server loads it, and says so
    failed   SGLang answers 400 although the weights have changed: the folder before is loaded again. Where that fails,
             too, nobody knows what serves, and nothing may be sampled until a commit succeeds

Knows the server through HTTP alone, and nothing of requests.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from areal_agent.engine import wire
from areal_agent.engine.fields import WireError
from areal_agent.engine.sglang.info import Served, decode_served
from areal_agent.engine.sglang.served_model import ServedModel
from areal_agent.engine.sglang.weight_folders import WeightFolders
from areal_agent.engine.transport import Transport
from areal_agent.errors import EngineError, EngineUnreachable, PushConflict, WeightUpdateError
from areal_agent.types import DiskWeights, SharedMemoryWeights, WeightVersion


@dataclass(kw_only=True, slots=True)
class _Push:
    """The push that is open, and what it has sent."""

    id: str
    folder: Path | None = None


class ServerWeights:
    """What one server serves, and what it is to serve next. `serving` is what it was found with."""

    def __init__(self, transport: Transport, folders: WeightFolders, model: ServedModel, serving: Served) -> None:
        self.serving = serving
        self._transport = transport
        self._folders = folders
        self._model = model
        self._push: _Push | None = None
        self._broken: str | None = None  # why nobody knows what serves

    def require_known(self) -> None:
        """Raises EngineUnreachable when nobody knows which weights serve."""
        if self._broken is not None:
            raise EngineUnreachable(
                f"nobody knows which weights {self._transport.base_url} serves, so it may not sample: {self._broken}"
            )

    async def begin(self, push_id: str) -> None:
        """Open a push; one that is open is forgotten."""
        await self.forget_push()
        self._push = _Push(id=push_id)

    async def send(self, push_id: str, weights: SharedMemoryWeights | DiskWeights) -> None:
        """Have the weights in a folder that the server can load. It hears nothing of it."""
        push = self._open_push(push_id)
        try:
            push.folder = await self._folders.take(push_id, weights)
            await asyncio.to_thread(self._model.prove, push.folder)
        except BaseException:
            await self.forget_push()
            raise

    async def commit(self, push_id: str, version: WeightVersion, *, flush_cache: bool) -> None:
        """Let the paused server load what was sent."""
        push = self._open_push(push_id)
        served = self.serving.version
        try:
            if push.folder is None:
                raise WeightUpdateError(f"push {push_id!r} has sent no weights: send them before it is committed")
            if served is not None and version <= served:
                raise WeightUpdateError(f"{self._transport.base_url} serves version {served}: {version} is not later")
            await self._load(Served(folder=push.folder, label=str(version)), flush_cache=flush_cache)
        except BaseException:
            await self.forget_push()
            raise
        self._push = None

    async def abort(self, push_id: str) -> None:
        """Forget a push. One that is not open is no error."""
        if self._push is not None and self._push.id == push_id:
            await self.forget_push()

    async def forget_push(self) -> None:
        """Forget the push that is open, if one is."""
        push, self._push = self._push, None
        if push is not None and push.folder is not None:
            await self._folders.release(push.folder)

    async def load(self, folder: Path, version: WeightVersion) -> None:
        """Let the paused server load a model folder, whatever it has served."""
        await asyncio.to_thread(self._model.prove, folder)
        await self._load(Served(folder=folder, label=str(version)), flush_cache=True)

    async def _load(self, wanted: Served, *, flush_cache: bool) -> None:
        before = self.serving
        try:
            await self._tell(wanted, flush_cache=flush_cache)
        except EngineError as failure:
            await self._undo(failure, before, flush_cache=flush_cache)
            raise WeightUpdateError(f"{failure}; the weights before were loaded again") from failure
        self.serving, self._broken = wanted, None
        await self._folders.release(before.folder)

    async def _undo(self, failure: EngineError, before: Served, *, flush_cache: bool) -> None:
        try:
            await self._tell(before, flush_cache=flush_cache)
        except EngineError as error:
            self._broken = f"{failure}; to load the weights before again failed, too: {error}"
            raise WeightUpdateError(self._broken) from failure

    async def _tell(self, wanted: Served, *, flush_cache: bool) -> None:
        """Let it load a folder under a label. The answer is believed when the label has moved."""
        folder = os.path.abspath(wanted.folder)  # noqa: ASYNC240 (no disk: the server has a working directory of its own)
        body = {"model_path": folder, "weight_version": wanted.label, "flush_cache": flush_cache}
        try:
            await self._transport.post(wire.UPDATE_FROM_DISK, body, refusal=WeightUpdateError)
            served = decode_served(await self._transport.get(wire.MODEL_INFO))
        except WireError as error:
            raise self._transport.unreadable(wire.MODEL_INFO, error) from error
        except asyncio.CancelledError:
            self._broken = f"the load of version {wanted.label} was cut short"
            raise
        if served.label != wanted.label:
            raise WeightUpdateError(
                f"{self._transport.base_url} says that it serves {served.label} after an update to {wanted.label}"
            )

    def _open_push(self, push_id: str) -> _Push:
        if self._push is None or self._push.id != push_id:
            raise PushConflict(f"push {push_id!r} is not open at {self._transport.base_url}; begin one")
        return self._push
