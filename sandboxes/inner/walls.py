"""The walls of jails: those around all jails of a zygote, the zygote, and those between its jails.

`main` runs on the host, as root or, where the kernel lets users make namespaces, as anybody. The process that is
started waits outside. Its child is the zygote: a Python behind walls that keep the host out, which has all that a jail
needs and forks the first process of each. Starting a Python for each jail would cost ten times as much as a fork. The
zygote reads only what its host sends, and no program runs in it; `Zygote` in `jail.py` is the host's end.

::

    host ── a jail's limits + its control socket ──▶ zygote ── fork ──▶ first process of a jail (`serve_jail`)
         ◀── HELLO, once ───────────────────────            ◀── its end ──

The first process of a jail puts walls between itself and the other jails, gives up every privilege, and serves as a
launcher. The jail's other processes end with it, and all jails end with their zygote.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Generator
from typing import Any, NoReturn

from sandboxes.inner.kernel import (
    LIBC,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    check,
    drop_privileges,
    load_filter,
    prctl,
    syscall,
)
from sandboxes.inner.launcher import Launcher, control_socket
from sandboxes.inner.processes import forget_package
from sandboxes.inner.program import Interpreter
from sandboxes.inner.wire import MAX_CELL, REPORT, ReportKind

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = (
    0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
SIOCSIFFLAGS, IFF_UP_AND_RUNNING = 0x8914, 0x41


def main() -> None:
    control, config = control_socket(int(sys.argv[1])), json.loads(sys.argv[2])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)  # the programs' user must reach what is made here, whatever the host's mask
    with telling_the_host(control):
        if os.getuid() != 0:
            own_users(config["uid"])
        unshare(NEW_MOUNTS | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NET)
    child = os.fork()
    if child:
        control.close()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with telling_the_host(control):
        socket.sethostname("sandbox")
        build_root(config["shown"], config["devices"], config["links"], config["workdir"])
    serve_zygote(control, config)


def build_root(shown: list[str], devices: list[str], links: dict[str, str], workdir: str) -> None:
    """Make a root that holds only the host paths `shown` (read-only), the devices and links, and empty folders."""
    keep_mounts_here()
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=0755")
    os.mkdir("/tmp/host")
    pivot_root("/tmp", "/tmp/host")
    os.mkdir("/jail")
    mount("tmpfs", "/jail", "tmpfs", MS_NOSUID | MS_NODEV, "size=256k,mode=0755")
    for path in shown:
        show(path, is_read_only=True)
    for device in devices:
        show(device, is_read_only=False)
    for place, target in links.items():
        os.symlink(target, f"/jail{place}")
    for folder in ("/dev/shm", "/tmp", workdir, "/proc"):
        os.makedirs(f"/jail{folder}", exist_ok=True)
    mount_processes("/jail/proc")
    mount("none", "/jail", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/jail")
    pivot_root(".", ".")  # the old root now lies over the new one
    check(LIBC.umount2(b".", MNT_DETACH))
    os.chdir("/")


def show(path: str, *, is_read_only: bool) -> None:
    """Bind a file or folder of the host, and what is mounted below it."""
    source, place = f"/host{path}", f"/jail{path}"
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        write(place, "")
    mount(source, place, None, MS_BIND | MS_REC)
    if is_read_only:
        read_only, no_setuid, no_devices = 1, 2, 4
        attributes = struct.pack("=QQQQ", read_only | no_setuid | no_devices, 0, 0, 0)
        syscall(MOUNT_SETATTR, AT_FDCWD, place.encode(), AT_RECURSIVE, attributes, len(attributes))


def serve_zygote(control: socket.socket, config: dict[str, Any]) -> NoReturn:
    """Fork jails until the host is gone."""
    interpreter = Interpreter(config["env"])
    forget_package()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with telling_the_host(control):
        processes = os.open("/proc/self/ns/pid", os.O_RDONLY)
    with contextlib.suppress(ConnectionError):  # the host is gone, which the next read will show
        control.sendall(REPORT.pack(ReportKind.HELLO, 0, 0, 0, 0))
    while True:
        frame, descriptors, _, _ = socket.recv_fds(control, MAX_CELL, 1)
        if not frame:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as jail:
            try:
                check(LIBC.setns(ctypes.c_int(processes), ctypes.c_int(NEW_PIDS)))  # in the last jail's, unshare fails
                unshare(NEW_PIDS)
                pid = os.fork()
            except OSError as error:
                tell_failure(jail, error)
                continue
            if pid == 0:
                control.close()
                os.close(processes)
                serve_jail(jail, interpreter, config | json.loads(frame))


def serve_jail(control: socket.socket, interpreter: Interpreter, config: dict[str, Any]) -> NoReturn:
    """Finish the jail from inside, as its first process, and serve until the host is gone."""
    with telling_the_host(control):
        leave_the_others()
        listeners: list[int] = []
        if config["proxy_port"] is not None:
            listeners.append(socket.create_server(("127.0.0.1", config["proxy_port"])).detach())
        make_disk(config["disk_bytes"], config["inodes"], config["uid"], config["workdir"])
        become_nobody(config["uid"])
        prctl(PR_SET_DUMPABLE, 0)  # no program may look into this process, though it has the same user
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
        process = os.pidfd_open(os.getpid())
        load_filter(bytes.fromhex(config["filter"]))
        os.chdir(config["workdir"])
        folder = os.open(config["workdir"], os.O_RDONLY | os.O_DIRECTORY)
    Launcher(control, interpreter, [folder, process, *listeners]).serve()
    os._exit(0)


def leave_the_others() -> None:
    """Enter namespaces in which nothing of another jail can be seen or reached."""
    os.setsid()
    unshare(NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_NET)
    keep_mounts_here()
    mount_processes("/proc")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:  # start loopback, the only network interface
        fcntl.ioctl(channel, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP_AND_RUNNING))


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


def become_nobody(uid: int) -> None:
    """Give up every privilege for good.

    A user without root enters a user namespace, in which the kernel counts this jail's processes alone, and forbids
    further ones. As root, control groups count, and the filter forbids.
    """
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        own_users(uid)
        write("/proc/sys/user/max_user_namespaces", "0")
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


def unshare(flags: int) -> None:
    check(LIBC.unshare(ctypes.c_int(flags)))


def own_users(uid: int) -> None:
    """Enter a user namespace that maps only `uid`, to this user outside; this process gets every capability in it."""
    host_uid, host_gid = os.getuid(), os.getgid()
    unshare(NEW_USER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {host_uid} 1")
    write("/proc/self/gid_map", f"{uid} {host_gid} 1")


def keep_mounts_here() -> None:
    """Keep later mounts from being seen outside this namespace."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def mount_processes(target: str) -> None:
    """Mount /proc with the processes of this namespace and no others."""
    mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    check(LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def pivot_root(new: str, old: str) -> None:
    syscall(PIVOT_ROOT[os.uname().machine], new.encode(), old.encode())


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
