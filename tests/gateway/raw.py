"""Helpers, not tests: clients that write to a socket directly, and parsing of the answers."""

import asyncio
import contextlib
from typing import Any

import orjson


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


async def say(url: str, *pieces: bytes) -> bytes:
    """Send all of it, and read until the other side closes."""
    reader, writer = await asyncio.open_connection(*address(url))
    try:
        with contextlib.suppress(ConnectionError):  # it may have heard enough
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def parse(answer: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers (lower case) and decoded body of one answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, orjson.loads(body)


def is_error_object(body: Any) -> bool:
    """Return whether a body is OpenAI's error object."""
    error = body.get("error") if isinstance(body, dict) else None
    return (
        isinstance(error, dict)
        and set(error) == {"message", "type", "param", "code"}
        and bool(error["message"])
        and bool(error["type"])
        and all(error[key] is None or isinstance(error[key], str) for key in ("param", "code"))
    )
