"""The three streams of a program that the host talks with while it runs. It knows no program."""

import asyncio
import os
from typing import Self

CHUNK_BYTES = 65_536


class PipeReader:
    """What comes out of a pipe, chunk by chunk, for one reader; its write end is handed to the program."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._is_over = False
        self._is_closed = False
        self._waiting: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        await asyncio.sleep(0)  # a program that prints without end must not keep others from running
        while not self._is_closed:
            try:
                data = os.read(self._read_end, CHUNK_BYTES)
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

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Harmless when it is closed already."""
        if not self._is_closed:
            self._is_closed = True
            self._wake()
            os.close(self._read_end)

    async def _wait(self) -> None:
        self._waiting = self._loop.create_future()
        self._loop.add_reader(self._read_end, self._wake)
        try:
            await self._waiting
        finally:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._loop.remove_reader(self._read_end)
            if not self._waiting.done():
                self._waiting.set_result(None)
            self._waiting = None


class PipeWriter:
    """What goes into a pipe, for one writer; its read end is handed to the program."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._is_closed = False
        self._waiting: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        """All of it, as the program takes it. BrokenPipeError when nobody will."""
        view = memoryview(data)
        while view:
            if self._is_closed:
                raise BrokenPipeError("the program's stdin is closed")
            try:
                view = view[os.write(self._write_end, view) :]
            except BlockingIOError:
                await self._wait()

    def close_read_end(self) -> None:
        """Once the program has it."""
        os.close(self.read_end)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Harmless when it is closed already."""
        if not self._is_closed:
            self._is_closed = True
            self._wake()
            os.close(self._write_end)

    async def _wait(self) -> None:
        self._waiting = self._loop.create_future()
        self._loop.add_writer(self._write_end, self._wake)
        try:
            await self._waiting
        finally:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._loop.remove_writer(self._write_end)
            if not self._waiting.done():
                self._waiting.set_result(None)
            self._waiting = None
