"""The way from a sandbox to one session of a gateway, and to nothing else of it.

It is a small HTTP server behind a tunnel (`tunnel.py`). Whatever key a program sends, its requests bear the session's
own, which never enters the sandbox; and only paths below `/v1/` are passed on: no program can reach another session, or
what ends its own or gives it a reward.
"""

import asyncio
import socket
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from sandboxes.cell import Cell
from sandboxes.tunnel import open_tunnel

PASSED = ("Accept", "Anthropic-Beta", "Anthropic-Version", "Content-Encoding", "Content-Type", "User-Agent")
"""The headers of a request that the gateway gets."""
RETURNED = ("Cache-Control", "Content-Encoding", "Content-Type", "Request-Id", "Retry-After", "X-Request-Id")
"""The headers of an answer that the program gets."""
CONNECT_TIMEOUT_S = 30.0


async def expose_gateway(cell: Cell, base_url: str, api_key: str) -> str:
    """Return the base URL by which programs of a cell reach a session, until the cell is closed."""
    if not base_url.endswith("/v1"):
        raise ValueError(f"base_url is {base_url!r}; give a rollout's, which ends in /v1")
    door = Door(base_url.removesuffix("/v1"), api_key)
    cell.parts.push_async_callback(door.aclose)
    port = await open_tunnel(cell, 0, door.take)
    return f"http://127.0.0.1:{port}/v1"


class Door:
    """The server, to be ended with `aclose`. It passes bodies on as they come."""

    def __init__(self, origin: str, api_key: str) -> None:
        self._origin = origin
        self._api_key = api_key
        self._server = web.Server(self._pass_on, handler_cancellation=True)
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S)  # the gateway keeps the time of its answers
        self._client = aiohttp.ClientSession(auto_decompress=False, timeout=timeout)

    async def aclose(self) -> None:
        await self._server.shutdown(0.0)
        await self._client.close()

    async def take(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(self._server, channel)

    async def _pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        if not path.startswith("/v1/") or ".." in unquote(path.partition("?")[0]).split("/"):
            return refusal(404, f"{path!r} cannot be reached from a sandbox; only paths below /v1/ can")
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        headers["Authorization"] = f"Bearer {self._api_key}"
        body = request.content if request.can_read_body else None
        url = URL(self._origin + path, encoded=True)
        try:
            async with self._client.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                kept = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError as error:
            return refusal(502, f"the gateway cannot be reached: {error}")


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "not_reachable"}}, status=status)
