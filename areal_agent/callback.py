"""How a child process calls its parent back: over TCP, with a key that is good for one call.

    parent   Callback(host) ── options: --connect HOST:PORT, variables: the key ──▶ starts the child
    child    call_back("HOST:PORT") ── connects and sends the key ──▶ Callback.accept: a socket for each of the two

A child on another machine inherits no socket, so none does: there is one mechanism for all. The key travels in the
child's environment, because everybody on a machine can read its command lines; the child removes it there when it
calls. The end of either process closes the connection. TCP keep-alive breaks a silent one whose other machine is gone;
with data on its way that takes TCP many minutes, so whoever knows of the loss closes the connection.
"""

import contextlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from areal_agent.errors import ConfigError, ProcessDied

LOOPBACK = "127.0.0.1"

KEY_VARIABLE = "AREAL_AGENT_CALL_KEY"
KEY_CHARS = 64

POLL_S = 0.2
KEY_TIMEOUT_S = 5.0
"""The time in which a caller has to send its key, since the next one waits for it."""

CONNECT_TIMEOUT_S = 30.0

IDLE_S, PROBE_EVERY_S, NUM_PROBES = 4, 2, 3
"""A silent connection is probed after `IDLE_S` and broken after `NUM_PROBES` unanswered probes: after 10 s."""


class Callback:
    """The expected call of one child. Give the child `options` and `variables`, then `accept` its call."""

    def __init__(self, host: str = LOOPBACK) -> None:
        """Listen on any free port of `host`, an address of this machine at which the child can find it."""
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._key = secrets.token_hex(KEY_CHARS // 2)

    @property
    def options(self) -> Sequence[str]:
        """The words that end the child's command line."""
        host, port, *_ = self._listener.getsockname()
        return ["--connect", f"{host}:{port}"]

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables of the child's environment."""
        return {KEY_VARIABLE: self._key}

    def accept(self, is_expected: Callable[[], bool]) -> socket.socket:
        """Wait for the call, while `is_expected`; callers without the key are turned away. It comes only once.

        Raises EOFError when the child is no longer expected, usually because it has ended.
        """
        with self:
            self._listener.settimeout(POLL_S)
            while is_expected():
                with contextlib.suppress(TimeoutError):  # nobody has called yet
                    sock, _ = self._listener.accept()
                    if hmac.compare_digest(_read_key(sock), self._key.encode()):
                        return _ready(sock)
                    sock.close()
        raise EOFError("the child ended before it called back")

    def close(self) -> None:
        """Expect no call any more."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def call_back(address: str) -> socket.socket:
    """Call the parent at `HOST:PORT` with the key of the environment, which is removed there. Raises ConfigError."""
    key = os.environ.pop(KEY_VARIABLE, None)
    if key is None:
        raise ConfigError(f"{KEY_VARIABLE} is not set: only a run starts this command, for a process of its own")
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(f"--connect is {address!r}; it must be HOST:PORT")
    try:
        sock = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
        sock.sendall(key.encode())
    except OSError as error:
        raise ConfigError(f"--connect {address}: the run that started this process does not answer: {error}") from None
    return _ready(sock)


def announce(url: str, sock: socket.socket) -> None:
    """Tell the parent where this process serves. Raises ProcessDied when it is gone."""
    try:
        sock.sendall(f"{url}\n".encode())
    except OSError as error:
        raise ProcessDied(f"the run that started this process is gone: {error}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _read_key(sock: socket.socket) -> bytes:
    """Return what a caller sends as its key; less when it hangs up, or is slow."""
    sock.settimeout(KEY_TIMEOUT_S)
    key = b""
    with contextlib.suppress(OSError):
        while len(key) < KEY_CHARS and (piece := sock.recv(KEY_CHARS - len(key))):
            key += piece
    return key


def _ready(sock: socket.socket) -> socket.socket:
    """Return the socket without a time limit, for small messages at once, watched by keep-alive probes."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_EVERY_S), ("TCP_KEEPCNT", NUM_PROBES)):
        if hasattr(socket, name):  # macOS has another name for the first
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
