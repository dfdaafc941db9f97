"""By which names a gateway may be called, and from which web pages: from none but its own.

A web page of a stranger can make its visitor's browser call 127.0.0.1. Such a call either names the page in `Origin`,
or, when the page's own name was made to resolve to this machine (DNS rebinding), bears that name in `Host`.
"""

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from areal_agent.errors import RequestError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class HostCheck:
    """Lets a request through whose `Host` is a name of this gateway and whose `Origin`, if any, is that very host.

    Always allowed: the loopback names, and the address that the connection came in on. `names` are those beside.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = LOOPBACK_NAMES | {name.lower().strip("[]") for name in names}
        self._last_host = ""  # that was one of the names: nearly every request bears the same

    def check(self, request: web.BaseRequest) -> None:
        """Raises RequestError for a request that came by another name, or from a web page elsewhere."""
        hosts = request.headers.getall("Host", ())
        if len(hosts) != 1:
            raise RequestError(f"the request has {len(hosts)} Host headers; send one", code="invalid_host")
        if hosts[0] != self._last_host:
            self._check_host(hosts[0], request)
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != hosts[0].lower():
            raise RequestError(
                f"web pages of {origin!r:.200} may not call this gateway; call it from a program, without Origin",
                status=403,
                code="origin_not_allowed",
            )

    def _check_host(self, host: str, request: web.BaseRequest) -> None:
        name = host_name(host)
        if name in self._names:
            self._last_host = host
        elif not name or name != _own_address(request):
            raise RequestError(
                f"this gateway is not {host!r:.200}; call it by the address that it listens on, "
                "or start it with --allowed-host and that name",
                status=403,
                code="host_not_allowed",
            )


def host_name(host: str) -> str:
    """The name in a `Host` header, without port and brackets; empty when it is none.

    >>> host_name("LocalHost:8000"), host_name("[::1]:8000"), host_name("a:b:c"), host_name("x@localhost")
    ('localhost', '::1', '', '')
    """
    try:
        parts = urlsplit(f"//{host}")
        is_plain = parts.netloc == host and "@" not in host and parts.port != 0
        return (parts.hostname or "") if is_plain else ""
    except ValueError:  # a port or an address that is none
        return ""


def is_loopback(address: object) -> bool:
    """Whether a socket's address, as asyncio tells it, is of this machine alone."""
    return isinstance(address, tuple) and bool(address) and ip_address(address[0].partition("%")[0]).is_loopback


def _own_address(request: web.BaseRequest) -> str | None:
    address = request.transport.get_extra_info("sockname") if request.transport else None
    return address[0] if isinstance(address, tuple) else None
