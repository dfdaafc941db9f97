"""The servers of a fleet: one (`Member`), all with their states (`Roster`), and the one for a request (`Router`).

    catching_up ──▶ serving ──▶ leaving ──▶ (gone)
         ▲             │
         └ quarantined ◀   it failed, hangs, or serves another version than is due

Only the roster changes states, and every change wakes those who wait for a server.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from areal_agent.engine.wire.control import EngineStats
from areal_agent.errors import EngineError, EngineUnreachable, ServerRefused
from areal_agent.process import count_cancellations
from areal_agent.protocols import Engine
from areal_agent.section import Section
from areal_agent.types import EngineInfo, VersionSpan, WeightVersion

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Call(Generic[T]):
    """One call to a server, which can be taken away from it. Its task lives as long as `run`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None
        self._taken_away: str | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. Raises EngineUnreachable once the call has been taken away."""
        num_cancelled = count_cancellations()
        self._task = asyncio.create_task(work)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._taken_away is None or count_cancellations() > num_cancelled:
                raise
            raise EngineUnreachable(self._taken_away) from None
        finally:
            if not self._task.done():  # waiting for a task that is done costs a turn of the event loop
                self._task.cancel()
                await asyncio.wait({self._task})

    def take_away(self, why: str) -> None:
        """Stop waiting for the server. Does nothing if it has answered."""
        self._taken_away = why
        if self._task is not None:
            self._task.cancel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """The times that a fleet waits, in seconds. The defaults are those of the config section `engine`."""

    hung_after_s: float = 30.0  # a server that neither answers nor samples for this long counts as hung
    wait_s: float = 120.0  # requests and pushes wait this long while no server serves
    probe_every_s: float = 5.0  # the interval between probes of a server
    probe_timeout_s: float = 4.0  # a probe may take this long; an error within that time means that the server is down
    abort_s: float = 3.0  # a server may take this long to answer an abort
    max_failures: int = 5  # a request fails once it has failed at servers this often


def check_model(url: str, info: EngineInfo, known: EngineInfo) -> None:
    """Raise ServerRefused when a server with `info` cannot stand in for those with `known`."""
    fault = _fault(info, known)
    if fault is not None:
        raise ServerRefused(f"{url} {fault}", code="another_model")


def _fault(info: EngineInfo, known: EngineInfo) -> str | None:
    if info.vocab_size != known.vocab_size:
        return (
            f"serves {info.model_path}, with {info.vocab_size} ids, but the others {known.model_path}, with "
            f"{known.vocab_size}; start it with their model"
        )
    if info.max_context_tokens < known.max_context_tokens:
        return (
            f"has a context of {info.max_context_tokens} tokens, but the others {known.max_context_tokens}; start it "
            "with the same context"
        )
    if known.has_grammar and not info.has_grammar:
        return "does not constrain answers to a grammar, but the others do; start it with their options"
    return None


class FleetView(Section):
    """One process's knowledge of a fleet's servers, for others that use them. A server in neither list has left."""

    serving: tuple[str, ...]
    out: Mapping[str, str]
    """The servers that must not be asked for now: reasons by URL."""
    versions: tuple[str, ...]
    """The versions that serving servers may have: the one that is due, and the one that is being committed."""
    is_loading: bool = False
    """True while servers load weights: they may be silent meanwhile without being hung."""


class ServedEngine(Engine, Protocol):
    """Any engine that a run has connections to.

    Implementations: `engine.client.HttpEngine`, `engine.foreign.engine.ForeignEngine`, `engine.fleet.fleet.Fleet`.
    """

    async def info(self) -> EngineInfo:
        """Return the model that it serves, and the current weight version."""
        ...

    async def stats(self) -> EngineStats:
        """Return its load."""
        ...

    async def aclose(self) -> None:
        """Close the connections. Calling it again does nothing."""
        ...


class MemberEngine(ServedEngine, Protocol):
    """The client of one server. Implementations: `engine.client.HttpEngine`, `engine.foreign.engine.ForeignEngine`."""

    @property
    def base_url(self) -> str:
        """The URL at which the server listens."""
        ...

    async def health(self) -> bool:
        """Return whether the server may be asked to sample."""
        ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises EngineUnreachable when it does not within `timeout_s`."""
        ...

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Serve a Hugging Face folder as `version`, whatever was served before."""
        ...


class MemberState(StrEnum):
    """The state of a server, which decides whether it gets requests."""

    SERVING = "serving"
    QUARANTINED = "quarantined"  # it failed, hangs, or is behind; it is probed until it returns
    CATCHING_UP = "catching_up"  # it answers; it is verified and given the fleet's weights
    LEAVING = "leaving"  # it is being removed; its requests end or move


@dataclass(kw_only=True, slots=True, eq=False)
class Member:
    """One server of a fleet. `Roster` sets `state` and `reason`."""

    engine: MemberEngine
    state: MemberState = MemberState.SERVING
    reason: str = ""  # why it does not serve
    version: WeightVersion | None = None  # the version that it served when it was last asked
    lag: int = 0  # how often in a row it had an earlier version than others
    is_loading: bool = False  # it loads weights, and may be silent meanwhile
    num_requests: int = 0
    heard_s: float = field(default_factory=time.monotonic)  # when it last answered or sampled a token
    looked_after: asyncio.Event = field(default_factory=asyncio.Event)  # set it to make the keeper look now
    _calls: dict[Call[Any], None] = field(default_factory=dict[Call[Any], None])

    @property
    def url(self) -> str:
        return self.engine.base_url

    async def ask(self, work: Callable[[MemberEngine], Coroutine[Any, Any, T]], call: Call[T] | None = None) -> T:
        """Await a call to the server. Raises EngineUnreachable when the call is taken away."""
        call = call or Call[T]()
        self._calls[call] = None
        try:
            return await call.run(work(self.engine))
        finally:
            del self._calls[call]

    def take_away_all(self, why: str) -> None:
        """Take away all calls, so that nobody waits for this server any more."""
        for call in self._calls:
            call.take_away(f"{self.url} {why}")


async def ask_all(
    members: Sequence[Member], call: Callable[[MemberEngine], Coroutine[Any, Any, T]]
) -> tuple[dict[Member, T], dict[Member, EngineError]]:
    """Ask all, and wait for each. Return the answers, and the failures; errors other than EngineError are raised."""
    results = await asyncio.gather(*(member.ask(call) for member in members), return_exceptions=True)
    answers: dict[Member, T] = {}
    failures: dict[Member, EngineError] = {}
    for member, result in zip(members, results, strict=True):
        if isinstance(result, EngineError):
            failures[member] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[member] = result
    return answers, failures


BLOCK_TOKENS = 64
MAX_KEYS = 2**18
MAX_LEAD = 8
"""A server may have this many requests more than the idlest one and still be chosen for its cache."""


class Router:
    """Chooses the server that has the beginning of the prompt in its cache, unless it is too busy.

    A prompt is cut into blocks, and each block's key depends on all blocks before it. The deepest known block leads to
    the server that computed it. Once a server is chosen, the prompt's blocks count as cached there.
    """

    def __init__(self, *, max_lead: int = MAX_LEAD, max_keys: int = MAX_KEYS) -> None:
        self._max_lead = max_lead
        self._max_keys = max_keys
        self._home_of: OrderedDict[bytes, str] = OrderedDict()  # the server that has a block, by the block's key

    def choose(self, input_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        """Choose a server; `loads` holds the requests in flight of each server that may be chosen.

        >>> router, prompt = Router(), range(100)
        >>> router.choose(prompt, {"a": 1, "b": 0})
        'b'
        >>> router.choose([*prompt, 5], {"a": 0, "b": 3})      # its first block is there
        'b'
        >>> router.choose([*prompt, 5], {"a": 0, "b": 9})      # too busy
        'a'
        >>> router.choose([*prompt, 5], {"b": 9})
        'b'
        """
        keys = list(_keys(input_ids))
        home = next((known for key in reversed(keys) if (known := self._home_of.get(key)) in loads), None)
        idlest = min(loads, key=loads.__getitem__)
        chosen = idlest if home is None or loads[home] > loads[idlest] + self._max_lead else home
        for key in keys:
            self._home_of[key] = chosen
            self._home_of.move_to_end(key)
        while len(self._home_of) > self._max_keys:
            self._home_of.popitem(last=False)
        return chosen


def _keys(input_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield one key for each whole block."""
    packed = np.asarray(input_ids, dtype=np.int32).tobytes()
    state = blake2b(digest_size=16)
    for start in range(0, len(packed) - len(packed) % (4 * BLOCK_TOKENS), 4 * BLOCK_TOKENS):
        state.update(packed[start : start + 4 * BLOCK_TOKENS])
        yield state.copy().digest()


MAX_LAG = 2
"""A server found behind others more often in a row than this is chosen last, if this fleet does not push."""


class Roster:
    """All members, by URL. Only this class changes their states."""

    def __init__(self, members: Iterable[Member], router: Router | None = None) -> None:
        self._members = {member.url: member for member in members}
        self._router = router or Router()
        self._has_changed = asyncio.Event()
        self.num_quarantines = 0
        self.num_moves = 0  # of requests, from one server to another

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    @property
    def serving(self) -> list[Member]:
        """The members that may be asked to sample."""
        return [member for member in self._members.values() if member.state is MemberState.SERVING]

    @property
    def newest_version(self) -> WeightVersion | None:
        """The newest version that any serving member has been found with."""
        return max((member.version for member in self.serving if member.version is not None), default=None)

    def find(self, url: str) -> Member | None:
        return self._members.get(url)

    def enter(self, member: Member) -> None:
        """Add a member."""
        self._members[member.url] = member
        self.ring()

    def forget(self, member: Member) -> None:
        """Drop a member, unless another one has taken its URL."""
        if self._members.get(member.url) is member:
            del self._members[member.url]
        self.ring()

    # ------------------------------------------------------------------------------------------------ states

    def fall(self, member: Member, why: str, *, is_lost: bool = False) -> None:
        """Give the member no further requests. With `is_lost`, also take away the requests that it has."""
        if member.state is MemberState.SERVING:
            self.num_quarantines += 1
            left = len(self.serving) - 1
            logger.warning("%s is quarantined: %s; servers that serve now: %d", member.url, why, left)
        self._move(member, MemberState.QUARANTINED, why)
        member.looked_after.set()
        if is_lost:
            member.take_away_all(f"was quarantined: {why}")

    def catch_up(self, member: Member) -> None:
        """Note that the member answers, and is being verified."""
        self._move(member, MemberState.CATCHING_UP, member.reason)

    def serve(self, member: Member) -> None:
        """Give the member requests from now on."""
        logger.info("%s serves version %s", member.url, member.version)
        self._move(member, MemberState.SERVING, "")

    def leave(self, member: Member) -> None:
        """Give the member no further requests, before it is forgotten."""
        logger.info("%s leaves; requests that it still has: %d", member.url, member.num_requests)
        self._move(member, MemberState.LEAVING, "it is being removed")

    def _move(self, member: Member, state: MemberState, reason: str) -> None:
        if member.state is not MemberState.LEAVING:  # leaving is final
            member.state, member.reason = state, reason
        self.ring()

    # ------------------------------------------------------------------------------------------------ choice

    def ring(self) -> None:
        """Wake everyone who waits for a change."""
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._has_changed.wait()

    async def wait_for_some(self, wait_s: float, is_given_up: Callable[[], bool] = lambda: False) -> list[Member]:
        """Wait for serving members, and return them; empty if given up. Raises EngineUnreachable after `wait_s`."""
        if serving := self.serving:
            return serving
        try:
            async with asyncio.timeout(wait_s):
                while not self.serving and not is_given_up():
                    await self._has_changed.wait()
        except TimeoutError:
            raise EngineUnreachable(
                f"no server has served for {wait_s:g} s: {self._why_none()}; see their logs, or raise engine.wait_s"
            ) from None
        return self.serving

    async def until_idle(self, member: Member) -> None:
        """Wait until the member has no requests."""
        while member.num_requests:
            await self._has_changed.wait()

    def choose(self, input_ids: Sequence[int]) -> Member:
        """Choose the serving member for a request; there has to be one. Those that are behind come last."""
        serving = self.serving
        candidates = [member for member in serving if member.lag <= MAX_LAG] or serving
        if len(self._members) == 1:
            return candidates[0]
        url = self._router.choose(input_ids, {member.url: member.num_requests for member in candidates})
        return self._members[url]

    def _why_none(self) -> str:
        return (
            "; ".join(f"{member.url} is {member.state}: {member.reason}" for member in self.members)
            or "there are no servers"
        )


class Versions:
    """The weight versions that the fleet has been given; a token of any other version has unknown weights.

    Before the first one is given, every version is accepted. If another process pushes, news of a version may arrive
    shortly after its first token.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._known: set[WeightVersion] = set()
        self._strange: set[WeightVersion] = set()  # waited for without result
        self._has_changed = asyncio.Event()

    def begin(self, version: WeightVersion) -> None:
        """Accept this version, and from now on only versions that were given."""
        self._known.add(version)
        self._strange.discard(version)
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def add(self, version: WeightVersion) -> None:
        """Accept a version that is about to be served."""
        if self._known:
            self.begin(version)

    def forget(self, version: WeightVersion) -> None:
        """Take back a version that was not served after all."""
        self._known.discard(version)

    def knows(self, version: WeightVersion) -> bool:
        return not self._known or version in self._known

    async def stranger(self, spans: Iterable[VersionSpan]) -> VersionSpan | None:
        """Return the first span of an answer that no server of this fleet should have sampled, or None.

        Its version is unknown and stays so for a while, or is earlier than that of the tokens before it, for example
        because the server was restarted unnoticed.
        """
        newest = WeightVersion()
        for span in spans:
            if span.version < newest or not (self.knows(span.version) or await self._becomes_known(span.version)):
                return span
            newest = span.version
        return None

    async def _becomes_known(self, version: WeightVersion) -> bool:
        if version in self._strange:
            return False
        try:
            async with asyncio.timeout(self._wait_s):
                while not self.knows(version):
                    await self._has_changed.wait()
        except TimeoutError:
            self._strange.add(version)
            return False
        return True
