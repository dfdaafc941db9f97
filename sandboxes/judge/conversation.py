"""A program in a sandbox that is talked to in lines of JSON. What it says is bounded, and nothing in it is believed.

It knows no program: relays and fork servers alike are talked to through it.
"""

import asyncio
import contextlib
import json
from typing import Any, Self

from sandboxes.base import Process
from sandboxes.result import ExecResult

MAX_LINE_BYTES = 16 * 2**20
MAX_STDERR_BYTES = 4_096


class Conversation:
    """One process, from its start to its death; `async with` it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._chunks = process.stdout
        self._received = bytearray()
        self._stderr = bytearray()
        self._draining = asyncio.create_task(self._drain())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def tell(self, message: Any) -> None:
        """Say something. That nobody listens any more shows when an answer is waited for."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            await self._process.write(json.dumps(message).encode() + b"\n")

    async def hear(self) -> bytes | None:
        """The next line; None when there is none, or one that is too long."""
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > MAX_LINE_BYTES:
                return None
            chunk = await anext(self._chunks, None)
            if chunk is None:
                return None
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    async def hear_message(self) -> dict[str, Any] | None:
        """The next line as a JSON object; None when it is anything else."""
        line = await self.hear()
        if line is None:
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    async def end(self) -> tuple[ExecResult, bytes]:
        """Kill it: how it ended, and the end of what it said on stderr."""
        await self._process.kill()
        result = await self._process.wait()
        await self._draining
        return result, bytes(self._stderr)

    async def _drain(self) -> None:
        """Until its stderr ends, which its death brings about: else it would wait for a reader of a full pipe."""
        async for chunk in self._process.stderr:
            self._stderr += chunk
            del self._stderr[:-MAX_STDERR_BYTES]
