"""The last steps inside a jail, between its walls and its first program: disk, user, filter; then the launcher serves.

Run by `bubblewrap` or by `enter.py` as the first process of the jail, with the capabilities that these steps need; none
is left after them. Nothing of the host is in this process.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Generator
from typing import Any

from sandboxes.inner.kernel import (
    LIBC,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    check,
    drop_privileges,
    load_filter,
    prctl,
)
from sandboxes.inner.launcher import Launcher, control_socket, forget_package
from sandboxes.inner.program import Interpreter
from sandboxes.inner.wire import REPORT, ReportKind

MS_NOSUID, MS_NODEV, MS_BIND = 2, 4, 4096


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    check(LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def make_disk(num_bytes: int, num_inodes: int, uid: int, workdir: str) -> None:
    """One file system in memory, shared by all places that a program may write to, so that one limit bounds them."""
    options = f"size={num_bytes},nr_inodes={num_inodes},mode=0755"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, place in (("work", workdir), ("shm", "/dev/shm"), ("tmp", "/tmp")):  # /tmp last: it hides the others
        folder = f"/tmp/{name}"
        os.mkdir(folder, 0o700)
        if os.getuid() == 0:
            os.chown(folder, uid, uid)
        mount(folder, place, None, MS_BIND)


def forbid_user_namespaces() -> None:
    """Within the namespace of users that a host without root made; under root there is none, and the filter must do."""
    if os.getuid() != 0:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")


def become_nobody(uid: int) -> None:
    """Give up root for good; without it there is nothing to give up."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    drop_privileges()


@contextlib.contextmanager
def telling_the_host(control: socket.socket) -> Generator[None, None, None]:
    """A step that the system refuses is the end of this process, and its host learns why."""
    try:
        yield
    except OSError as error:
        control.sendall(REPORT.pack(ReportKind.FAILED, 0, error.errno or 0, 0, 0))
        os._exit(1)


def serve(control: socket.socket, config: dict[str, Any]) -> None:
    """Close the jail from inside and serve until the host is gone: the end of this process ends all others."""
    listener: socket.socket | None = None
    with telling_the_host(control):
        if config["proxy_port"] is not None:
            listener = socket.create_server(("127.0.0.1", config["proxy_port"]))
        make_disk(config["disk_bytes"], config["inodes"], config["uid"], config["workdir"])
        forbid_user_namespaces()
        become_nobody(config["uid"])
        prctl(PR_SET_DUMPABLE, 0)  # no program may look into this process, though it has the same user
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # anew: a change of user forgets it
        load_filter(bytes.fromhex(config["filter"]))
        os.chdir(config["workdir"])
    interpreter = Interpreter(config["env"])
    forget_package()
    folder = os.open(config["workdir"], os.O_RDONLY | os.O_DIRECTORY)
    Launcher(control, interpreter, jail_folder=folder, listener=listener).serve()
    os._exit(0)


def main() -> None:
    control = control_socket(int(sys.argv[1]))
    serve(control, json.loads(sys.argv[2]))
