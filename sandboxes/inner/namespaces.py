"""Namespaces and mounts by system calls, and the loopback network of a namespace."""

import ctypes
import fcntl
import os
import socket
import struct

from sandboxes.inner.kernel import LIBC, check, syscall

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = (
    0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SIOCSIFFLAGS, IFF_UP_AND_RUNNING = 0x8914, 0x41


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def unshare(flags: int) -> None:
    check(LIBC.unshare(ctypes.c_int(flags)))


def own_users(uid: int) -> None:
    """Enter a user namespace that maps only `uid`, to this user outside; this process gets every capability in it."""
    host_uid, host_gid = os.getuid(), os.getgid()
    unshare(NEW_USER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {host_uid} 1")
    write("/proc/self/gid_map", f"{uid} {host_gid} 1")


def own_processes() -> int:
    """Return a descriptor of this process's PID namespace."""
    return os.open("/proc/self/ns/pid", os.O_RDONLY)


def start_children_in(processes: int) -> None:
    """Make this process's next children start in that PID namespace."""
    check(LIBC.setns(ctypes.c_int(processes), ctypes.c_int(NEW_PIDS)))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    check(LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def mount_processes(target: str) -> None:
    """Mount /proc with the processes of this namespace and no others."""
    mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def keep_mounts_here() -> None:
    """Keep later mounts from being seen outside this namespace."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def pivot_root(new: str, old: str) -> None:
    syscall(PIVOT_ROOT[os.uname().machine], new.encode(), old.encode())


def start_loopback() -> None:
    """Start the loopback interface, the only one of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        fcntl.ioctl(channel, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP_AND_RUNNING))
