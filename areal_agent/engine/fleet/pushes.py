"""Pushes and pauses of a whole fleet: all serving servers take part, and one of them that follows is enough.

    begin ──▶ send ──▶ pause ──▶ commit ──▶ resume
      └─ a server that fails at a step is quarantined; if all fail, the push fails and the old version keeps serving

Participants are fixed at the beginning: no server joins before the end. The version committed last is the one due.

`bring_to` gives a server the weights that are due:

    label right ──────────────────────────────▶ it may serve
    label wrong ──▶ load, or push to it alone ──▶ label read back ──▶ it may serve
                       └─ if it is ahead, a model is loaded as 0:0 before the push, as versions only go up

Weights in shared memory may have been overwritten by newer ones meanwhile: then the push fails its checksum, and the
server gets the newer weights at the next attempt.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.engine.fleet.member import Member, MemberEngine, MemberState, Patience, Roster, Versions, ask_all
from areal_agent.errors import EngineError, EnginesGone, EngineUnreachable, PushConflict, WeightUpdateError
from areal_agent.types import PauseMode, Weights, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """The version that every server has to serve, and its weights: a model's folder, or the push `push_id`."""

    version: WeightVersion
    source: Path | Weights | None  # None: unknown
    push_id: str = ""
    base: Path | None = None  # a model folder that a push may start from; None: the one that a server was started with


async def bring_to(engine: MemberEngine, due: Due, *, is_label_believed: bool = True) -> None:
    """Make the server serve these weights. Raises EngineError if it does not."""
    info = await engine.info()
    served = info.weight_version
    if served == due.version and (is_label_believed or due.source is None) and await engine.health():
        await engine.resume()  # an interrupted push may have left it paused
        return
    match due.source:
        case None:
            raise WeightUpdateError(
                f"{engine.base_url} serves version {served}, but {due.version} is due, and this fleet has no weights "
                "of that; start it with those, or wait for the next push"
            )
        case Path() as model:
            await engine.load(model, due.version)
        case weights:
            if served >= due.version:
                await engine.load(due.base or Path(info.model_path), WeightVersion())
            await _push(engine, due.push_id, weights, due.version)
    await require_version(engine, due.version)
    if not await engine.health():
        raise EngineUnreachable(f"{engine.base_url} does not serve after it was given version {due.version}")


async def require_version(engine: MemberEngine, version: WeightVersion) -> None:
    """Read the label back. Raises WeightUpdateError when it is another."""
    served = (await engine.info()).weight_version
    if served != version:
        raise WeightUpdateError(f"{engine.base_url} reports that it serves {served} after a push of {version}")


async def _push(engine: MemberEngine, push_id: str, weights: Weights, version: WeightVersion) -> None:
    """Push to this server alone. After a failure it stays paused, because it may serve the wrong weights."""
    try:
        await engine.begin_push(push_id)
        await engine.send_push(push_id, weights)
        await engine.pause(PauseMode.RETRACT)
        await engine.commit_push(push_id, version)
        await engine.resume()
    except BaseException:
        with contextlib.suppress(EngineError):
            await engine.abort_push(push_id)
        raise


@dataclass(kw_only=True, slots=True)
class _Push:
    id: str
    weights: Weights | None = None
    is_committed: bool = False


class FleetPushes:
    """The pushes and pauses of a fleet. One push is open at a time."""

    def __init__(self, roster: Roster, versions: Versions, patience: Patience) -> None:
        self.due: Due | None = None
        self.is_loading = False  # servers load weights, and may be silent meanwhile
        self._roster = roster
        self._versions = versions
        self._patience = patience
        self._base: Path | None = None  # the folder that all servers started with
        self._push: _Push | None = None
        self._committing: WeightVersion | None = None
        self._taking_part: list[Member] = []  # the participants of the push, or of a pause without a push
        self._paused: PauseMode | None = None
        self._is_settled = asyncio.Event()
        self._is_settled.set()

    @property
    def served(self) -> tuple[WeightVersion, ...]:
        """The versions that servers may have now."""
        due = None if self.due is None else self.due.version
        return tuple(sorted({version for version in (due, self._committing) if version is not None}))

    @property
    def is_changing(self) -> bool:
        """True during a push or a pause."""
        return not self._is_settled.is_set()

    async def settled(self) -> None:
        """Wait until no push or pause is in progress."""
        await self._is_settled.wait()

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Make all servers load a folder. Raises EngineError when one does not."""
        members = self._roster.members
        with self._loading(members):
            _, failures = await ask_all(members, lambda engine: engine.load(model, version))
        if failures:
            raise next(iter(failures.values()))
        self.begin_with(model, version)

    def begin_with(self, model: Path, version: WeightVersion) -> None:
        """State that all servers serve this folder already."""
        self._base = model
        self.due = Due(version=version, source=model, base=model)
        self._versions.begin(version)
        for member in self._roster.members:
            member.version = version

    async def begin(self, push_id: str) -> None:
        """Open a push and forget one that is open, whose sender must be dead. Raises WeightUpdateError."""
        members = await self._some()
        if self.due is None:  # from now on this fleet decides what is served
            self.due = Due(version=await self._newest(members), source=None)
        self._push, self._taking_part = _Push(id=push_id), members
        self._is_settled.clear()
        await self._tell_all("begin", lambda engine: engine.begin_push(push_id))

    async def send(self, push_id: str, weights: Weights) -> None:
        """Send the weights to all servers; the old version keeps serving."""
        self._open(push_id).weights = weights
        await self._tell_all("send", lambda engine: engine.send_push(push_id, weights))

    async def commit(self, push_id: str, version: WeightVersion) -> None:
        """Make all servers switch to what was sent. It succeeds when one does; the others are quarantined."""
        push = self._open(push_id)
        if push.weights is None:
            raise PushConflict(f"push {push_id!r} has been sent no weights yet; a commit comes after the send")

        is_repeated = self._versions.knows(version)
        self._versions.add(version)  # before the first token of that version arrives
        self._committing = version

        async def commit_at(engine: MemberEngine) -> None:
            await engine.commit_push(push_id, version)
            await require_version(engine, version)

        try:
            with self._loading(self._taking_part):
                await self._tell_all("commit", commit_at)
        except BaseException:
            if not is_repeated:
                self._versions.forget(version)
            raise
        finally:
            self._committing = None
        push.is_committed = True
        self.due = Due(version=version, source=push.weights, push_id=push_id, base=self._base)
        for member in self._present():
            member.version = version
        self._roster.ring()

    async def abort(self, push_id: str) -> None:
        """Forget a push, even one that failed. A push that is not open is no error, nor is a server that is gone."""
        members = self._taking_part if self.is_changing else self._roster.serving
        await ask_all(members, lambda engine: _abort(engine, push_id, self._patience.abort_s))
        if self._push is not None and self._push.id == push_id:
            self._push = None
            self._settle()

    async def pause(self, mode: PauseMode) -> None:
        """Pause all servers."""
        if self._push is None:
            self._taking_part = self._roster.serving
        self._paused = mode
        self._is_settled.clear()
        await self._tell_all("pause", lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """Resume all participants. A server that does not answer is quarantined."""
        _, failures = await ask_all(self._present(), lambda engine: engine.resume())
        for member, error in failures.items():
            self._roster.fall(member, f"it did not resume after a pause: {error}", is_lost=True)
        self._paused = None
        if self._push is None or self._push.is_committed:
            self._push = None
            self._settle()

    # ------------------------------------------------------------------------------------------- internals

    @contextlib.contextmanager
    def _loading(self, members: Sequence[Member]) -> Generator[None]:
        self._set_loading(members, True)
        try:
            yield
        finally:
            self._set_loading(members, False)

    def _set_loading(self, members: Sequence[Member], is_loading: bool) -> None:
        self.is_loading = is_loading
        for member in members:
            member.is_loading = is_loading
        self._roster.ring()

    def _settle(self) -> None:
        if self._push is None and self._paused is None:
            self._taking_part = []
            self._is_settled.set()

    def _open(self, push_id: str) -> _Push:
        if self._push is None or self._push.id != push_id:
            raise PushConflict(f"push {push_id!r} is not open in this fleet; begin one")
        return self._push

    async def _some(self) -> list[Member]:
        try:
            return await self._roster.wait_for_some(self._patience.wait_s)
        except EngineUnreachable as error:
            raise WeightUpdateError(str(error)) from error

    async def _newest(self, members: Sequence[Member]) -> WeightVersion:
        infos, failures = await ask_all(members, lambda engine: engine.info())
        for member, error in failures.items():
            self._roster.fall(member, str(error))
        if not infos:
            raise WeightUpdateError("no server reports which version it serves; see their logs")
        return max(info.weight_version for info in infos.values())

    def _present(self) -> list[Member]:
        """Return the participants that still serve; without a push or a pause, all serving servers."""
        members = self._taking_part if self.is_changing else self._roster.serving
        return [member for member in members if member.state is MemberState.SERVING]

    async def _tell_all(self, what: str, call: Callable[[MemberEngine], Coroutine[Any, Any, None]]) -> None:
        """Call all participants and quarantine those that fail.

        If all fail, raises WeightUpdateError, and the old version keeps serving where a server answers; EnginesGone if
        none answers any more.
        """
        members = self._present()
        _, failures = await ask_all(members, call)
        has_failed = len(failures) == len(members)
        for member, error in failures.items():
            if not has_failed or isinstance(error, EngineUnreachable) or not await member.engine.health():
                self._roster.fall(member, f"{what} failed: {error}", is_lost=True)
        if has_failed:
            raise _failure_of_all(what, failures)


async def _abort(engine: MemberEngine, push_id: str, timeout_s: float) -> None:
    """Abort a push at one server. A server that misses it forgets the push when the next one begins."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await engine.abort_push(push_id)


def _failure_of_all(what: str, failures: Mapping[Member, EngineError]) -> WeightUpdateError:
    kind = WeightUpdateError
    if all(isinstance(error, EngineUnreachable) for error in failures.values()):
        kind = EnginesGone
    elif any(isinstance(error, PushConflict) for error in failures.values()):
        kind = PushConflict
    causes = "; ".join(f"{member.url}: {error}" for member, error in failures.items())
    return kind(f"{what} failed at every server: {causes or 'no participant is left'}")
