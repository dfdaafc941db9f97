"""`GET` and `POST /rl/engines`: list the servers that sample for a run, and let one join or leave while it goes on.

A run serves these calls on a port of their own with a key of their own: its gateways take no sessions from outside, and
with `rollout.workers` there are several gateways.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Protocol
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import AfterValidator

from areal_agent.engine.fleet.fleet import MemberReport
from areal_agent.errors import EngineError, EngineRejected, RequestError, ServerRefused
from areal_agent.gateway.bodies import Body, BodyReader, Limits, Name, wrong
from areal_agent.gateway.metrics import Counters
from areal_agent.gateway.rollouts import Callers
from areal_agent.gateway.server import ServedGateway, json_reply, serve_app
from areal_agent.gateway.sessions import Sessions
from areal_agent.types import JsonObject

PATH = "/rl/engines"

_WORD = re.compile(r"[!-~]+")


def _server_url(text: str) -> str:
    """Check and normalise a base URL, `http://host:port`."""
    must = wrong("the base URL of a server, such as 'http://127.0.0.1:30000'")
    try:
        parts = urlsplit(text)
        is_plain = bool(parts.hostname) and parts.port != 0 and not (parts.username or parts.query or parts.fragment)
    except ValueError:  # an invalid port or address
        raise must from None
    is_base = parts.scheme in ("http", "https") and parts.path in ("", "/") and bool(_WORD.fullmatch(text))
    if not (is_plain and is_base):
        raise must
    return f"{parts.scheme}://{parts.netloc.lower()}"


ServerUrl = Annotated[Name, AfterValidator(_server_url)]


class EnginesRequest(Body):
    """The server that joins or leaves."""

    add: ServerUrl | None = None
    remove: ServerUrl | None = None


class EngineServers(Protocol):
    """The servers of an engine. Implementation: `cluster.engines.RunningEngine`."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The base URLs of all servers."""
        ...

    async def survey(self) -> tuple[MemberReport, ...]:
        """Return the state of every server."""
        ...

    async def add(self, url: str) -> None:
        """Add a server. Raises EngineError."""
        ...

    async def remove(self, url: str) -> None:
        """Remove a server. Raises EngineError."""
        ...


async def serve_engine_servers(servers: EngineServers, admin_key: str) -> ServedGateway:
    """Serve the calls about the servers on a free port of this machine, for callers with the key."""
    limits, counters = Limits(), Counters()
    calls = EngineServerCalls(servers, Callers(admin_key, Sessions()), BodyReader(limits))
    app = web.Application(client_max_size=limits.max_body_bytes)
    app.router.add_get(PATH, calls.show)
    app.router.add_post(PATH, calls.change)
    return await serve_app(app, "127.0.0.1", 0, limits=limits, counters=counters)


@dataclass(frozen=True, slots=True)
class EngineServerCalls:
    """The two handlers. Both answer with the current list of servers."""

    servers: EngineServers
    callers: Callers
    bodies: BodyReader

    async def show(self, request: web.Request) -> web.Response:
        self.callers.require_admin(request)
        return await self._listing()

    async def change(self, request: web.Request) -> web.Response:
        """Add or remove a server. Returns when the added one serves, or the removed one is gone."""
        self.callers.require_admin(request)
        body = EnginesRequest.read(await self.bodies.control(request))
        added, removed = body.add, body.remove
        if (added is None) == (removed is None):
            raise RequestError(
                f"the body names {'no server' if added is None else 'two servers'}; send either "
                '{"add": URL} or {"remove": URL}',
                code="invalid_value",
            )
        try:
            if added is not None:
                await self.servers.add(self._known(added))
            elif removed is not None:
                await self.servers.remove(self._known(removed))
        except EngineError as error:
            raise _refusal(error) from error
        return await self._listing()

    def _known(self, url: str) -> str:
        """Return the URL under which this server is already listed, else the URL itself."""
        return next((known for known in self.servers.urls if _address(known) == _address(url)), url)

    async def _listing(self) -> web.Response:
        return json_reply({"engines": [_row(one) for one in await self.servers.survey()]})


def _row(report: MemberReport) -> JsonObject:
    return {
        "url": report.url,
        "state": report.state,
        "reason": report.reason or None,
        "version": None if report.version is None else str(report.version),
        "requests": report.num_requests,
    }


def _address(url: str) -> tuple[str, int]:
    """Return the host and port of a URL, without looking up names.

    >>> _address("http://LocalHost:80/") == _address("http://127.0.0.1")
    True
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    return "127.0.0.1" if host == "localhost" else host, parts.port or (443 if parts.scheme == "https" else 80)


def _refusal(error: EngineError) -> RequestError:
    if isinstance(error, ServerRefused):
        status = 404 if error.code == "unknown_server" else 409
        return RequestError(str(error), status=status, code=error.code)
    if isinstance(error, EngineRejected):
        return RequestError(f"the server cannot join this run: {error}", status=409, code="another_engine")
    return RequestError(f"the server does not work with this run: {error}", status=502, code="server_failed")
