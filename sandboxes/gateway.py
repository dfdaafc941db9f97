"""The way from a sandbox to one session of a gateway, and to nothing else of it.

It is a small HTTP server behind a tunnel (`tunnel.py`). Whatever key a program sends, its requests bear the session's
own, which never enters the sandbox; and only paths below `/v1/` are passed on: no program can reach another session, or
what ends its own or gives it a reward.
"""

import asyncio
import logging
import socket
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from sandboxes.cell import Cell
from sandboxes.tunnel import open_tunnel

PASSED = ("Accept", "Anthropic-Beta", "Anthropic-Version", "Content-Encoding", "Content-Type", "User-Agent")
"""The headers of a request that the gateway gets."""
METHODS = ("DELETE", "GET", "HEAD", "POST")
RETURNED = ("Cache-Control", "Content-Encoding", "Content-Type", "Request-Id", "Retry-After", "X-Request-Id")
"""The headers of an answer that the program gets."""
CONNECT_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 75.0  # as the gateway's
AT_ONCE_S = 0.001
"""aiohttp waits for ever if it is given 0."""

logger = logging.getLogger(__name__)


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
        unheard = logging.Logger("requests", logging.CRITICAL)  # a program must not fill the host's log
        self._server = web.Server(
            self._pass_on,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=IDLE_TIMEOUT_S,
            access_log=None,
            logger=unheard,
        )
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S)  # the gateway keeps the time of its answers
        self._client = aiohttp.ClientSession(auto_decompress=False, timeout=timeout)

    async def aclose(self) -> None:
        await self._server.shutdown(AT_ONCE_S)
        await self._client.close()

    async def take(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(self._server, channel)

    async def _pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        if not path.startswith("/v1/") or ".." in unquote(path.partition("?")[0]).split("/"):
            return refusal(404, f"{path!r} cannot be reached from a sandbox; only paths below /v1/ can")
        if request.method not in METHODS:
            return refusal(405, f"{request.method} is not passed on; {', '.join(METHODS)} are")
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        headers["Authorization"] = f"Bearer {self._api_key}"
        body = request.content if request.can_read_body else None
        url = URL(self._origin + path, encoded=True)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        response = web.StreamResponse()
        try:
            async with self._client.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                response.set_status(answer.status, answer.reason)
                response.headers.update({name: answer.headers[name] for name in RETURNED if name in answer.headers})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            if response.prepared:
                raise ConnectionResetError("an answer broke off") from error
            return refusal(502, f"the gateway cannot be reached: {error}")
        except Exception as error:
            if not isinstance(error, OSError):
                logger.exception("a program's request failed")
            raise


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "not_reachable"}}, status=status)
