"""The parser and the exit codes that all commands share.

Exit codes: 0 done, 1 the work failed, 2 the command line or the config is wrong, 130 interrupted.
"""

import argparse
import difflib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from areal_agent.errors import NO_ROOM, ArealAgentError, ConfigError


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return the remedy for a misspelt name: `did you mean 'seed'?`, or all valid names when none is near."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(names)}"


class Parser(argparse.ArgumentParser):
    """An argparse parser without abbreviations, whose error on an unknown option names the nearest valid one."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: list[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        given = sys.argv[1:] if args is None else args
        self._refuse_unknown(word for word in given if word.startswith("--"))  # before a missing option is reported
        known, unknown = self.parse_known_intermixed_args(given, namespace)
        self._refuse_unknown(unknown)
        return known

    def _refuse_unknown(self, options: Iterable[str]) -> None:
        valid = [name for action in self._actions for name in action.option_strings]
        for option in (word.split("=")[0] for word in options):
            if option in ("--", *valid):
                continue
            takes_keys = any(action.dest == "overrides" for action in self._actions)
            hint = f" (a key of the config takes no dashes: {option.lstrip('-')}=VALUE)" if takes_keys else ""
            self.error(f"unknown option {option!r}; {nearest(option, valid)}{hint}")

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\ntry: {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def report(error: ArealAgentError) -> int:
    """Print an error with its notes, not as a traceback, and return the exit code."""
    print("\n".join((f"error: {error}", *getattr(error, "__notes__", ()))), file=sys.stderr, flush=True)
    return 2 if isinstance(error, ConfigError) else 1


class _LastingFile(io.FileIO):
    """A file that goes on as /dev/null when nobody reads it any more, or its terminal is gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


def _outlive_readers() -> None:
    for name in ("stdout", "stderr"):
        given = getattr(sys, name)
        if given is getattr(sys, f"__{name}__") and given is not None:  # None: it was closed before we began
            file: Any = _LastingFile(given.fileno(), "w", closefd=False)
            settings = {key: getattr(given, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            buffer = file if given.write_through else io.BufferedWriter(file)  # as PYTHONUNBUFFERED asks
            setattr(sys, name, io.TextIOWrapper(buffer, **settings))


def run_command(main: Callable[[], int], *, outlives_readers: bool = False) -> NoReturn:
    """Run a command's `main` and exit with its code. Errors of areal_agent become one line, not a traceback.

    One that `outlives_readers` goes on, saves and ends well when nobody reads its output: after Ctrl-C `| tee` is gone
    first, and `| head` soon.
    """
    if outlives_readers:
        _outlive_readers()
    try:
        code = main()
    except ArealAgentError as error:
        code = report(error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `... | head` has closed our output; there is nobody left to print to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(f"error: a disk is full: {error}; make room there", file=sys.stderr)
        code = 1
    sys.exit(code)
