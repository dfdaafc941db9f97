"""Who may call a gateway: keys, and the names by which it may be called. Messages say where a key is, never the key.

The admin key and each session's key are kept and compared only as SHA-256. A session is looked up by that hash in a
dictionary; the timing reveals nothing, because nobody can choose the hash of a key that he guesses.

`HostCheck` protects against web pages that make their visitor's browser call 127.0.0.1. Such a call names the page in
`Origin` or, if the page's name was made to resolve to this machine (DNS rebinding), has that name in `Host`.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from aiohttp import web

from areal_agent.errors import ConfigError, RequestError
from areal_agent.files import create_private
from areal_agent.process import hide_keys

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

KEY_VARIABLE = "AREAL_AGENT_ADMIN_KEY"
KEY_FILE = "admin_key"

MIN_HIDDEN_CHARS = 8
"""A shorter caller's key is not hidden in texts: it is no secret, and may be part of any word."""


def new_key() -> str:
    """Return an unguessable key in the form that OpenAI's clients expect."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_hash(key: str) -> str:
    """Return the hexadecimal SHA-256 of a key, as the ledger keeps it."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def caller_hashes(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hashes of a request's keys, mostly one; raises RequestError when it has none."""
    keys = _keys_in(headers)
    if not keys:
        raise RequestError(
            "no API key; send the header 'Authorization: Bearer sk-...', 'api-key' or 'x-api-key'",
            status=401,
            code="invalid_api_key",
        )
    return tuple(map(key_hash, keys))


def without_keys(text: str, headers: Mapping[str, str]) -> str:
    """Remove the caller's key, and anything that looks like a key, from a text for an answer or a log.

    >>> without_keys("no model 'sk-0123456789abcdef'; you are hunter22", {"x-api-key": "hunter22"})
    "no model 'sk-***'; you are ***"
    """
    for key in _keys_in(headers):
        text = without_key(text, key)
    return hide_keys(text)


def without_key(text: str, key: str) -> str:
    r"""Remove a key from a text, also where JSON writes a character of it as an escape.

    >>> without_key(r'{"error": "no key abc\/def\u002B12 here"}', "abc/def+12")
    '{"error": "no key *** here"}'
    """
    if len(key) < MIN_HIDDEN_CHARS:
        return text
    plain = {one: rf"\\?{one}" if one == "/" else re.escape(one) for one in key}
    return re.sub("".join(rf"(?:{plain[one]}|\\u(?i:{ord(one):04x}))" for one in key), "***", text)


def _keys_in(headers: Mapping[str, str]) -> list[str]:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    keys = (token if scheme.lower() == "bearer" else "", headers.get("api-key", ""), headers.get("x-api-key", ""))
    return [key.strip() for key in keys if key.strip()]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminKey:
    """An admin key and where to find it."""

    key: str = field(repr=False)
    source: str
    file: Path | None = None  # the file that holds it
    is_new: bool = False  # `keep` has yet to write the file

    @classmethod
    def obtain(
        cls, *, given: str | None, file: Path | None, environment: Mapping[str, str], host: str, folder: Path
    ) -> Self:
        """Take the key from the command line, a file, the environment or `folder`; else make one to keep there.

        A gateway that other machines can reach needs a key chosen by its owner. Raises ConfigError.
        """
        if given is not None and file is not None:
            raise ConfigError("--admin-key and --admin-key-file both give a key; use one of them")
        if given is not None:
            return cls(key=usable_key(given, "--admin-key"), source="as given on the command line")
        if file is not None:
            return cls(key=_read_key(file), source=f"in {file}", file=file)
        if KEY_VARIABLE in environment:
            return cls(
                key=usable_key(environment[KEY_VARIABLE], KEY_VARIABLE), source=f"in the environment, as {KEY_VARIABLE}"
            )
        if host not in LOOPBACK_NAMES:
            raise ConfigError(
                f"--host {host} lets other machines connect, and there is no admin key: give --admin-key-file or set "
                f"{KEY_VARIABLE}, or listen on 127.0.0.1"
            )
        own, source = folder / KEY_FILE, f"in {folder / KEY_FILE} (mode 0600)"
        if own.exists():
            return cls(key=_read_key(own), source=source, file=own)
        return cls(key=new_key(), source=source, file=own, is_new=True)

    def keep(self) -> None:
        """Write a newly made key to its file with mode 0600. Call it once the gateway serves. Raises ConfigError."""
        if self.file is None or not self.is_new:
            return
        try:
            create_private(self.file, self.key)
        except OSError as error:
            raise ConfigError(f"the admin key file {self.file} cannot be written: {error.strerror}") from None


def find_admin_key(
    file: str | Path | None, environment: Mapping[str, str], *, option: str = "rollout.gateway_admin_key_file"
) -> str:
    """Return the key of a gateway elsewhere, from a file (named by `option`) or else the environment.

    Raises ConfigError.
    """
    if file is not None:
        if not Path(file).exists():
            raise ConfigError(
                f"{option}: there is no {file}; start the gateway first, from this folder, or "
                "give the file that it printed when it started"
            )
        return _read_key(Path(file))
    if KEY_VARIABLE not in environment:
        raise ConfigError(
            f"the gateway's admin key is missing; set {KEY_VARIABLE}, or {option} to the file that the gateway printed "
            "when it started"
        )
    return usable_key(environment[KEY_VARIABLE], KEY_VARIABLE)


def _read_key(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the admin key file {path} cannot be read: {cause}") from None
    return usable_key(text.strip(), str(path))


def usable_key(key: str, where: str) -> str:
    """Return a key that can be sent in an HTTP header. Raises ConfigError for any other."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} holds no usable key: a key is one word of printable ASCII characters")
    return key
