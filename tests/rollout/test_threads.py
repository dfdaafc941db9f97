"""Plain functions beside the event loop: 1. what they return and raise arrives, SystemExit and StopIteration included;
2. they see the context of their caller; 3. a cancelled caller goes on at once, whatever the thread does."""

import asyncio
import contextvars
import threading

import pytest

from areal_agent.rollout.workflow import run_in_thread

who = contextvars.ContextVar("who", default="nobody")


async def test_what_it_returns() -> None:
    name, is_daemon = await run_in_thread(
        "s-1", lambda: (threading.current_thread().name, threading.current_thread().daemon)
    )
    assert (name, is_daemon) == ("s-1", True)


@pytest.mark.parametrize(
    ("raised", "arrives"),
    [(KeyError("answer"), KeyError), (SystemExit(3), SystemExit), (StopIteration(), RuntimeError)],
    ids=lambda value: str(value),
)
async def test_what_it_raises(raised: BaseException, arrives: type[BaseException]) -> None:
    def work() -> None:
        raise raised

    with pytest.raises(arrives):
        await run_in_thread("s-1", work)


async def test_it_sees_the_context_of_its_caller() -> None:
    who.set("the caller")
    assert await run_in_thread("s-1", who.get) == "the caller"


async def test_a_cancelled_caller_leaves_the_thread_behind() -> None:
    started, release, done = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        release.wait()
        done.set()

    waiting = asyncio.create_task(run_in_thread("s-1", work))
    await started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not done.is_set()
    release.set()
    await asyncio.to_thread(done.wait)
