"""The relay between the one stream to the host and the pipes of the programs.

It collects what programs print, up to their bound, keeps their deadlines, and adds to every end what the sandbox's
control group counted meanwhile. When the stream ends, the relay ends, and the sandbox with it. The forker may wait for
the relay, but the relay waits only for the host: orders that the forker has no room for are queued here.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

from sandboxes.agent import wire
from sandboxes.agent.wire import Ask, End, Order, Report, Tell

CHUNK_BYTES = 65_536
CHUNKS_OF_PIPE = 16
"""As many as a pipe can hold. A program that was handed the pipe of another may go on filling it."""
PAUSE_S = 0.01
"""How long a program's start and output may wait to be sent with its end, as each message wakes four processes."""
COUNTERS = (b"oom_kill", b"max")
"""The names of the counters of processes that ran out of memory and of refused forks, each in its file."""
FILES_OF_COUNTERS = (
    ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/pids.events"),
    ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/pids/pids.events"),
)
"""Those of a container, in version 2 or 1."""
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class Run:
    """One program and its pipes."""

    def __init__(self, number: int, uid: int, wall_s: float, room: int, is_paced: bool) -> None:
        self.number = number
        self.uid = uid
        self.wall_s = wall_s or float("inf")
        self.started_s: float | None = None
        self.deadline_s = float("inf")  # `wall_s` after its start
        self.room = room if room >= 0 else float("inf")  # bytes that it may still print
        self.is_paced = is_paced  # whether a chunk goes to the host only once the last was taken
        self.pause_s = 0.0 if is_paced else PAUSE_S  # who talks with the program is told at once
        self.end = End.ITSELF
        self.is_cut = False  # whether it printed more than it may
        self.counted: list[int] = []  # the group's counters at its start
        self.pid = 0  # as the forker sees it
        self.stdin: int | None = None
        self.pending = bytearray()  # on its way to stdin
        self.is_stdin_ending = False
        self.outputs: dict[int, Tell] = {}  # by descriptor


class Relay:
    """The relay; `source` and `out` are the descriptors of the stream, `counters` the files of `COUNTERS`, if any."""

    def __init__(
        self, source: int, out: int, forker: socket.socket, counters: Sequence[int] = (), *, has_walls: bool = True
    ) -> None:
        self._source = source
        self._out = out
        self._forker = forker
        forker.setblocking(False)
        self._orders: deque[tuple[bytes, Run, list[int]]] = deque()  # each with its descriptors
        self._poll = select.poll()
        self._counters = counters
        self._has_walls = has_walls
        self._runs: dict[int, Run] = {}
        self._run_of: dict[int, Run] = {}  # by descriptor of a pipe
        self._received = bytearray()
        self._untold = bytearray()  # for the host
        self._tell_at_s = float("inf")  # when that must be sent at the latest

    def serve(self, told: bytes) -> None:
        """Tell the host that the agent is ready, and relay until it or the forker is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._poll.register(self._source, READABLE)
        self._poll.register(self._forker, READABLE)
        self._tell(Tell.READY, 0, told)
        with contextlib.suppress(ConnectionError):
            while True:
                if time.monotonic() >= self._tell_at_s:
                    self._tell_all()
                for descriptor, _events in self._poll.poll(self._patience_ms()):
                    if descriptor == self._source:
                        if not self._hear():
                            return
                    elif descriptor == self._forker.fileno():
                        self._send_orders()
                        if not self._hear_reports():
                            self._kill_left()
                            return
                    elif (run := self._run_of.get(descriptor)) is not None:
                        if descriptor == run.stdin:
                            self._feed(run)
                        else:
                            self._pass_on(run, descriptor)
                self._end_late_runs()

    def _kill_left(self) -> None:
        """Kill what a dead forker leaves where there are no walls; with walls all is dead with it."""
        for run in self._runs.values():
            if run.pid and not self._has_walls:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(run.pid, signal.SIGKILL)

    # ── from the host ─────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self) -> bool:
        data = os.read(self._source, CHUNK_BYTES)
        self._received += data
        for frame in wire.whole_frames(self._received):
            self._obey(*frame)
        return bool(data)

    def _obey(self, kind: int, number: int, body: bytes) -> None:
        run = self._runs.get(number)
        if kind == Ask.START:
            self._start(number, body)
        elif kind == Ask.PING:
            self._tell(Tell.PONG, 0, b"")
        elif run is None:
            return  # it has ended
        elif kind == Ask.STDIN:
            run.pending += body
            self._feed(run)
        elif kind == Ask.CLOSE_STDIN:
            run.is_stdin_ending = True
            self._feed(run)
        elif kind == Ask.KILL:
            self._order(Order.KILL, run, [])
        elif kind == Ask.MORE:
            for descriptor, stream in run.outputs.items():
                if stream == body[0]:
                    self._poll.register(descriptor, READABLE)

    def _start(self, number: int, body: bytes) -> None:
        *told, num_stdin = wire.START.unpack_from(body)
        end_of_stdin = wire.START.size + max(0, num_stdin)
        request = body[end_of_stdin:]
        _, uid, gid, *_ = wire.REQUEST.unpack_from(request)
        run = Run(number, uid, *told)
        run.counted = self._count()
        descriptors: list[int] = []
        try:
            descriptors.append(file_of(request))
            with acting_as(uid, gid):
                if num_stdin >= 0:
                    stdin = file_of(body[wire.START.size : end_of_stdin])
                else:
                    stdin, run.stdin = os.pipe()
                descriptors.append(stdin)
                for stream in (Tell.STDOUT, Tell.STDERR):
                    output, end = os.pipe()
                    descriptors.append(end)
                    run.outputs[output] = stream
        except OSError as error:
            self._refuse(run, descriptors, error)
            return
        self._runs[number] = run
        for descriptor in (run.stdin, *run.outputs):
            if descriptor is not None:
                os.set_blocking(descriptor, False)
                self._run_of[descriptor] = run
        for descriptor in run.outputs:
            self._poll.register(descriptor, READABLE)
        self._order(Order.START, run, descriptors)

    def _refuse(self, run: Run, descriptors: list[int], error: OSError) -> None:
        self._runs.pop(run.number, None)
        self._close(run)
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell(Tell.FAILED, run.number, bytes([error.errno or 255]))

    # ── to the forker ─────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, kind: int, run: Run, descriptors: list[int]) -> None:
        self._orders.append((wire.ORDER.pack(kind, run.number, run.uid), run, descriptors))
        self._send_orders()

    def _send_orders(self) -> None:
        """Send queued orders, in order, as far as the forker has room."""
        while self._orders:
            order, run, descriptors = self._orders[0]
            try:
                socket.send_fds(self._forker, [order], descriptors)
            except BlockingIOError:
                self._poll.register(self._forker, READABLE | select.POLLOUT)
                return
            except ConnectionError:
                return  # the forker is dead, which its end of the stream tells next
            except OSError as error:
                if not descriptors:
                    raise
                self._refuse(run, [], error)
            for descriptor in descriptors:
                os.close(descriptor)
            self._orders.popleft()
        self._poll.register(self._forker, READABLE)

    # ── to and from the programs ──────────────────────────────────────────────────────────────────────────────────

    def _feed(self, run: Run) -> None:
        """Write what stdin takes now, and wait for room for the rest."""
        if run.stdin is None:
            run.pending.clear()
            self._tell(Tell.TAKEN, run.number, b"\1")
            return
        is_broken = False
        try:
            while run.pending:
                del run.pending[: os.write(run.stdin, run.pending[:CHUNK_BYTES])]
        except BlockingIOError:
            self._poll.register(run.stdin, select.POLLOUT)
            return
        except BrokenPipeError:
            is_broken = True
            run.pending.clear()
        if is_broken or run.is_stdin_ending:
            self._drop(run.stdin)
            run.stdin = None
        else:
            self._unwatch(run.stdin)
        if run.is_paced:
            self._tell(Tell.TAKEN, run.number, bytes([is_broken]))

    def _pass_on(self, run: Run, descriptor: int) -> bool:
        """Read once from a program, and return whether there may be more."""
        stream = run.outputs[descriptor]
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            del run.outputs[descriptor]
            self._drop(descriptor)
            if run.is_paced:
                self._tell(Tell.CLOSED, run.number, bytes([stream]))
            return False
        if run.is_paced:
            self._unwatch(descriptor)
        if len(data) > run.room:
            data = data[: int(run.room)]
            run.is_cut = True
            for output in run.outputs:
                self._unwatch(output)
            self._stop(run, End.OUTPUT)
        run.room -= len(data)
        if data:
            self._tell(stream, run.number, data, within_s=run.pause_s)
        return not run.is_cut

    def _stop(self, run: Run, reason: End) -> None:
        run.end = run.end or reason
        run.deadline_s = float("inf")
        self._order(Order.KILL, run, [])

    def _end_late_runs(self) -> None:
        now_s = time.monotonic()
        for run in list(self._runs.values()):
            if run.deadline_s <= now_s:
                self._stop(run, End.DEADLINE)

    def _patience_ms(self) -> float | None:
        next_s = min(self._tell_at_s, *(run.deadline_s for run in self._runs.values()), float("inf"))
        return None if next_s == float("inf") else max(0.0, next_s - time.monotonic()) * 1000 + 1

    # ── from the forker ───────────────────────────────────────────────────────────────────────────────────────────

    def _hear_reports(self) -> bool:
        """Hear what the forker reports; return False when it is gone."""
        with contextlib.suppress(BlockingIOError):
            while report := self._forker.recv(wire.REPORT.size):
                self._on_report(*wire.REPORT.unpack(report))
            return False
        return True

    def _on_report(self, kind: int, number: int, value: int, cpu_us: int, peak_bytes: int) -> None:
        run = self._runs.get(number)
        if run is None:
            return  # its child could not be set up, and told us before the forker did
        if kind == Report.STARTED:
            run.pid = value
            run.started_s = time.monotonic()
            run.deadline_s = run.started_s + run.wall_s
            self._tell(Tell.STARTED, number, b"", within_s=run.pause_s)
            return
        del self._runs[number]
        counted = [now - before for now, before in zip(self._count(), run.counted, strict=True)]
        if kind != Report.ENDED:
            if value != errno.EAGAIN or not counted[1]:
                self._close(run)
                self._tell(Tell.FAILED, number, bytes([value & 0xFF]))
                return
            value = signal.SIGKILL  # other programs had taken all processes: not the sandbox's fault
        for descriptor in list(run.outputs):  # drain the pipes without waiting for anybody
            for _ in range(CHUNKS_OF_PIPE):
                if run.is_cut or not self._pass_on(run, descriptor):
                    break
        self._close(run)
        wall_us = 0 if run.started_s is None else int((time.monotonic() - run.started_s) * 1e6)
        told = wire.ENDED.pack(value, wall_us, cpu_us, peak_bytes, *counted, run.end, run.is_cut)
        self._tell(Tell.ENDED, number, told)

    def _count(self) -> list[int]:
        if not self._counters:
            return [0 for _ in COUNTERS]
        texts = (os.pread(file, 4096, 0).split() for file in self._counters)
        return [int(words[words.index(name) + 1]) for words, name in zip(texts, COUNTERS, strict=True)]

    # ── descriptors ───────────────────────────────────────────────────────────────────────────────────────────────

    def _close(self, run: Run) -> None:
        for descriptor in (run.stdin, *run.outputs):
            if descriptor is not None:
                self._drop(descriptor)
        run.stdin = None
        run.outputs.clear()

    def _drop(self, descriptor: int) -> None:
        self._unwatch(descriptor)
        self._run_of.pop(descriptor, None)
        os.close(descriptor)

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)

    def _tell(self, kind: int, number: int, body: bytes, within_s: float = 0.0) -> None:
        self._untold += wire.HEADER.pack(kind, number, len(body)) + body
        self._tell_at_s = min(self._tell_at_s, time.monotonic() + within_s)
        if len(self._untold) >= CHUNK_BYTES:
            self._tell_all()

    def _tell_all(self) -> None:
        """Send everything; this may block, since the host always reads."""
        at = 0
        while at < len(self._untold):
            at += os.write(self._out, self._untold[at : at + CHUNK_BYTES])
        self._untold.clear()
        self._tell_at_s = float("inf")


def files_of_counters() -> list[int]:
    """Open the files of the counters of the container around this process, if it shows them."""
    shown = next((paths for paths in FILES_OF_COUNTERS if all(map(os.path.exists, paths))), ())
    return [os.open(path, os.O_RDONLY) for path in shown]


def file_of(data: bytes) -> int:
    """Return a descriptor, at offset 0, of a file without a name."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("data")
    else:
        path = f"/tmp/{os.urandom(16).hex()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
    at = 0
    while at < len(data):
        at += os.pwrite(descriptor, data[at:], at)
    return descriptor


@contextlib.contextmanager
def acting_as(uid: int, gid: int):
    """Make files and pipes as this user, who may then open them by name, such as `/dev/stdin`.

    A relay that is not root cannot. Its programs are then the same user, or root, who may open anything.
    """
    if os.getuid() != 0:
        yield
        return
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
