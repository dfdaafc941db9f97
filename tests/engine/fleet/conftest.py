"""Fleets of scripted servers. The token at a position is a function of the position, which proves continuations."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_agent.engine.fake import FakeEngine
from areal_agent.engine.fleet.fleet import Fleet, MemberReport
from areal_agent.engine.fleet.member import MemberState, Patience
from areal_agent.engine.wire.control import EngineStats
from areal_agent.errors import EngineUnreachable
from areal_agent.types import EngineInfo, GenerateRequest, GenerateResult, SamplingParams, TokenChunk, WeightVersion

DEADLINE_S = 120.0  # only a hang is longer
OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)
PATIENT = Patience(hung_after_s=1e9, wait_s=DEADLINE_S, probe_every_s=0.005, probe_timeout_s=DEADLINE_S)
URLS = ("http://one", "http://two")


def token_at(position: int) -> int:
    """The token that every scripted server samples at a position of prompt and answer."""
    return 1000 + position


def tokens(request: GenerateRequest, num_tokens: int) -> tuple[int, ...]:
    """The first tokens of the answer to a request, whichever servers sample them."""
    first = len(request.input_ids)
    return tuple(token_at(position) for position in range(first, first + num_tokens))


def ask(number: int = 0, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 8, "seed": number} | sampling))
    return GenerateRequest(request_id=f"request-{number:04}", input_ids=(1, 2, 3), sampling=params)


class Server:
    """A scripted engine as a member of a fleet. When stepped, it samples only when a test says so."""

    def __init__(self, url: str, *, version: WeightVersion = OLD, is_stepped: bool = True, vocab_size: int = 10**6):
        self.base_url = url
        self.fake = FakeEngine(lambda r: tokens(r, 64), version=version, is_stepped=is_stepped, vocab_size=vocab_size)
        self.is_down = False
        self.answers = asyncio.Event()  # cleared: it is silent
        self.answers.set()
        self.may_load = asyncio.Event()  # cleared: it goes on loading
        self.may_load.set()
        self.num_infos = 0
        self.moves_label = True
        self.told_versions = True
        self.loaded: list[tuple[Path, WeightVersion]] = []

    def kill(self) -> None:
        self.is_down = True
        self.fake.die_after(0)

    def restart(self, version: WeightVersion) -> None:
        """Become a new process with the initial state."""
        self.is_down = False
        self.fake.recover()
        self.fake.paused = None
        self.fake.version = version

    async def until_asked(self, num_requests: int = 1) -> None:
        await self.fake.wait_for_requests(num_requests)

    async def finish(self) -> None:
        """Once it has been asked, sample to the end whatever it has."""
        await self.until_asked()
        self.fake.step(100)

    # ------------------------------------------------------------------------------------- MemberEngine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        def untold(chunk: TokenChunk) -> None:
            if on_chunk is not None:
                on_chunk(TokenChunk(token_ids=chunk.token_ids, logprobs=chunk.logprobs))

        return await self.fake.generate(request, on_chunk if self.told_versions else untold)

    async def info(self) -> EngineInfo:
        self.num_infos += 1
        await self.answers.wait()
        if self.is_down:
            raise EngineUnreachable(f"{self.base_url} is down")
        return self.fake.info()

    async def health(self) -> bool:
        await self.answers.wait()
        return not self.is_down

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        await self.may_load.wait()
        before = self.fake.version
        await self.fake.commit_push(push_id, version)
        if not self.moves_label:
            self.fake.version = before

    async def load(self, model: Path, version: WeightVersion) -> None:
        await self.may_load.wait()
        self.loaded.append((model, version))
        self.fake.version = version

    async def wait_ready(self, timeout_s: float) -> None:
        await self.info()

    async def stats(self) -> EngineStats:
        info = await self.info()
        return EngineStats(
            num_running=self.fake.num_in_flight,
            num_queued=0,
            busy_s=None,
            generated_tokens=None,
            weight_version=info.weight_version,
        )

    async def aclose(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fake, name)


class Stage:
    """A fleet, and its servers by URL."""

    def __init__(self, fleet: Fleet, servers: dict[str, Server]) -> None:
        self.fleet = fleet
        self.servers = servers

    @property
    def one(self) -> Server:
        return self.servers[URLS[0]]

    def silence(self, *servers: Server) -> None:
        """Make servers load weights from now on, and answer nothing else."""
        for server in servers:
            server.answers.clear()
            server.may_load.clear()

    def end_silence(self, *servers: Server) -> None:
        for server in servers:
            server.may_load.set()
            server.answers.set()

    async def looked_at(self, server: Server, times: int = 5) -> None:
        """Wait until the keeper has asked a server so often that it could count as hung."""
        num_infos = server.num_infos
        await self.until(lambda: server.num_infos >= num_infos + times)

    @property
    def two(self) -> Server:
        return self.servers[URLS[1]]

    def start(self, request: GenerateRequest, **options: Any) -> "asyncio.Future[GenerateResult]":
        return asyncio.ensure_future(self.fleet.generate(request, **options))

    async def holder(self) -> tuple[Server, Server]:
        """Return the server that has the request, and another one."""
        await self.until(lambda: any(server.fake.num_in_flight for server in self.servers.values()))
        first, second, *_ = sorted(self.servers.values(), key=lambda server: -server.fake.num_in_flight)
        return first, second

    async def under_way(
        self, request: GenerateRequest | None = None, *, num_tokens: int = 3, **options: Any
    ) -> tuple["asyncio.Future[GenerateResult]", Server, Server]:
        """Begin a request; return its answer, the server that has sampled so many tokens of it, and another one."""
        answer = self.start(request or ask(), **options)
        first, second = await self.holder()
        first.fake.step(num_tokens)
        return answer, first, second

    def state(self, server: Server) -> MemberState:
        return self.report(server).state

    def report(self, server: Server) -> MemberReport:
        return next(one for one in self.fleet.report() if one.url == server.base_url)

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():  # noqa: ASYNC110 (a fleet tells nobody of its servers' states)
            await asyncio.sleep(0.001)

    async def kill_all(self) -> None:
        """Kill all servers; return once the fleet knows."""
        for server in self.servers.values():
            server.kill()
        await self.until(lambda: not any(one.state is MemberState.SERVING for one in self.fleet.report()))

    async def until_serving(self, server: Server) -> None:
        await self.until(lambda: self.state(server) is MemberState.SERVING)


OpenStage = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def open_stage() -> OpenStage:
    @asynccontextmanager
    async def opening(*servers: Server, patience: Patience = PATIENT, spare: tuple[Server, ...] = ()):
        by_url = {server.base_url: server for server in (*servers, *spare)}
        fleet = Fleet([server.base_url for server in servers], by_url.__getitem__, patience=patience)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield Stage(fleet, by_url)
        finally:
            await fleet.aclose()

    return opening


@pytest.fixture
async def stage(open_stage: OpenStage):
    """A fleet of two stepped servers."""
    async with open_stage(*map(Server, URLS)) as stage:
        await stage.fleet.info()
        yield stage
