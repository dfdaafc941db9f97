"""The three streams of a program that the host talks with while it runs. It knows no program."""

import asyncio
import os
from typing import Self

CHUNK_BYTES = 65_536


class _HostEnd:
    """The host's end of a pipe, for one reader or writer, who waits until it is ready."""

    _is_closed = True  # until there is a pipe

    def __init__(self, end: int, *, is_read: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._watch, self._unwatch = (
            (self._loop.add_reader, self._loop.remove_reader)
            if is_read
            else (self._loop.add_writer, self._loop.remove_writer)
        )
        self._is_closed = False
        self._waiting: asyncio.Future[None] | None = None
        os.set_blocking(end, False)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Harmless when it is closed already."""
        if not self._is_closed:
            self._is_closed = True
            self._wake()
            os.close(self._end)

    async def _wait(self) -> None:
        self._waiting = self._loop.create_future()
        self._watch(self._end, self._wake)
        try:
            await self._waiting
        finally:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._unwatch(self._end)
            if not self._waiting.done():
                self._waiting.set_result(None)
            self._waiting = None


class PipeReader(_HostEnd):
    """What comes out of a pipe, chunk by chunk, for one reader; its write end is handed to the program."""

    def __init__(self) -> None:
        read_end, self.write_end = os.pipe()
        super().__init__(read_end, is_read=True)
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        await asyncio.sleep(0)  # a program that prints without end must not keep others from running
        while not self._is_closed:
            try:
                data = os.read(self._end, CHUNK_BYTES)
            except BlockingIOError:
                if self._is_over:
                    break
                await self._wait()
                continue
            if not data:
                break
            return data
        self.close()
        raise StopAsyncIteration

    def close_write_end(self) -> None:
        """Once the program has it."""
        os.close(self.write_end)

    def finish(self) -> None:
        """The program is dead: what is there can be read, and nothing is waited for, whoever holds the pipe open."""
        self._is_over = True
        self._wake()


class PipeWriter(_HostEnd):
    """What goes into a pipe, for one writer; its read end is handed to the program."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        super().__init__(write_end, is_read=False)

    async def write(self, data: bytes) -> None:
        """All of it, as the program takes it. BrokenPipeError when nobody will."""
        view = memoryview(data)
        while view:
            if self._is_closed:
                raise BrokenPipeError("the program's stdin is closed")
            try:
                view = view[os.write(self._end, view) :]
            except BlockingIOError:
                await self._wait()

    def close_read_end(self) -> None:
        """Once the program has it."""
        os.close(self.read_end)
