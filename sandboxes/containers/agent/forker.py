"""The first process of a container: forks programs, kills what is left of them, and reports how each ended.

`main` starts the agent: a filter of system calls for everything from here on, then the relay beside this process. The
forker gets descriptors and numbers from the relay, and reads none of the descriptors. Orphans become its children. Its
user differs from the programs', so they can neither signal nor trace it; besides, the kernel shields a first process.

Where programs run as root (`FOR_ROOT` follows on the command line), both processes become another user, and this one
keeps its capabilities.
"""

import contextlib
import errno
import os
import signal
import socket
import sys
from typing import NoReturn

from sandboxes.containers.agent.program import ROOT_CAPABILITIES, become_program, kernel, program
from sandboxes.containers.agent.relay import Relay
from sandboxes.containers.agent.wire import NUM_DESCRIPTORS, ORDER, REPORT, Order, Report
from sandboxes.inner.processes import (
    exited_children,
    forget_package,
    kill_group,
    kill_rest_of_group,
    kill_strays,
    serve,
)

MANY_SWEEPS = 4
"""Processes that survive this many sweeps fork faster than they can be killed one by one."""
MAX_SWEEPS = 1000
FOR_ROOT = "for-root"
AGENT_UID = 65532
AGENT_CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7 | ROOT_CAPABILITIES  # KILL, SETGID, SETUID


class Forker:
    """Forks and reaps. `relay` is a socket that keeps messages apart."""

    def __init__(self, relay: socket.socket, relay_pid: int) -> None:
        self._interpreter = None if program is None else program.Interpreter({})
        self._relay = relay
        self._relay_pid = relay_pid
        self._runs: dict[int, tuple[int, int]] = {}  # number and user, by pid

    def take_order(self) -> bool:
        """Obey an order; return False when the relay is gone, which ends with the host."""
        message, descriptors, _, _ = socket.recv_fds(self._relay, ORDER.size, NUM_DESCRIPTORS)
        if not message:
            return False
        kind, run_id, uid = ORDER.unpack(message)
        if kind == Order.START:
            self._start(run_id, uid, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == Order.KILL:
            for pid in [pid for pid, (number, _) in self._runs.items() if number == run_id]:
                kill_group(pid)
                self._kill_user(uid, but_for=pid)
        return True

    def _start(self, run_id: int, uid: int, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._report(Report.FAILED, run_id, error.errno or errno.EAGAIN)
            return
        if pid == 0:
            self._become(run_id, descriptors)
        self._runs[pid] = run_id, uid
        self._report(Report.STARTED, run_id, 0)

    def _become(self, run_id: int, descriptors: list[int]) -> NoReturn:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGXFSZ):  # Python ignores the second, which reports long files
                signal.signal(number, signal.SIG_DFL)
            request, *standard = descriptors
            become_program(self._interpreter, os.pread(request, os.fstat(request).st_size, 0), standard)
        except BaseException as error:  # the boundary: nothing of the program has run, so the host is told
            with contextlib.suppress(OSError):
                self._report(Report.FAILED, run_id, getattr(error, "errno", None) or 0)
        os._exit(255)

    def reap(self) -> None:
        """Take the status of what has ended; report a program only once all its descendants are dead too."""
        reports: list[tuple[int, ...]] = []
        for pid, *outcome in exited_children():
            if pid == self._relay_pid:
                os._exit(1)
            run_id, uid = self._runs.pop(pid, (None, 0))
            if run_id is not None:
                kill_rest_of_group(pid)
                self._kill_user(uid)
                reports.append((run_id, *outcome))
        kill_strays(self._runs, MAX_SWEEPS, spared=self._relay_pid, before_sweep=self._kill_many)
        for report in reports:
            self._report(Report.ENDED, *report)

    def _kill_user(self, uid: int, but_for: int | None = None) -> None:
        """Kill all processes of a user, unless another program runs as this user."""
        if any(other == uid for pid, (_, other) in self._runs.items() if pid != but_for):
            return
        kill_all_of(uid)

    def _kill_many(self, sweep: int) -> None:
        """If strays keep coming, kill all programs of all users; otherwise the whole container would have to die."""
        if sweep >= MANY_SWEEPS:
            for uid in {uid for _, uid in self._runs.values()}:
                kill_all_of(uid)

    def _report(self, kind: int, run_id: int, value: int, cpu_us: int = 0, peak_bytes: int = 0) -> None:
        self._relay.send(REPORT.pack(kind, run_id, value, cpu_us, peak_bytes))


def kill_all_of(uid: int) -> None:
    """Kill all processes of a user at once, faster than any can fork."""
    own = os.getuid()
    os.setresuid(uid, uid, own)  # a user who may signal these processes and no others
    if own and kernel is not None:
        kernel.set_capabilities(0, AGENT_CAPABILITIES)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    os.setresuid(own, own, own)
    if own and kernel is not None:
        kernel.set_capabilities(AGENT_CAPABILITIES, AGENT_CAPABILITIES)


def main(system_call_filter: bytes) -> None:
    """Run the agent in the first process of a container, whose standard streams are the stream to the host."""
    has_filter = False
    if kernel is not None and system_call_filter:
        kernel.load_filter(system_call_filter)
        has_filter = True
    forget_package()
    for_forker, for_relay = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    relay_pid = os.fork()
    if relay_pid == 0:
        for_forker.close()
        relay = Relay(0, 1, for_relay)
        if FOR_ROOT in sys.argv:
            os.setresuid(AGENT_UID, AGENT_UID, AGENT_UID)
        relay.serve(has_filter)
        os._exit(0)
    for_relay.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the stream belongs to the relay alone
        os.dup2(nothing, descriptor)
    if FOR_ROOT in sys.argv and kernel is not None:
        kernel.change_user(AGENT_UID, AGENT_CAPABILITIES)
    forker = Forker(for_forker, relay_pid)
    serve(for_forker, forker.reap, forker.take_order)
    os._exit(0)
