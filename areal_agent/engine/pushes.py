"""The pushes of weights that one engine takes: one at a time, and all of it or none.

    begin ──▶ send ──▶ commit(version)      the old version serves until the commit; then the new one, whole
      │         │         │
      └─────────┴─────────┴──▶ abort, or any failure: the old version goes on, and the next push may begin

`send` takes the weights into memory of the engine's own and proves them, while it samples: what becomes of the sender
or of its files afterwards changes nothing. A sender that has not been heard of for `timeout_s` may be dead: the next
`begin` replaces its push. Until then a second push is refused, and where the sender has paused the engine for its
commit, nobody else lets it go on before that.

Versions only go up. The one that serves may come again, with the weights that serve: a push that is repeated is none.
It knows neither HTTP, nor how weights are stored, nor the model that takes them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from areal_agent.engine_types import Weights
from areal_agent.errors import PushConflict, WeightUpdateError
from areal_agent.types import WeightVersion

PUSH_TIMEOUT_S = 60.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class PushTarget(Protocol[T]):
    """What takes the weights. A `T` is a set of them that has been read and proved."""

    @property
    def version(self) -> WeightVersion:
        """That serves."""
        ...

    async def take(self, weights: Weights) -> T:
        """Read and prove a set of weights, beside whatever goes on. Raises WeightUpdateError."""
        ...

    async def holds(self, taken: T) -> bool:
        """Whether these are the weights that serve."""
        ...

    async def swap(self, taken: T, version: WeightVersion, *, flush_cache: bool) -> None:
        """Serve them from now on."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _Push(Generic[T]):
    id: str
    heard_s: float  # when its sender has called last
    taken: T | None = None
    is_sending: bool = False
    is_pausing: bool = False  # its sender waits for the engine to come to rest
    is_holding: bool = False  # its sender has paused the engine


class Pushes(Generic[T]):
    """The push that is open, if one is. Use it from one event loop."""

    def __init__(self, target: PushTarget[T], *, timeout_s: float = PUSH_TIMEOUT_S) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._open: _Push[T] | None = None
        self._committing: set[_Push[T]] = set()
        self._swapping = asyncio.Lock()  # one change of weights at a time

    def begin(self, push_id: str) -> None:
        """Open a push. Raises PushConflict while another one is open whose sender may be alive."""
        if self._open is not None and self._open.id != push_id:
            self._give_up_if_dead(self._open)
        self._open = _Push(id=push_id, heard_s=time.monotonic())

    async def send(self, push_id: str, weights: Weights) -> None:
        """Take and prove all weights of a push. Raises WeightUpdateError, and the push is no more."""
        push = self._find(push_id)
        if push.is_sending or push.taken is not None:
            raise PushConflict(f"push {push_id!r} has been sent its weights already; commit it, or begin another one")
        push.is_sending = True
        async with self._ended_by_failure(push):
            push.taken = await self._target.take(weights)
        push.is_sending, push.heard_s = False, time.monotonic()

    async def commit(self, push_id: str, version: WeightVersion, *, flush_cache: bool) -> None:
        """Serve what was sent as `version`. Raises WeightUpdateError, and the push is no more."""
        push = self._find(push_id)
        if push.taken is None:
            raise PushConflict(f"push {push_id!r} has been sent no weights yet; a commit comes after the send")
        self._open = None
        self._committing.add(push)
        try:
            async with self._swapping:
                if not await self._is_repeated(push.taken, version):
                    await self._target.swap(push.taken, version, flush_cache=flush_cache)
        finally:
            self._committing.remove(push)

    @contextlib.contextmanager
    def hold(self, push_id: str | None) -> Generator[None]:
        """Inside, the engine comes to rest, as a step of this push or of none. One that is not open holds nothing."""
        push = self._open
        if push is None or push.id != push_id:
            yield
            return
        push.is_pausing = push.is_holding = True
        try:
            yield
        finally:
            push.is_pausing, push.heard_s = False, time.monotonic()

    def let_go(self, push_id: str | None) -> None:
        """The engine is to go on, as a step of this push or of none.

        Raises PushConflict while another push holds it still whose sender may be alive.
        """
        for push in self._committing:
            if push.is_holding and push.id != push_id:
                raise PushConflict(f"push {push.id!r} is being committed, and the engine still for it; try again")
        push = self._open
        if push is not None and push.is_holding:
            if push.id != push_id:
                self._give_up_if_dead(push)
                self._open = None
            push.is_holding = False

    def abort(self, push_id: str) -> None:
        """Forget a push. One that is not open is no error."""
        if self._open is not None and self._open.id == push_id:
            self._open = None

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[None]:
        """Inside, no push is committed: for a change of weights that is none of a push."""
        async with self._swapping:
            yield

    def _give_up_if_dead(self, push: _Push[T]) -> None:
        left_s = push.heard_s + self._timeout_s - time.monotonic()
        if push.is_sending or push.is_pausing or left_s > 0:
            held = ", and holds the engine still" if push.is_holding else ""
            raise PushConflict(
                f"push {push.id!r} is open{held}; commit or abort it first. It may be replaced once its sender has "
                f"been silent for {self._timeout_s:g} s, in {max(left_s, 0):.0f} s"
            )
        logger.warning("push %r is given up: its sender has been silent for %g s", push.id, self._timeout_s)

    def _find(self, push_id: str) -> _Push[T]:
        if self._open is None or self._open.id != push_id:
            raise PushConflict(
                f"push {push_id!r} is not open: it was never begun, has failed or ended, or another one has replaced "
                "it; begin it again"
            )
        self._open.heard_s = time.monotonic()
        return self._open

    @contextlib.asynccontextmanager
    async def _ended_by_failure(self, push: _Push[T]) -> AsyncGenerator[None]:
        try:
            yield
        except BaseException:
            if self._open is push:
                self._open = None
            raise

    async def _is_repeated(self, taken: T, version: WeightVersion) -> bool:
        """Whether they serve already. Raises WeightUpdateError for a version that would go back."""
        serving = self._target.version
        if version > serving:
            return False
        if version == serving and await self._target.holds(taken):
            return True
        raise WeightUpdateError(
            f"version {version} was pushed, and {serving} serves{' with other weights' * (version == serving)}; "
            "versions only go up: push a later one"
        )
