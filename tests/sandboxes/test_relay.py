"""The relay alone, between a host and a forker that are played here, step by step.

1. it serves its host though the forker takes no order, and loses none; 2. the time of a program begins with its start,
however late that comes; 3. a program that could not be set up after all is told of once; 4. no more than a pipe holds
is told after a program's end, though others, which were handed its pipe, go on filling it; 5. a program that is to be
started as the forker dies was not set up badly: its sandbox is gone.
"""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sandboxes.agent import wire
from sandboxes.agent.wire import HEADER, NUM_DESCRIPTORS, ORDER, REPORT, Ask, Order, Report, Tell
from sandboxes.link import PACKAGE

PATIENCE_S = 60.0
RELAY = """
import socket, sys, types
package = sys.modules["sandboxes"] = types.ModuleType("sandboxes")  # without its imports, as in a sandbox
package.__path__ = [sys.argv[2]]
from sandboxes.agent.relay import Relay
Relay(0, 1, socket.socket(fileno=int(sys.argv[1]))).serve(bytes(2))
"""


class Stage:
    """Both ends of a relay."""

    def __init__(self, host: socket.socket, forker: socket.socket, relay: subprocess.Popen[bytes]) -> None:
        self.relay = relay
        self._host = host
        self._forker = forker
        for end in (host, forker):
            end.settimeout(PATIENCE_S)

    def ask(self, kind: Ask, number: int, body: bytes = b"") -> None:
        self._host.sendall(HEADER.pack(kind, number, len(body)) + body)

    def start(self, number: int, wall_s: float = 0.0, *, is_paced: bool = False) -> None:
        request = wire.REQUEST.pack(wire.Operation.EXECUTABLE, os.getuid(), os.getgid(), 0, 0, 0, 0, 0)
        self.ask(Ask.START, number, wire.START.pack(wall_s, -1, is_paced, -1) + request)

    def told(self) -> tuple[Tell, int, bytes]:
        kind, number, size = HEADER.unpack(self._read(HEADER.size))
        return Tell(kind), number, self._read(size)

    def order(self, stdout: int | None = None) -> tuple[int, int]:
        """Take an order; the program's stdout becomes the descriptor `stdout`."""
        order, descriptors, _, _ = socket.recv_fds(self._forker, ORDER.size, NUM_DESCRIPTORS)
        if stdout is not None:
            os.dup2(descriptors[2], stdout)
        for descriptor in descriptors:
            os.close(descriptor)
        kind, number, _ = ORDER.unpack(order)
        return kind, number

    def report(self, kind: int, number: int, value: int = 0) -> None:
        self._forker.send(REPORT.pack(kind, number, value, 0, 0))

    def lose_forker(self) -> bytes:
        """Return what is told yet."""
        self._forker.close()
        self.relay.send_signal(signal.SIGCONT)
        return b"".join(iter(lambda: self._host.recv(1024), b""))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._host.recv(size - len(data))
            assert more, "the relay has ended"
            data += more
        return data


@pytest.fixture
def stage() -> Iterator[Stage]:
    host, relays_host = socket.socketpair()
    forker, relays_forker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = relays_forker.fileno()
    command = [sys.executable, "-I", "-S", "-c", RELAY, str(descriptor), str(PACKAGE)]
    process = subprocess.Popen(command, stdin=relays_host, stdout=relays_host, pass_fds=[descriptor])
    relays_host.close()
    relays_forker.close()
    stage = Stage(host, forker, process)
    assert stage.told() == (Tell.READY, 0, b"\0\0")
    yield stage
    host.close()
    assert process.wait(PATIENCE_S) == 0
    forker.close()


def test_forker_that_takes_no_order(stage: Stage) -> None:
    """It may be waiting for the relay to take what it reports, among a thousand programs."""
    num_kills = 2000  # more than a socket has room for
    stage.start(1)
    for _ in range(num_kills):
        stage.ask(Ask.KILL, 1)
    stage.report(Report.STARTED, 1)
    assert stage.told() == (Tell.STARTED, 1, b"")
    assert [stage.order() for _ in range(1 + num_kills)] == [(Order.START, 1)] + [(Order.KILL, 1)] * num_kills


def test_time_begins_with_the_start(stage: Stage) -> None:
    stage.start(1, wall_s=0.001)
    for number in range(2, 30):
        stage.start(number)
    assert [stage.order() for _ in range(1, 30)] == [(Order.START, number) for number in range(1, 30)]
    stage.report(Report.STARTED, 1)
    assert stage.told() == (Tell.STARTED, 1, b"")
    assert stage.order() == (Order.KILL, 1)
    stage.report(Report.ENDED, 1, 9)
    kind, number, body = stage.told()
    assert (kind, number, wire.ENDED.unpack(body)[6]) == (Tell.ENDED, 1, wire.End.DEADLINE)


def test_program_that_could_not_be_set_up(stage: Stage) -> None:
    for number in (1, 2):
        stage.start(number)
    stage.report(Report.FAILED, 1, errno.EACCES)  # by its child, which was quicker than the forker
    stage.report(Report.STARTED, 1)
    stage.report(Report.ENDED, 1)
    stage.report(Report.STARTED, 2)
    assert [stage.told() for _ in range(2)] == [(Tell.FAILED, 1, bytes([errno.EACCES])), (Tell.STARTED, 2, b"")]


def test_pipe_that_others_fill_after_the_end(stage: Stage) -> None:
    stage.start(1, is_paced=True)
    stdout = os.open(os.devnull, os.O_WRONLY)
    stage.order(stdout)
    stage.report(Report.STARTED, 1)
    fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, 2**20)
    others = [subprocess.Popen(["cat", "/dev/zero"], stdout=stdout) for _ in range(4)]
    try:
        while stage.told()[0] is not Tell.STDOUT:  # one chunk; no more is asked for
            pass
        stage.report(Report.ENDED, 1)
        num_bytes = 0
        while (frame := stage.told())[0] is not Tell.ENDED:
            num_bytes += len(frame[2])
        assert num_bytes <= 2**20 + 1  # and a byte that says that stderr is closed
    finally:
        os.close(stdout)
        for other in others:
            other.kill()
            other.wait()


def test_forker_that_dies_before_it_has_an_order(stage: Stage) -> None:
    stage.relay.send_signal(signal.SIGSTOP)
    stage.start(1)  # which the relay hears before it hears of the death
    assert stage.lose_forker() == b""
