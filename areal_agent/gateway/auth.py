"""Who may call a gateway: keys, and the names by which it may be called.

The admin key and each session's key are kept and compared only as SHA-256. A session is looked up by that hash in a
dictionary; the timing reveals nothing, because nobody can choose the hash of a key that he guesses.

`HostCheck` protects against web pages that make their visitor's browser call 127.0.0.1. Such a call names the page in
`Origin` or, if the page's name was made to resolve to this machine (DNS rebinding), has that name in `Host`.
"""

import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from areal_agent.errors import RequestError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

MIN_HIDDEN_CHARS = 8
"""A shorter caller's key is not hidden in texts: it is no secret, and may be part of any word."""

_LIKE_A_KEY = re.compile(r"sk-[\w-]{12,}")


def new_key() -> str:
    """Return an unguessable key in the form that OpenAI's clients expect."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_hash(key: str) -> str:
    """Return the hexadecimal SHA-256 of a key, as the ledger keeps it."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def is_same_key(key_hash_a: str, key_hash_b: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(key_hash_a, key_hash_b)


def caller_hash(headers: Mapping[str, str]) -> str:
    """Return the hash of a request's key; raises RequestError when it has none."""
    key = _key_in(headers)
    if not key:
        raise RequestError(
            "no API key; send the header 'Authorization: Bearer sk-...', 'api-key' or 'x-api-key'",
            status=401,
            code="invalid_api_key",
        )
    return key_hash(key)


def without_keys(text: str, headers: Mapping[str, str]) -> str:
    """Remove the caller's key, and anything that looks like a key, from a text for an answer or a log.

    >>> without_keys("no model 'sk-0123456789abcdef'; you are hunter22", {"x-api-key": "hunter22"})
    "no model 'sk-***'; you are ***"
    """
    key = _key_in(headers)
    if len(key) >= MIN_HIDDEN_CHARS:
        text = text.replace(key, "***")
    return _LIKE_A_KEY.sub("sk-***", text)


def _key_in(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = headers.get("api-key") or headers.get("x-api-key") or ""
    return key.strip()


class HostCheck:
    """Accepts requests whose `Host` is a name of this gateway and whose `Origin`, if any, is that same host.

    The loopback names and the address that the connection came in on are always allowed, and `names` in addition.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = LOOPBACK_NAMES | {name.lower().strip("[]") for name in names}
        self._last_host = ""  # the last allowed one: nearly every request has the same

    def check(self, request: web.BaseRequest) -> None:
        """Raise RequestError for a request with another Host, or from a web page elsewhere."""
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
    """Return the name in a `Host` header without port and brackets; empty when it is invalid.

    >>> host_name("LocalHost:8000"), host_name("[::1]:8000"), host_name("a:b:c"), host_name("x@localhost")
    ('localhost', '::1', '', '')
    """
    try:
        parts = urlsplit(f"//{host}")
        is_plain = parts.netloc == host and "@" not in host and parts.port != 0
        return (parts.hostname or "") if is_plain else ""
    except ValueError:  # an invalid port or address
        return ""


def is_loopback(address: object) -> bool:
    """Return whether a socket address from asyncio is a loopback address."""
    return isinstance(address, tuple) and bool(address) and ip_address(address[0].partition("%")[0]).is_loopback


def _own_address(request: web.BaseRequest) -> str | None:
    address = request.transport.get_extra_info("sockname") if request.transport else None
    return address[0] if isinstance(address, tuple) else None
