"""The walls around jails without bubblewrap: namespaces by system calls, a root of their own, then `zygote.py`.

It runs on the host, as root or, where the kernel lets users make namespaces, as anybody. It uses only the standard
library and its neighbours. The process that is started waits outside; its child is the first process inside.
"""

import json
import os
import signal
import socket
import struct
import sys
from typing import Any

from sandboxes.inner.inside import telling_the_host
from sandboxes.inner.kernel import LIBC, PR_SET_PDEATHSIG, check, prctl, syscall
from sandboxes.inner.launcher import control_socket
from sandboxes.inner.namespaces import (
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    NEW_CGROUP,
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NET,
    NEW_PIDS,
    NEW_UTS,
    keep_mounts_here,
    mount,
    mount_processes,
    own_users,
    pivot_root,
    unshare,
    write,
)
from sandboxes.inner.zygote import serve

MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000


def leave_the_host(uid: int) -> None:
    """Enter namespaces of its own. A user without root needs a user namespace first."""
    if os.getuid() != 0:
        own_users(uid)
    unshare(NEW_MOUNTS | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NET)


def build_root(shown: dict[str, str], devices: list[str], links: dict[str, str], workdir: str) -> None:
    """Make a root that holds only `shown` (read-only; place: host path) and the devices, links and folders named."""
    keep_mounts_here()
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=0755")
    os.mkdir("/tmp/host")
    pivot_root("/tmp", "/tmp/host")
    os.mkdir("/jail")
    mount("tmpfs", "/jail", "tmpfs", MS_NOSUID | MS_NODEV, "size=256k,mode=0755")
    for place, path in shown.items():
        show(f"/host{path}", f"/jail{place}", is_read_only=True)
    for device in devices:
        show(f"/host{device}", f"/jail{device}", is_read_only=False)
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


def show(path: str, place: str, *, is_read_only: bool) -> None:
    """Bind a file or folder of the host, and what is mounted below it."""
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        write(place, "")
    mount(path, place, None, MS_BIND | MS_REC)
    if is_read_only:
        read_only, no_setuid, no_devices = 1, 2, 4
        attributes = struct.pack("=QQQQ", read_only | no_setuid | no_devices, 0, 0, 0)
        syscall(MOUNT_SETATTR, AT_FDCWD, place.encode(), AT_RECURSIVE, attributes, len(attributes))


def main() -> None:
    control = control_socket(int(sys.argv[1]))
    config: dict[str, Any] = json.loads(sys.argv[2])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with telling_the_host(control):
        leave_the_host(config["uid"])
    child = os.fork()
    if child:
        control.close()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with telling_the_host(control):
        socket.sethostname("sandbox")
        build_root(config["shown"], config["devices"], config["links"], config["workdir"])
    serve(control, config)
