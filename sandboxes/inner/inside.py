"""The walls between one jail and the others, built in its first process; then the launcher serves.

The zygote forked this process into a PID namespace of its own, with the capabilities that these steps need; none is
left afterwards. Nothing of the host is in this process.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Generator
from typing import Any, NoReturn

from sandboxes.inner.kernel import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, drop_privileges, load_filter, prctl
from sandboxes.inner.launcher import Launcher
from sandboxes.inner.namespaces import (
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NET,
    NEW_UTS,
    keep_mounts_here,
    mount,
    mount_processes,
    own_users,
    start_loopback,
    unshare,
    write,
)
from sandboxes.inner.program import Interpreter
from sandboxes.inner.wire import REPORT, ReportKind


def leave_the_others() -> None:
    """Enter namespaces in which nothing of another jail can be seen or reached."""
    os.setsid()
    unshare(NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_NET)
    keep_mounts_here()
    mount_processes("/proc")
    start_loopback()


def make_disk(num_bytes: int, num_inodes: int, uid: int, workdir: str) -> None:
    """Make one file system in memory for all places that a program may write to, so that one limit bounds them."""
    options = f"size={num_bytes},nr_inodes={num_inodes},mode=0755"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, place in (("work", workdir), ("shm", "/dev/shm"), ("tmp", "/tmp")):  # /tmp last: it hides the others
        folder = f"/tmp/{name}"
        os.mkdir(folder, 0o700)
        if os.getuid() == 0:
            os.chown(folder, uid, uid)
        mount(folder, place, None, MS_BIND)


def be_counted_alone(uid: int) -> None:
    """Enter a user namespace, in which the kernel counts this jail's processes alone, and forbid further ones.

    As root it does nothing: control groups count, and the filter forbids.
    """
    if os.getuid() != 0:
        own_users(uid)
        write("/proc/sys/user/max_user_namespaces", "0")


def become_nobody(uid: int) -> None:
    """Give up root for good; without root there is nothing to give up."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    drop_privileges()


def tell_failure(control: socket.socket, error: OSError) -> None:
    """Tell the host which error the system reported."""
    with contextlib.suppress(ConnectionError):  # the host is gone
        control.sendall(REPORT.pack(ReportKind.FAILED, 0, error.errno or 0, 0, 0))


@contextlib.contextmanager
def telling_the_host(control: socket.socket) -> Generator[None, None, None]:
    """Report an OSError in the block to the host, and end this process."""
    try:
        yield
    except OSError as error:
        tell_failure(control, error)
        os._exit(1)


def serve_cell(control: socket.socket, interpreter: Interpreter, config: dict[str, Any]) -> NoReturn:
    """Finish the jail from inside and serve until the host is gone; the jail's other processes end with this one."""
    with telling_the_host(control):
        leave_the_others()
        listeners: list[int] = []
        if config["proxy_port"] is not None:
            listeners.append(socket.create_server(("127.0.0.1", config["proxy_port"])).detach())
        make_disk(config["disk_bytes"], config["inodes"], config["uid"], config["workdir"])
        be_counted_alone(config["uid"])
        become_nobody(config["uid"])
        prctl(PR_SET_DUMPABLE, 0)  # no program may look into this process, though it has the same user
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
        process = os.pidfd_open(os.getpid())
        load_filter(bytes.fromhex(config["filter"]))
        os.chdir(config["workdir"])
        folder = os.open(config["workdir"], os.O_RDONLY | os.O_DIRECTORY)
    Launcher(control, interpreter, [folder, process, *listeners]).serve()
    os._exit(0)
