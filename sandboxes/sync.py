"""Sandboxes without asyncio: the same names, and every call blocks until it is done.

Programs run on an event loop in a thread of its own, which lives as long as its pool. Any number of threads may call.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from sandboxes import base, pool, sandbox, sessions
from sandboxes.base import Capabilities
from sandboxes.pool import Backend
from sandboxes.spec import ExecResult, Isolation, Limits, SandboxSpec

Answer = TypeVar("Answer")


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

    def close(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def open_pool(
    *,
    backend: Backend,
    min_isolation: Isolation | str | None = None,
    wall_s: float = pool.DEFAULTS.wall_s,
    memory_bytes: int = pool.DEFAULTS.memory_bytes,
    output_bytes: int = pool.DEFAULTS.output_bytes,
    max_concurrent: int = 16,
    max_idle: int = 8,
) -> Generator["Pool", None, None]:
    """See `pool.open_pool`."""
    with ExitStack() as stack:
        loop = LoopThread()
        stack.callback(loop.close)
        opening = pool.open_pool(
            backend=backend,
            min_isolation=min_isolation,
            wall_s=wall_s,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes,
            max_concurrent=max_concurrent,
            max_idle=max_idle,
        )
        opened = loop.run(opening.__aenter__())
        stack.callback(lambda: loop.run(opening.__aexit__(None, None, None)))
        yield Pool(loop, opened)


class Pool:
    """See `pool.Pool`."""

    def __init__(self, loop: LoopThread, pool: pool.Pool) -> None:
        self._loop = loop
        self._pool = pool

    def capabilities(self) -> Capabilities:
        return self._pool.capabilities()

    @contextmanager
    def acquire(self, spec: SandboxSpec | None = None) -> Generator["Sandbox", None, None]:
        checkout = self._pool.acquire(spec)
        box = self._loop.run(checkout.__aenter__())
        try:
            yield Sandbox(self._loop, box)
        finally:
            self._loop.run(checkout.__aexit__(None, None, None))

    def warm(self, spec: SandboxSpec | None = None, *, num_cells: int) -> None:
        self._loop.run(self._pool.warm(spec, num_cells=num_cells))

    def reap(self) -> int:
        return self._loop.run(self._pool.reap())


class Sandbox:
    """See `sandbox.Sandbox`."""

    def __init__(self, loop: LoopThread, box: sandbox.Sandbox) -> None:
        self._loop = loop
        self._box = box

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        return self._loop.run(self._box.exec(argv, stdin=stdin, env=env, cwd=cwd, limits=limits))

    def exec_python(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        return self._loop.run(self._box.exec_python(source, stdin=stdin, limits=limits))

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> "Process":
        return Process(self._loop, self._loop.run(self._box.spawn(argv, env=env, cwd=cwd, limits=limits)))

    def spawn_python(self, source: str, *, limits: Limits | None = None) -> "Process":
        return Process(self._loop, self._loop.run(self._box.spawn_python(source, limits=limits)))

    def shell(self) -> "ShellSession":
        return ShellSession(self._loop, self._box.shell())

    @contextmanager
    def python(self, *, limits: Limits | None = None) -> Generator["PythonSession", None, None]:
        session = self._box.python(limits=limits)
        try:
            yield PythonSession(self._loop, session)
        finally:
            self._loop.run(session.close())

    def read(self, path: str) -> bytes:
        return self._loop.run(self._box.read(path))

    def write(self, path: str, data: bytes) -> None:
        self._loop.run(self._box.write(path, data))

    def upload(self, source: bytes | Path, path: str = ".") -> None:
        self._loop.run(self._box.upload(source, path))

    def download(self, path: str = ".", *, max_bytes: int = sandbox.MAX_DOWNLOAD_BYTES) -> bytes:
        return self._loop.run(self._box.download(path, max_bytes=max_bytes))

    def health(self) -> bool:
        return self._loop.run(self._box.health())

    def close(self) -> None:
        self._loop.run(self._box.close())


class Process:
    """See `base.Process`."""

    def __init__(self, loop: LoopThread, process: base.Process) -> None:
        self._loop = loop
        self._process = process

    @property
    def stdout(self) -> Iterator[bytes]:
        return _Chunks(self._loop, self._process.stdout)

    @property
    def stderr(self) -> Iterator[bytes]:
        return _Chunks(self._loop, self._process.stderr)

    def write(self, data: bytes) -> None:
        self._loop.run(self._process.write(data))

    def close_stdin(self) -> None:
        self._loop.run(self._process.close_stdin())

    def wait(self) -> ExecResult:
        return self._loop.run(self._process.wait())

    def kill(self) -> None:
        self._loop.run(self._process.kill())


class _Chunks:
    """An asynchronous iterator turned into a plain one."""

    def __init__(self, loop: LoopThread, chunks: AsyncIterator[bytes]) -> None:
        self._loop = loop
        self._chunks = chunks

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        async def take() -> bytes:
            return await anext(self._chunks, b"")

        if chunk := self._loop.run(take()):
            return chunk
        raise StopIteration


class ShellSession:
    """See `sessions.ShellSession`."""

    def __init__(self, loop: LoopThread, session: sessions.ShellSession) -> None:
        self._loop = loop
        self._session = session

    def run(self, command: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        return self._loop.run(self._session.run(command, stdin=stdin, limits=limits))


class PythonSession:
    """See `sessions.PythonSession`."""

    def __init__(self, loop: LoopThread, session: sessions.PythonSession) -> None:
        self._loop = loop
        self._session = session

    def run(self, source: str, *, limits: Limits | None = None) -> ExecResult:
        return self._loop.run(self._session.run(source, limits=limits))
