"""A Python interpreter inside a sandbox that keeps its state from run to run, and the relay that speaks for it.

The text of this file is sent to the sandbox as a program, so it stands alone and needs little of the standard library.

::

    host ── stdin: RUN, INTERRUPT ──▶ relay ── source ──▶ worker, the interpreter
         ◀── stdout: STDOUT, STDERR, DONE ──  ◀── its stdout, its stderr, done ──

Only the relay holds the pipes to the host, and no program can open them: whatever a program prints arrives as data.
The worker reports the end of a run with a ticket that is new for each run. When the worker dies, the relay dies in the
same way, so that its end has the status that the kernel gave.
"""

import contextlib
import linecache
import os
import select
import signal
import struct
import sys
import traceback
import types

FRAME = struct.Struct("=BQI")  # as `wire.HEADER`
"""The kind, 0, and the length of what follows: the source of RUN, the data of a report."""
RUN, INTERRUPT = 1, 2
STDOUT, STDERR, DONE = 1, 2, 3
ENDING = struct.Struct("=BdQ")
"""The data of DONE: exit code, CPU seconds of the run, peak resident bytes of the interpreter."""
TO_WORKER = struct.Struct("=8sI")
TICKET_BYTES = 8
CHUNK_BYTES = 65_536
PR_SET_DUMPABLE = 4


def work(sources: int, done: int) -> None:
    """Run programs until the relay closes the pipe."""
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    number, pid = 0, os.getpid()
    while header := read_whole(sources, TO_WORKER.size):
        ticket, length = TO_WORKER.unpack(header)
        source = read_whole(sources, length).decode("utf-8", "surrogateescape")
        number += 1
        name = f"<run {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            code = run(source, name, program.__dict__)
        except KeyboardInterrupt:  # it came after the run was over
            code = 1
        if os.getpid() != pid:  # a child that the program forked: the session belongs to its parent
            os._exit(code)
        os.write(done, ticket + bytes([code]))


def run(source: str, name: str, namespace: dict[str, object]) -> int:
    """Run source as if it were a program of its own, and return its exit code."""
    code = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exec(compile(source, name, "exec", dont_inherit=True), namespace)
    except SystemExit as ending:
        code = code_of(ending)
    except BaseException as error:  # whatever the program raised becomes its traceback and exit code
        code = 1
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        with contextlib.suppress(BaseException):
            traceback.print_exception(type(error), error, frames)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):  # closed, or replaced by the program with anything
                stream.flush()
    return code


def code_of(ending: SystemExit) -> int:
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    with contextlib.suppress(BaseException):
        print(ending.code, file=sys.stderr)
    return 1


class Relay:
    """Passes requests from the host to one worker, and its output and endings back."""

    def __init__(self, worker: int, sources: int, stdout: int, stderr: int, done: int) -> None:
        self.worker = worker
        self.sources = sources
        self.kinds = {stdout: STDOUT, stderr: STDERR}
        self.done = done
        self.said = b""  # unread data from `done`
        self.ticket = b""  # of the run in progress
        self.cpu_s = 0.0  # CPU seconds used before this run

    def serve(self) -> None:
        """Relay until the host or the worker is gone."""
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write, self.done, *self.kinds):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # the pipe is written only for handled signals
        watched = [0, self.done, wake_read, *self.kinds]
        while True:
            for descriptor in select.select(watched, [], [])[0]:
                if descriptor == 0:
                    self.take_request()
                elif descriptor == wake_read:
                    read_some(wake_read)
                elif (self.hear_done() if descriptor == self.done else self.forward(descriptor)) == b"":
                    watched.remove(descriptor)
            self.follow_the_dead()

    def take_request(self) -> None:
        header = read_whole(0, FRAME.size)
        if not header:
            os.kill(self.worker, signal.SIGKILL)
            os._exit(0)
        kind, _, length = FRAME.unpack(header)
        if kind == INTERRUPT and self.ticket:
            os.killpg(0, signal.SIGINT)  # also the processes that the program waits for
        elif kind == RUN:
            source = read_whole(0, length)
            self.ticket, self.said = os.urandom(TICKET_BYTES), b""
            self.cpu_s, _ = usage_of(self.worker)
            with contextlib.suppress(BrokenPipeError):  # it is dying
                write_whole(self.sources, TO_WORKER.pack(self.ticket, length) + source)

    def hear_done(self) -> bytes | None:
        """Read from `done`, and report the run's end if its ticket came."""
        data = read_some(self.done)
        self.said = (self.said + (data or b""))[-4096:]
        place = self.said.find(self.ticket) if self.ticket else -1
        if place >= 0 and len(self.said) > place + TICKET_BYTES:
            code = self.said[place + TICKET_BYTES]
            self.drain()
            self.ticket, self.said = b"", b""
            cpu_s, peak_bytes = usage_of(self.worker)
            self.report(DONE, ENDING.pack(code, max(0.0, cpu_s - self.cpu_s), peak_bytes))
        return data

    def forward(self, descriptor: int) -> bytes | None:
        """Pass on and return what was printed, as `read_some` does."""
        if data := read_some(descriptor):
            self.report(self.kinds[descriptor], data)
        return data

    def drain(self) -> None:
        for descriptor in self.kinds:
            while self.forward(descriptor):
                pass

    def follow_the_dead(self) -> None:
        pid, status = os.waitpid(self.worker, os.WNOHANG)
        if pid:
            self.drain()
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                with contextlib.suppress(OSError):  # SIGKILL has no handler
                    signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(code)

    def report(self, kind: int, data: bytes) -> None:
        write_whole(1, FRAME.pack(kind, 0, len(data)) + data)


def usage_of(pid: int) -> tuple[float, int]:
    """Return CPU seconds and peak resident bytes of a process; zeros where there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/status") as file:
            peak_kb = next((int(line.split()[1]) for line in file if line.startswith("VmHWM")), 0)
    except (OSError, ValueError):
        return 0.0, 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), peak_kb * 1024


def read_some(descriptor: int) -> bytes | None:
    """Return what is there: None if there is nothing yet, b"" at the end."""
    try:
        return os.read(descriptor, CHUNK_BYTES)
    except BlockingIOError:
        return None


def read_whole(descriptor: int, length: int) -> bytes:
    """Return `length` bytes, or none if the stream ends before."""
    data = bytearray()
    while len(data) < length:
        chunk = os.read(descriptor, min(length - len(data), CHUNK_BYTES))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


def write_whole(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def hide() -> None:
    """Keep other processes from looking into this one; where that fails, a program can fake how its own runs end."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0)


def main() -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipes = [os.pipe() for _ in range(4)]  # sources, stdout, stderr, done
    (sources_read, sources), (stdout, stdout_write), (stderr, stderr_write), (done, done_write) = pipes
    worker = os.fork()
    if worker == 0:
        for target, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), stdout_write, stderr_write)):
            os.dup2(descriptor, target)
        kept = {sources_read, done_write}
        for descriptor in range(3, max(max(pipe) for pipe in pipes) + 2):
            if descriptor not in kept:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        work(sources_read, done_write)
        os._exit(0)
    hide()
    for descriptor in (sources_read, stdout_write, stderr_write, done_write):
        os.close(descriptor)
    Relay(worker, sources, stdout, stderr, done).serve()


if __name__ == "__main__":
    main()
