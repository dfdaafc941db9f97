"""A Python interpreter inside a sandbox that keeps its state from run to run.

The text of this file is sent to the sandbox as a program, so it stands alone. A request on stdin is the source of a
run, with a mark that the host has made up for it. When the run is over, its ending and the mark are written to stdout
and stderr: what came before is the run's output, in which no printed text can pass for the mark. During a run, whatever
comes on stdin makes the kernel interrupt the program and its process group, as Ctrl-C does.
"""

import contextlib
import fcntl
import linecache
import os
import resource
import signal
import struct
import sys
import types

MARK_BYTES = 16
REQUEST = struct.Struct(f"={MARK_BYTES}sI")
"""The mark, and the length of the source that follows."""
INTERRUPT = REQUEST.pack(b"", 0)
ENDING = struct.Struct("=BdQ")
"""Exit code, CPU seconds of the run, peak resident bytes of the interpreter; the mark follows."""
PEAK_UNIT = 1024 if sys.platform == "linux" else 1
MAX_DESCRIPTORS = 256


def main() -> None:
    above = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MAX_DESCRIPTORS) - 3  # where programs do not meet them
    requests, *outputs = (fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, above) for stream in range(3))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    fcntl.fcntl(requests, fcntl.F_SETOWN, -os.getpgrp())
    if sys.platform == "linux":  # elsewhere nothing interrupts a run, so that it is killed
        fcntl.fcntl(requests, fcntl.F_SETSIG, signal.SIGINT)
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    number, pid, cpu_s = 0, os.getpid(), 0.0
    while header := read_whole(requests, REQUEST.size):
        if header == INTERRUPT:  # its run was over
            continue
        mark, length = REQUEST.unpack(header)
        source = read_whole(requests, length).decode("utf-8", "surrogatepass")
        number += 1
        name = f"<run {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        fcntl.fcntl(requests, fcntl.F_SETFL, os.O_ASYNC)
        try:
            code = run(source, name, program.__dict__)
        except KeyboardInterrupt:  # it came after the run was over
            code = 1
        if os.getpid() != pid:  # a child that the program forked: the session belongs to its parent
            os._exit(code)
        fcntl.fcntl(requests, fcntl.F_SETFL, 0)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        before_s, cpu_s = cpu_s, usage.ru_utime + usage.ru_stime
        ending = ENDING.pack(code, cpu_s - before_s, usage.ru_maxrss * PEAK_UNIT)
        for output in outputs:
            os.write(output, ending + mark)
    os._exit(0)


def run(source: str, name: str, namespace: "dict[str, object]") -> int:
    """Run source as if it were a program of its own, and return its exit code."""
    code = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exec(compile(source, name, "exec", dont_inherit=True), namespace)
    except SystemExit as ending:
        code = code_of(ending)
    except BaseException as error:  # whatever the program raised becomes its traceback and exit code
        code = 1
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
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


def read_whole(descriptor: int, length: int) -> bytes:
    """Return `length` bytes, or none if the stream ends before."""
    data = b""
    while len(data) < length:
        chunk = os.read(descriptor, length - len(data))
        if not chunk:
            return b""
        data += chunk
    return data


if __name__ == "__main__":
    main()
