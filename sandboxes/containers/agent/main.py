"""The start of the agent: a filter of system calls for everything from here on, then the two processes."""

import os
import socket
from functools import partial

from sandboxes.containers.agent.forker import Forker
from sandboxes.containers.agent.program import HAS_WARM_PYTHON, become_program
from sandboxes.containers.agent.relay import Relay
from sandboxes.containers.agent.wire import Has
from sandboxes.inner.processes import forget_package

try:
    from sandboxes.inner.kernel import load_filter
    from sandboxes.inner.program import Interpreter
except ImportError:  # no ctypes: the container engine's own filter stands alone
    load_filter = Interpreter = None


def main(system_call_filter: bytes) -> None:
    """Run the agent in the first process of a container, whose standard streams are the stream to the host."""
    has = Has.WARM_PYTHON if HAS_WARM_PYTHON else 0
    if load_filter is not None and system_call_filter:
        load_filter(system_call_filter)
        has |= Has.FILTER
    forget_package()
    for_forker, for_relay = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    relay_pid = os.fork()
    if relay_pid == 0:
        for_forker.close()
        Relay(0, 1, for_relay).serve(has)
        os._exit(0)
    for_relay.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the stream belongs to the relay alone
        os.dup2(nothing, descriptor)
    interpreter = None if Interpreter is None else Interpreter({})
    Forker(for_forker, relay_pid, partial(become_program, interpreter)).serve()
    os._exit(0)
