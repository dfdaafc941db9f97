"""Sandboxes without asyncio: the same names, and every call blocks until it is done.

Programs run on an event loop in a thread of its own, which lives as long as its pool. Any number of threads may call.
A call takes and returns what its asynchronous namesake does. One proxy, `Blocking`, stands for a pool and for all that
comes of it, so type checkers see only `Any` here.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Generator
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from functools import wraps
from typing import Any, Self

from areal_agent.errors import SandboxError
from sandboxes import pool
from sandboxes.cell import Process
from sandboxes.sandbox import Sandbox

CLOSED = "the sandbox pool is closed; open another"
ASYNCHRONOUS = (pool.Pool, Sandbox, Process, AbstractAsyncContextManager, AsyncIterator)


class LoopThread:
    """An event loop in a thread. A call that is interrupted, by Ctrl-C for example, is cancelled there."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandboxes", daemon=True)
        self._thread.start()
        self._is_closing = False
        self._lock = threading.Lock()  # of `_is_closing`: no call begins after the last are ended

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if self._is_closing:
                work.close()
                raise SandboxError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException as error:
            future.cancel()
            if self._is_closing and isinstance(error, CancelledError):
                raise SandboxError(CLOSED) from None
            raise

    def close(self) -> None:
        """End the loop, and with it the calls of other threads."""
        with self._lock:
            self._is_closing = True
            finishing = asyncio.run_coroutine_threadsafe(self._finish(), self._loop)
        finishing.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()


class Blocking:
    """Something asynchronous, on the loop that it lives on: an object, a context or an iterator."""

    def __init__(self, loop: LoopThread, held: Any) -> None:
        self._loop = loop
        self._held = held

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._held, name)
        if not callable(value):
            return self._plain(value)

        @wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._plain(value(*args, **kwargs))

        return call

    def __dir__(self) -> list[str]:
        return dir(self._held)

    def __enter__(self) -> Any:
        return self._plain(self._held.__aenter__())

    def __exit__(self, *_exc_info: object) -> None:
        self._loop.run(self._held.__aexit__(None, None, None))  # it is not told of exceptions in the block

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run(self._held.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def _plain(self, value: Any) -> Any:
        """Return what a coroutine returns, and a proxy for what is asynchronous itself."""
        if isinstance(value, Coroutine):
            value = self._loop.run(value)
        return Blocking(self._loop, value) if isinstance(value, ASYNCHRONOUS) else value


@wraps(pool.open_pool)
@contextmanager
def open_pool(**settings: Any) -> Generator[Any, None, None]:
    with closing(LoopThread()) as loop, Blocking(loop, pool.open_pool(**settings)) as opened:
        yield opened
