"""`python -m areal_agent.engine` as a process; fleet/test_embedded.py has what it does on SIGTERM with time to drain.

- it prints where it serves, and writes it where it is asked to
- without time to drain, on Ctrl-C and on a second SIGTERM, requests are answered with what they have; while it drains
  it takes no new ones
- a port in use is reported at once; what cannot be served, as by too many engines in one memory, is one line and exit
  code 2
- one that drains takes no new weights, which would be swapped under answers that are about to end
- a push that is under way when the drain begins, with its pause and resume, does not cut it short
- two thousand requests at once, with room for a fraction of them, are answered in full; a second wave takes no more
  memory than the first, apart from fragmentation
"""

import asyncio
import os
import resource
import signal
import socket
import sys
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_agent.engine.__main__ import main
from areal_agent.engine.client import HttpEngine
from areal_agent.errors import ConfigError, EngineUnreachable
from areal_agent.process import allow_many_connections, peak_memory_bytes
from areal_agent.types import FinishReason, GenerateRequest, GenerateResult, PauseMode, VersionSpan, WeightVersion


@asynccontextmanager
async def process(folder: Path, *options: str):
    """Start the command, with its output piped."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "areal_agent.engine", "--model", str(folder), "--device", "cpu"),
        *("--max-context", "512", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(900):  # only a hang is longer
            yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def url_of(child) -> str:
    """Return where a newly started process serves."""
    line = (await child.stdout.readline()).decode().strip()
    assert line.startswith("engine ready at ")
    return line.split()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drain_s", "signals", "exit_code"),
    [("0", [signal.SIGTERM], 0), ("300", [signal.SIGINT], 130), ("300", [signal.SIGTERM, signal.SIGTERM], 0)],
    ids=["without time", "Ctrl-C", "a second SIGTERM"],
)
async def test_a_signal_answers_what_is_in_flight_and_ends_it(drain_s, signals, exit_code, tiny, ask, tmp_path):
    announce = tmp_path / "url"
    options = ("--drain", drain_s, "--weight-version", "2:5", "--announce", str(announce))
    async with process(tiny, *options) as child:
        url = await url_of(child)
        assert announce.read_text() == url
        async with aclosing(HttpEngine(url)) as engine:
            assert (await engine.info()).weight_version == WeightVersion(incarnation=2, step=5)
            await engine.release_memory()  # so that the request cannot end by itself
            answer = asyncio.create_task(engine.generate(ask(1)))
            while (await engine.stats()).num_queued == 0:
                pass
            for number in signals[:-1]:
                child.send_signal(number)
                while await engine.health():
                    pass
                with pytest.raises(EngineUnreachable, match="is ending"):
                    await engine.generate(ask(2))
                assert not answer.done()
            child.send_signal(signals[-1])
            assert (await answer).finish_reason is FinishReason.ABORT
        assert await child.wait() == exit_code
        assert b"Traceback" not in await child.stderr.read()


def test_a_port_in_use_is_told_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*another port"):
            main(["--model", str(tmp_path), "--port", str(port)])


@pytest.mark.slow
async def test_what_cannot_be_served_is_one_line_and_exit_code_2(tiny):
    async with process(tiny, "--sharing", "1000000000") as child:
        _, errors = await child.communicate()
    assert child.returncode == 2 and b"Traceback" not in errors
    assert errors.splitlines()[-1].startswith(b"error: ") and b"let fewer than 1000000000 engines share it" in errors


DRAIN_S = 1e4
SERVED, NEW = WeightVersion(step=7), WeightVersion(step=8)


@dataclass(kw_only=True)
class Scene:
    """An engine with an answer that cannot end until its memory is back."""

    served: object
    answer: asyncio.Future[GenerateResult]
    draining: asyncio.Future[None] | None = None

    @classmethod
    async def begin(cls, served, request) -> "Scene":
        await served.engine.release_memory()
        answer = asyncio.ensure_future(served.engine.generate(request))
        await served.until(lambda stats: stats.num_queued == 1)
        return cls(served=served, answer=answer)

    async def drain(self) -> None:
        """Begin to drain."""
        self.draining = asyncio.ensure_future(self.served.server.drain(DRAIN_S))
        while await self.served.engine.health():
            pass

    async def end(self) -> GenerateResult:
        """Check that the drain lasts exactly until the answer has ended."""
        await self.served.engine.info()
        assert not self.draining.done()
        await self.served.engine.resume_memory()
        result = await self.answer
        await self.draining
        return result


async def test_new_weights_are_refused_and_who_continues_does_not_end_it(other, served, ask):
    engine, scene = served.engine, await Scene.begin(served, ask(1))
    await scene.drain()
    for refused in (engine.load(other, NEW), engine.begin_push("p")):
        with pytest.raises(EngineUnreachable, match="is ending"):
            await refused
    await engine.pause(PauseMode.RETRACT)
    await engine.resume()
    result = await scene.end()
    assert result.finish_reason is FinishReason.LENGTH
    assert result.versions == (VersionSpan(version=SERVED, start=0, end=12),)


async def test_a_push_that_has_begun_ends(other, served, ask, share):
    engine, scene = served.engine, await Scene.begin(served, ask(1))
    await engine.begin_push("p")
    await engine.send_push("p", share(other))
    await scene.drain()
    await engine.pause(PauseMode.RETRACT)
    await engine.commit_push("p", NEW)
    await engine.resume()
    result = await scene.end()
    assert result.finish_reason is FinishReason.LENGTH
    assert result.versions == (VersionSpan(version=NEW, start=0, end=12),)


NUM_REQUESTS = 2000
STRAY_BYTES = 64 * 2**20


@pytest.mark.slow
async def test_two_thousand_queued_requests_over_http(tiny, ask):
    allow_many_connections()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < NUM_REQUESTS + 500:
        pytest.skip("this machine lets a process have too few open files")
    async with process(tiny, "--max-running", "64", "--kv-tokens", "2000") as child:
        line = (await child.stdout.readline()).decode()
        engine = HttpEngine(line.split()[-1])
        peaks: list[int] = []
        for wave in range(2):
            await answer_wave(engine, [ask(wave * NUM_REQUESTS + number) for number in range(NUM_REQUESTS)])
            peaks.append(peak_memory_bytes(child.pid) or 0)
        stats = await engine.stats()
        await engine.aclose()
    assert stats.generated_tokens == 2 * NUM_REQUESTS * 12
    assert (stats.num_running, stats.num_queued) == (0, 0)
    assert peaks[1] <= peaks[0] + STRAY_BYTES, peaks


async def answer_wave(engine: HttpEngine, requests: list[GenerateRequest]) -> None:
    """Send all requests, and let the first be answered only when all of them wait in the engine."""
    await engine.pause(PauseMode.RETRACT)
    answers = [asyncio.create_task(engine.generate(request)) for request in requests]
    while (await engine.stats()).num_queued < len(requests):
        pass
    await engine.resume()
    for result in await asyncio.gather(*answers):
        assert (result.finish_reason, len(result.token_ids)) == (FinishReason.LENGTH, 12)
