"""A child process that calls its parent back.

- The child that has the key gets through, and its key is gone from its environment; others are turned away.
- Nobody is waited for any more once the child is gone; then the port is closed.
- A child without a key, with another address, or whose parent is gone says so.
"""

import os
import socket
import threading

import pytest

from areal_agent.callback import KEY_VARIABLE, Callback, announce, call_back
from areal_agent.errors import ConfigError, ProcessDied


def address_of(callback: Callback) -> str:
    option, address = callback.options
    assert option == "--connect"
    return address


def call(callback: Callback, key: bytes) -> socket.socket:
    host, port = address_of(callback).split(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(key)
    return sock


@pytest.mark.parametrize("wrong", [b"", b"short", b"x" * 64])
def test_only_the_child_with_the_key_gets_through(monkeypatch: pytest.MonkeyPatch, wrong: bytes) -> None:
    callback = Callback()
    stranger = call(callback, wrong)
    stranger.shutdown(socket.SHUT_WR)
    monkeypatch.setenv(KEY_VARIABLE, callback.variables[KEY_VARIABLE])
    theirs = call_back(address_of(callback))
    assert KEY_VARIABLE not in os.environ
    with stranger, theirs, callback.accept(lambda: True) as ours:
        assert stranger.recv(1) == b"", "it is turned away"
        theirs.sendall(b"hello")
        assert ours.recv(5) == b"hello"
        ours.sendall(b"you")
        assert theirs.recv(3) == b"you"
        announce("http://here", theirs)
        assert ours.recv(12) == b"http://here\n"
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(ProcessDied, match="the run that started this process is gone"):
        announce("http://here", theirs)


def test_a_child_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = Callback()
    looks = threading.Semaphore(0)

    def is_expected() -> bool:
        looks.release()
        return True

    accepted: list[socket.socket] = []
    parent = threading.Thread(target=lambda: accepted.append(callback.accept(is_expected)))
    parent.start()
    for _ in range(2):  # the second look comes after a wait
        looks.acquire()
    monkeypatch.setenv(KEY_VARIABLE, callback.variables[KEY_VARIABLE])
    with call_back(address_of(callback)):
        parent.join()
        accepted[0].close()


def test_a_child_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = Callback()
    address = address_of(callback)
    with pytest.raises(EOFError, match="the child ended before it called back"):
        callback.accept(lambda: False)
    monkeypatch.setenv(KEY_VARIABLE, "k")
    with pytest.raises(ConfigError, match=f"--connect {address}: the run that started this process does not answer"):
        call_back(address)


def test_a_child_that_no_run_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} is not set: only a run starts this command"):
        call_back("127.0.0.1:1")
    monkeypatch.setenv(KEY_VARIABLE, "k")
    with pytest.raises(ConfigError, match=r"--connect is '127\.0\.0\.1'; it must be HOST:PORT"):
        call_back("127.0.0.1")
