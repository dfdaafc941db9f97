"""A time limit that does not count the time in which this process slept:

- a limit that passes during sleep does not expire: what came meanwhile is read
- one that passes while awake does, also after a sleep, and so does one that is slept through again and again
- a new connection does not fail because this process slept while it was made, for samples and for calls
"""

import asyncio
from contextlib import aclosing

import pytest
from aiohttp import web

from areal_agent.engine.transport import CONNECT_TIMEOUT_S, LATE_S, Transport, awake_timeout
from areal_agent.engine.wire import control, generate
from tests.engine.servers import serving_app

from .slept import SleptLoop, run_in_slept_loop

LONG_S = 2 * CONNECT_TIMEOUT_S


async def some_steps(num_steps: int = 10) -> None:
    """Let the loop do everything that is due."""
    for _ in range(num_steps):
        await asyncio.sleep(0)


def test_what_came_while_it_slept_is_read() -> None:
    async def work(loop: SleptLoop) -> str:
        async with awake_timeout(5.0):
            loop.sleep(60.0)
            await some_steps()
            return "an answer"

    assert run_in_slept_loop(work) == "an answer"


@pytest.mark.parametrize("slept_s", [0.0, 60.0])
def test_it_ends_while_the_process_is_awake(slept_s: float) -> None:
    async def work(loop: SleptLoop) -> None:
        async with awake_timeout(5.0):
            loop.sleep(slept_s)
            await some_steps()
            loop.sleep(5.0 + LATE_S / 2)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_in_slept_loop(work)


def test_it_ends_where_the_process_sleeps_again_and_again() -> None:
    async def work(loop: SleptLoop) -> None:
        async with awake_timeout(5.0):
            while True:
                loop.sleep(60.0)
                await some_steps()

    with pytest.raises(TimeoutError):
        run_in_slept_loop(work)


async def _told(_: web.Request) -> web.Response:
    return web.json_response({})


@pytest.mark.parametrize("num_steps", range(8))  # the connection is made in one of the first steps
@pytest.mark.parametrize("is_sampling", [False, True])
def test_calls_over_a_connection_that_was_slept_through(is_sampling: bool, num_steps: int) -> None:
    async def work(loop: SleptLoop) -> object:
        app = web.Application()
        app.router.add_get(control.SERVER_INFO, _told)
        app.router.add_post(generate.GENERATE, _told)
        async with serving_app(app) as url, aclosing(Transport(url)) as transport:
            ask = transport.sample(generate.GENERATE, {}) if is_sampling else transport.get(control.SERVER_INFO)
            call = asyncio.create_task(ask)
            await some_steps(num_steps)
            loop.sleep(LONG_S)
            return await call

    assert run_in_slept_loop(work) == {}
