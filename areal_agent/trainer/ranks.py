"""The processes of the other ranks, as rank 0 sees them: it starts them, passes commands on, and ends them.

    main process ── client.py ─▶ rank 0 ─┬─ the same frame ─▶ rank 1        between the ranks: group.py
                                         └─ the same frame ─▶ rank 2 ...

A command that fails on one rank ends the others: what they share is in pieces then. A rank that dies by itself ends
rank 0 too, unless a command under way has told of it. It knows frames, not what they ask for.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from io import BufferedRWPair
from typing import Any, Self

from areal_agent.errors import ConfigError, ProcessDied
from areal_agent.process import LIFELINE_VARIABLE
from areal_agent.trainer.framing import Frame, read_frame

GRACE_S = 10.0
"""How long a rank may take to fail, or to end, when another has."""

logger = logging.getLogger(__name__)


class Ranks:
    """Ranks 1, 2, ... of a trainer. Make them with `start`, end them with `close`."""

    def __init__(self, ranks: list["_Rank"]) -> None:
        self._ranks = ranks
        self._is_broken = False
        self._is_over = threading.Event()  # a death is no news any more
        for rank in ranks:  # as daemons, for rank 0 may end before the one it watches
            threading.Thread(target=self._watch, args=(rank,), name=f"watch rank {rank.number}", daemon=True).start()

    @classmethod
    def start(cls, count: int) -> Self:
        """Start `count` processes, which log to where this one logs and end with it."""
        ranks: list[_Rank] = []
        try:
            for number in range(1, count + 1):
                ranks.append(_Rank(number))
        except OSError:
            for rank in ranks:
                rank.end(grace_s=0.0)
            raise
        return cls(ranks)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of ranks 1, 2, ..."""
        return tuple(rank.process_id for rank in self._ranks)

    @contextmanager
    def taking_part(self, command: Frame) -> Generator[None]:
        """Have the other ranks carry out `command` while this one does so inside.

        Raises what went wrong, here or there; ProcessDied when a rank is gone.
        """
        if self._is_broken:
            raise ProcessDied("the other ranks of this trainer were ended when a command failed; start it anew")
        own: Exception | None = None
        try:
            self._send(command)
            yield
        except Exception as error:  # told below, with what the others say
            own = error
        failures = [rank.failure(timeout_s=GRACE_S if own else None) for rank in self._ranks]
        if (cause := _cause(own, failures)) is not None:
            self._is_broken = bool(self._ranks)
            self.close(grace_s=0.0)
            if cause is not own:
                raise cause from own
            raise cause

    def _send(self, command: Frame) -> None:
        encoded = command.encode() if self._ranks else b""
        for rank in self._ranks:
            rank.send(encoded)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End them, and wait until they are gone."""
        self._is_over.set()
        for rank in self._ranks:
            rank.end(grace_s)

    def _watch(self, rank: "_Rank") -> None:
        """End this process when a rank is gone and nothing has told of it, as in a collective that waits for ever."""
        how = rank.wait()
        if not self._is_over.wait(GRACE_S):
            logger.error("rank %d %s, and this trainer cannot go on without it", rank.number, how)
            os._exit(1)


class _Rank:
    """One process, its end of a socket pair, and its lifeline: a pipe that closes when rank 0 ends, however it does."""

    def __init__(self, number: int) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "areal_agent.trainer", "--fd", str(theirs.fileno()), "--rank", str(number)],
                    env={**os.environ, LIFELINE_VARIABLE: str(read_end)},
                    pass_fds=(theirs.fileno(), read_end),
                )
        except OSError:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self._socket = ours
        self._file: BufferedRWPair = ours.makefile("rwb")

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, encoded: bytes) -> None:
        self._file.write(encoded)
        self._file.flush()

    def failure(self, timeout_s: float | None) -> Exception | None:
        """What befell it in the last command; None when it is well, or still at it after `timeout_s`."""
        self._socket.settimeout(timeout_s)
        try:
            answer = read_frame(self._file).header
        except TimeoutError:
            return None
        except (EOFError, OSError):
            return ProcessDied(f"rank {self.number} of the trainer {self.wait()}; its last words are in the log")
        return _error_of(self.number, answer["error"]) if "error" in answer else None

    def wait(self) -> str:
        """Wait until it is gone; how it ended."""
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def end(self, grace_s: float) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
            self._file.close()
        self._socket.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def _error_of(number: int, error: dict[str, Any]) -> Exception:
    if error["type"] == ConfigError.__name__:
        return ConfigError(error["message"])
    where = "".join(f"\n    {line}" for line in error["traceback"])
    return RuntimeError(f"rank {number} of the trainer failed: {error['type']}: {error['message']}{where}")


def _cause(own: Exception | None, failures: list[Exception | None]) -> Exception | None:
    """What to tell of what went wrong on rank 0 and on the others; None when nothing did.

    A death explains all the rest. What went wrong everywhere alike is told once; otherwise one may be the echo of
    another, a collective that broke off, and all are told.
    """
    others = [one for one in failures if one is not None]
    for kind in (ProcessDied, ConfigError):
        if told := [one for one in others if isinstance(one, kind)]:
            return told[0]
    different = [one for one in others if own is None or str(own) not in str(one)]
    if not different:
        return own
    return RuntimeError("\n".join(str(one) for one in [*different, *([f"rank 0: {own}"] if own else [])]))
