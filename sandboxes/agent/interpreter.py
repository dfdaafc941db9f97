"""The warm interpreter: a Python that is ready before the fork, so a source costs a fork and no start of Python."""

import atexit
import contextlib
import gc
import json
import linecache
import os
import site
import stat
import sys
import traceback
import types
from collections.abc import Callable, Generator, Mapping
from typing import NoReturn, TextIO

PROGRAM_FILE = "<program>"
READY = (json,)
"""Imported before the fork, since the judge needs it for every case. Nothing more is: a program's own file of that name
is no longer found."""


class Interpreter:
    """The part of a program's Python that is made before the fork, since each page that a child changes costs a copy.

    It holds what a bare interpreter has, and `json`.
    """

    def __init__(self) -> None:
        site.setquit()  # `exit()` and `quit()`, which -S leaves out and programs use
        compile("", PROGRAM_FILE, "exec")  # the first compilation sets the compiler up: 1 ms
        self._stdin = open_stdin()
        with pipe_in_place_of(1), pipe_in_place_of(2):  # streams remember what kind of file they were opened on
            self._stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
            self._stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        gc.disable()  # nothing here makes cycles; a collection would copy the pages that children share
        gc.freeze()

    def prepare(self, source: str, env: Mapping[str, str]) -> None:
        """Finish the interpreter in the child, whose standard descriptors are the program's."""
        gc.enable()
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [PROGRAM_FILE]
        sys.path.insert(0, "")  # modules in the working directory, as for any script
        sys.excepthook = print_traceback
        sys.stdin = self._stdin if stat.S_ISREG(os.fstat(0).st_mode) else open_stdin()
        sys.stdout, sys.stderr = self._stdout, self._stderr
        lines = [f"{line}\n" for line in source.split("\n")]
        linecache.cache[PROGRAM_FILE] = (len(source), None, lines, PROGRAM_FILE)  # for tracebacks


def open_stdin() -> TextIO:
    return open(0, encoding="utf-8", errors="surrogateescape", closefd=False)


@contextlib.contextmanager
def pipe_in_place_of(descriptor: int) -> Generator[None, None, None]:
    """Put a pipe, which is what programs write to, in the place of a descriptor for a while."""
    kept = os.dup(descriptor)
    read_end, write_end = os.pipe()
    os.dup2(write_end, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        for end in (kept, read_end, write_end):
            os.close(end)


def run_source(
    interpreter: Interpreter, source: str, env: Mapping[str, str], on_ready: Callable[[], object]
) -> NoReturn:
    """Run Python source as `__main__`, and end as Python does, but without the 7 ms that tearing it down takes.

    `on_ready` is called when all that happens from then on is the program's own.
    """
    exit_code = 0
    try:
        interpreter.prepare(source, env)
        on_ready()
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        exec(compile(source, PROGRAM_FILE, "exec", dont_inherit=True), program.__dict__)
    except SystemExit as ending:
        exit_code = code_of(ending)
    except BaseException as error:  # the boundary: whatever the program raised becomes its traceback and exit code
        exit_code = 1
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error, error.__traceback__)
    finish_interpreter()
    os._exit(exit_code)


def finish_interpreter() -> None:
    """End threads, exit handlers and buffers in the order in which Python does."""
    with contextlib.suppress(BaseException):
        if (threading := sys.modules.get("threading")) is not None:
            threading._shutdown()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # closed, or replaced by the program with anything
            stream.flush()


def code_of(ending: SystemExit) -> int:
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    with contextlib.suppress(BaseException):
        print(ending.code, file=sys.stderr)
    return 1


def print_traceback(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
    """Print a traceback like Python's own, without the frames of this file."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        lines = traceback.format_exception(kind, error, frames)
    except MemoryError:
        lines = ["MemoryError\n"]
    sys.stderr.write("".join(lines))
