"""A sandbox's only way to the network: an HTTP proxy in the host's process that lets allowed connections through.

Connections reach it by a tunnel (`tunnel.py`), so the sandbox needs no path, port or address of the host. Names are
resolved here, and the connection goes to the very address that was checked: a name that leads to a private address,
this machine or its neighbours is refused. Only TCP passes.
"""

import asyncio
import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

from sandboxes.agent.tunnel import CHUNK_BYTES
from sandboxes.cell import Cell
from sandboxes.spec import Access, Network, plain_host
from sandboxes.tunnel import open_tunnel

PROXY_PORT = 3128
HEAD_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
DETOURS = tuple(
    ipaddress.ip_network(network) for network in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
)
"""IPv6 ranges whose addresses contain an IPv4 address and may lead to it."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RefusedError(Exception):
    """The proxy refuses a request; the program reads the message."""


def proxy_environment() -> dict[str, str]:
    """Return the environment variables that point programs to the proxy."""
    url = f"http://127.0.0.1:{PROXY_PORT}"
    return {name: url for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}


async def connect(cell: Cell, network: Network) -> None:
    """Connect a cell, whose programs have the variables of `proxy_environment`, to a network."""
    proxy = FilteringProxy(network)
    cell.parts.push_async_callback(proxy.aclose)
    await open_tunnel(cell, PROXY_PORT, proxy.take)


class FilteringProxy:
    """The proxy of one sandbox, to be ended with `aclose`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._connections: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def take(self, channel: socket.socket) -> None:
        """Serve one more connection of a program."""
        connection = asyncio.create_task(self._serve(*await asyncio.open_connection(sock=channel)))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a program to its end. Errors on it are for the program to see."""
        with contextlib.suppress(OSError):
            try:
                await self._forward(reader, writer)
            except RefusedError as refusal:
                text = f"{refusal}\n"
                head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
                writer.write((head + text).encode(errors="replace"))
                await writer.drain()
            finally:
                writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise RefusedError("no complete HTTP request arrived") from None
        host, port, opening = _read_head(head)
        if not self._network.lets(host, port):
            raise RefusedError(f"{host}:{port} is not among the hosts that this sandbox may reach")
        there_reader, there_writer = await self._connect(host, port)
        try:
            if opening is None:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                there_writer.write(opening)
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, there_writer))
                group.create_task(_copy(there_reader, writer))
        finally:
            there_writer.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address of a host that is allowed and answers."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                for text in dict.fromkeys(str(entry[4][0]) for entry in found):
                    if self._is_allowed(host, ipaddress.ip_address(text)):
                        with contextlib.suppress(OSError):
                            return await asyncio.open_connection(text, port)
        except (OSError, UnicodeError, ValueError) as error:
            raise RefusedError(f"{host}:{port} cannot be reached: {error}") from error
        raise RefusedError(f"{host}:{port} cannot be reached at an address that this sandbox may reach")

    def _is_allowed(self, host: str, address: Address) -> bool:
        """Allow an address that the list names literally; any other must be public and not this machine's."""
        is_named = self._network.access is Access.ALLOW and plain_host(host) == str(address)
        return is_named or (is_public(address) and not is_own(address))


def is_public(address: Address) -> bool:
    """Return whether the address is globally routed, so that everybody on the Internet reaches the same host by it."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in detour for detour in DETOURS):
            return False
    return address.is_global and not address.is_multicast


def is_own(address: Address) -> bool:
    """Return whether this machine has the address: packets to it then start from it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as channel:
            channel.connect((str(address), 9))  # connecting a UDP socket sends nothing
            return channel.getsockname()[0] == str(address)
    except OSError:
        return False  # no route: connecting will say so


def _read_head(head: bytes) -> tuple[str, int, bytes | None]:
    """Return a request's host and port, and the head to send there; None for CONNECT, which forwards no head."""
    first, *headers = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or any(character in first for character in "\r\n\0"):
        raise RefusedError("the request line is not HTTP")
    method, target, version = parts
    try:
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = url.hostname, url.port
    except ValueError:
        raise RefusedError(f"{target!r} is not an address") from None
    if not host or (method != "CONNECT" and url.scheme != "http"):
        raise RefusedError(f"{target!r} is not an address that a proxy forwards to; name the host")
    if method == "CONNECT":
        return host, port or 443, None
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [line for line in headers if not _is_of_the_proxy(line)]
    lines = [f"{method} {path} {version}", f"Host: {url.netloc.rpartition('@')[2]}", *kept, "Connection: close"]
    return host, port or 80, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _is_of_the_proxy(header: str) -> bool:
    name = header.partition(":")[0].strip().lower()
    return name in ("host", "connection", "keep-alive") or name.startswith("proxy-")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end of the stream, then end the other one."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
