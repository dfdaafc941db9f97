"""Sandboxes without asyncio: the same names, and every call blocks until it is done.

Programs run on an event loop in a thread of its own, which lives as long as its pool. Any number of threads may call.
A call takes and returns what its asynchronous namesake does.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing, contextmanager
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sandboxes import base, pool, sandbox, sessions
from sandboxes.base import Capabilities
from sandboxes.spec import Limits, SandboxSpec

Answer = TypeVar("Answer")
Held = TypeVar("Held")
P = ParamSpec("P")


class LoopThread:
    """An event loop in a thread. A call that is interrupted, by Ctrl-C for example, is cancelled there."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandboxes", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @contextmanager
    def entered(self, context: AbstractAsyncContextManager[Answer]) -> Generator[Answer, None, None]:
        """Enter an asynchronous context, which is not told of exceptions in the block."""
        answer = self.run(context.__aenter__())
        try:
            yield answer
        finally:
            self.run(context.__aexit__(None, None, None))

    def close(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Blocking(Generic[Held]):
    """Something asynchronous, and the loop that it lives on."""

    def __init__(self, loop: LoopThread, held: Held) -> None:
        self._loop = loop
        self._held = held

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._loop.run(getattr(self._held, name)(*args, **kwargs))


def blocking(
    call: Callable[Concatenate[Held, P], Coroutine[Any, Any, Answer]],
) -> Callable[Concatenate[Blocking[Held], P], Answer]:
    """Return the method that calls an asynchronous one and waits for its answer."""

    @wraps(call)
    def method(self: Blocking[Held], *args: P.args, **kwargs: P.kwargs) -> Answer:
        return self._call(call.__name__, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return method


class Pool(Blocking[pool.Pool]):
    """See `pool.Pool`."""

    warm = blocking(pool.Pool.warm)
    reap = blocking(pool.Pool.reap)

    def capabilities(self) -> Capabilities:
        return self._held.capabilities()

    @contextmanager
    def acquire(self, spec: SandboxSpec | None = None) -> Generator["Sandbox", None, None]:
        with self._loop.entered(self._held.acquire(spec)) as box:
            yield Sandbox(self._loop, box)


def _blocking_pool(
    open_pool: Callable[P, AbstractAsyncContextManager[pool.Pool]],
) -> Callable[P, AbstractContextManager[Pool]]:
    @wraps(open_pool)
    @contextmanager
    def opened(*args: P.args, **kwargs: P.kwargs) -> Generator[Pool, None, None]:
        with closing(LoopThread()) as loop, loop.entered(open_pool(*args, **kwargs)) as held:
            yield Pool(loop, held)

    return opened


open_pool = _blocking_pool(pool.open_pool)


class Process(Blocking[base.Process]):
    """See `base.Process`."""

    write = blocking(base.Process.write)
    close_stdin = blocking(base.Process.close_stdin)
    wait = blocking(base.Process.wait)
    kill = blocking(base.Process.kill)

    @property
    def stdout(self) -> Iterator[bytes]:
        return self._chunks(self._held.stdout)

    @property
    def stderr(self) -> Iterator[bytes]:
        return self._chunks(self._held.stderr)

    def _chunks(self, stream: AsyncIterator[bytes]) -> Iterator[bytes]:
        async def take() -> bytes:
            return await anext(stream, b"")

        while chunk := self._loop.run(take()):
            yield chunk


def starting(
    call: Callable[Concatenate[Held, P], Coroutine[Any, Any, base.Process]],
) -> Callable[Concatenate[Blocking[Held], P], Process]:
    """Return the method that starts a program by an asynchronous one."""

    @wraps(call)
    def method(self: Blocking[Held], *args: P.args, **kwargs: P.kwargs) -> Process:
        return Process(self._loop, self._call(call.__name__, *args, **kwargs))  # pyright: ignore[reportPrivateUsage]

    return method


class ShellSession(Blocking[sessions.ShellSession]):
    """See `sessions.ShellSession`."""

    run = blocking(sessions.ShellSession.run)


class PythonSession(Blocking[sessions.PythonSession]):
    """See `sessions.PythonSession`."""

    run = blocking(sessions.PythonSession.run)


class Sandbox(Blocking[sandbox.Sandbox]):
    """See `sandbox.Sandbox`."""

    exec = blocking(sandbox.Sandbox.exec)
    exec_python = blocking(sandbox.Sandbox.exec_python)
    spawn = starting(sandbox.Sandbox.spawn)
    spawn_python = starting(sandbox.Sandbox.spawn_python)
    read = blocking(sandbox.Sandbox.read)
    write = blocking(sandbox.Sandbox.write)
    upload = blocking(sandbox.Sandbox.upload)
    download = blocking(sandbox.Sandbox.download)
    health = blocking(sandbox.Sandbox.health)
    close = blocking(sandbox.Sandbox.close)

    def shell(self) -> ShellSession:
        return ShellSession(self._loop, self._held.shell())

    @contextmanager
    def python(self, *, limits: Limits | None = None) -> Generator[PythonSession, None, None]:
        with self._loop.entered(self._held.python(limits=limits)) as session:
            yield PythonSession(self._loop, session)
