"""What a program prints, collected from two pipes by the event loop, within a bound. It knows no program."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Self

CHUNK_BYTES = 65_536


class BoundedOutput:
    """Two pipes, `stdout` and `stderr`, of which at most `max_bytes` together are kept.

    A context manager: its descriptors are closed on leaving. `on_overflow` is called once, when more was printed.
    """

    def __init__(self, max_bytes: int, on_overflow: Callable[[], None]) -> None:
        self.is_truncated = False
        self._loop = asyncio.get_running_loop()
        self._room = max_bytes
        self._on_overflow = on_overflow
        self._chunks: dict[int, list[bytes]] = {}  # by the read end
        self._open: set[int] = set()  # read ends that may give more
        self._write_ends: list[int] = []

    def __enter__(self) -> Self:
        try:
            for _ in ("stdout", "stderr"):
                self._open_pipe()
        except OSError:  # no descriptor is left: the first pipe must not stay
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close_write_ends()
        for read_end in tuple(self._open):
            self._leave(read_end)
        for read_end in self._chunks:
            os.close(read_end)

    @property
    def write_ends(self) -> tuple[int, ...]:
        """What becomes the program's stdout and stderr."""
        return tuple(self._write_ends)

    def close_write_ends(self) -> None:
        """Once the program has them."""
        while self._write_ends:
            os.close(self._write_ends.pop())

    def collect(self) -> tuple[bytes, bytes]:
        """All that was printed, to be called when the program has ended.

        Whatever lies in the pipes by now is read, and nothing is waited for: a process that outlived its program
        and holds a pipe open holds nobody up.
        """
        for read_end in tuple(self._open):
            while self._read(read_end):
                pass
        stdout, stderr = (b"".join(chunks) for chunks in self._chunks.values())
        return stdout, stderr

    def _open_pipe(self) -> None:
        read_end, write_end = os.pipe()
        self._write_ends.append(write_end)
        self._chunks[read_end] = []
        os.set_blocking(read_end, False)
        self._open.add(read_end)
        self._loop.add_reader(read_end, self._read, read_end)

    def _read(self, read_end: int) -> bool:
        """Read once; whether there may be more."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(read_end, CHUNK_BYTES)
            if not data:
                self._leave(read_end)
        if len(data) > self._room:
            self._overflow()
        kept = data[: self._room]
        self._room -= len(kept)
        self._chunks[read_end].append(kept)
        return bool(data) and not self.is_truncated

    def _overflow(self) -> None:
        if not self.is_truncated:
            self.is_truncated = True
            for read_end in tuple(self._open):
                self._leave(read_end)
            self._on_overflow()

    def _leave(self, read_end: int) -> None:
        self._open.discard(read_end)
        self._loop.remove_reader(read_end)
