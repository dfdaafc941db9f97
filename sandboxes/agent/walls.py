"""The walls of jails: those around all jails of a zygote, the zygote, and those between its jails.

`main` runs on the host, as root or, where the kernel lets users make namespaces, as anybody. The process that is
started waits outside. Its child is the zygote: a Python behind walls that keep the host out, which has all that a jail
needs and forks the relay of each. Starting a Python for each jail would cost ten times as much as a fork. The zygote
reads only what its host sends, and no program runs in it; `Zygote` in `jail.py` is the host's end.

::

    host ── a jail's settings + descriptors ──▶ zygote ── fork ──▶ relay ── fork ──▶ forker ── fork ──▶ program
         ◀── an errno, once ───────────────────                │ ◀ walls between the jails
                                                               │                  └── first process of a jail
         ◀═══ the stream of the jail's agent ══════════════════╛

The relay puts walls between itself and the other jails and makes the jail's disk. It stays outside of the namespace of
processes whose first one is the forker, so no program can see or signal it, even where all have one user. Both then
give up every privilege but those to become the programs' user and to kill its processes. A relay kills its forker
before it ends, and so everything in its jail; all jails end with their zygote.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Generator, Sequence
from typing import Any, NoReturn

from sandboxes.agent import kernel
from sandboxes.agent.forker import Forker, agent_sockets, forget_package, low_socket
from sandboxes.agent.interpreter import Interpreter
from sandboxes.agent.relay import COUNTERS, Relay

ANSWER = struct.Struct("=i")
"""An errno, or 0: the zygote is ready, or a jail, whose folder and relay come with it."""
DEFAULT_WORKDIR = "/work"
MAX_SETTINGS_BYTES = 16_384
"""The most bytes of a jail's settings, as JSON."""
MAX_DESCRIPTORS = 8
"""With the settings: the jail's end of its stream and, if it has a control group, the files of the two counters, then a
`cgroup.procs` to write to for each hierarchy."""
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
NETWORK_SETTINGS = {"net.core.somaxconn": "128", "net.ipv4.tcp_rmem": "4096 8192 6291456"}
"""Of a sandbox's own network. Until a connection is accepted, the kernel counts what it holds for nobody: there may be
few for each listener, each with a small buffer, which grows once somebody reads."""


def main() -> None:
    control, config = low_socket(int(sys.argv[1])), json.loads(sys.argv[2])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
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
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with telling_the_host(control):
        socket.sethostname("sandbox")
        build_root(config["shown"], config["devices"], config["links"])
    serve_zygote(control, config)


def build_root(shown: list[str], devices: list[str], links: dict[str, str]) -> None:
    """Enter a root that holds only the host paths `shown` (read-only), the devices and links, and empty folders."""
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
    for folder in ("/dev/shm", "/tmp", DEFAULT_WORKDIR, "/proc"):
        os.makedirs(f"/jail{folder}", exist_ok=True)
    mount_processes("/jail/proc")
    enter_root("/jail")


def enter_root(folder: str) -> None:
    """Take a mounted folder, read-only from now on, as the root, and give up the old one."""
    mount("none", folder, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(folder)
    pivot_root(".", ".")  # the old root now lies over the new one
    kernel.check(kernel.LIBC.umount2(b".", MNT_DETACH))
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
        kernel.syscall(MOUNT_SETATTR, AT_FDCWD, place.encode(), AT_RECURSIVE, attributes, len(attributes))


def serve_zygote(control: socket.socket, config: dict[str, Any]) -> NoReturn:
    """Fork jails until the host is gone."""
    interpreter = Interpreter()
    forget_package()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    answer(control, 0)
    while True:
        frame, descriptors, _, _ = socket.recv_fds(control, MAX_SETTINGS_BYTES, MAX_DESCRIPTORS)
        if not frame:
            os._exit(0)
        stream, *group = descriptors
        with socket.socket(fileno=stream) as jail:
            try:
                is_relay = os.fork() == 0
            except OSError as error:
                answer(jail, error.errno or errno.EAGAIN)
            else:
                if is_relay:
                    control.close()
                    serve_jail(jail, interpreter, config | json.loads(frame), group)
        for descriptor in group:
            os.close(descriptor)


def serve_jail(
    stream: socket.socket, interpreter: Interpreter, config: dict[str, Any], group: Sequence[int]
) -> NoReturn:
    """Build a jail from inside, as its relay, and serve until the host is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for_forker, for_relay = agent_sockets()
    with telling_the_host(stream):
        leave_the_others()
        if config["workdir"] != DEFAULT_WORKDIR:
            make_own_root(config["workdir"])
        make_disk(config["disk"], config["uid"], config["workdir"])
        os.chdir(config["workdir"])
        handed = [os.open(".", os.O_RDONLY | os.O_DIRECTORY), os.pidfd_open(os.getpid())]
        unshare(NEW_PIDS)
        forker = os.fork()
    counters, joining = group[: len(COUNTERS)], group[len(COUNTERS) :]
    if forker == 0:
        for descriptor in (*handed, *counters):
            os.close(descriptor)
        stream.close()
        for_relay.close()
        serve_forker(for_forker, interpreter, config, joining)
    for_forker.close()
    with telling_the_host(stream):
        become_agent(config["filter"])
        (error,) = ANSWER.unpack(for_relay.recv(ANSWER.size) or ANSWER.pack(errno.EIO))  # nothing if it has died
        answer(stream, error, () if error else handed)
    for descriptor in (*handed, *joining):
        os.close(descriptor)
    Relay(stream.fileno(), stream.fileno(), for_relay, counters).serve(bytes([0]))
    with contextlib.suppress(ProcessLookupError):
        os.kill(forker, signal.SIGKILL)
    os.waitpid(forker, 0)  # it ends when all in its jail have; the stream ends after that
    os._exit(0)


def serve_forker(
    relay: socket.socket, interpreter: Interpreter, config: dict[str, Any], joining: Sequence[int]
) -> NoReturn:
    """Finish the jail as its first process, and fork programs until the relay is gone."""
    with telling_the_host(relay):
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in joining:
            os.write(descriptor, b"0")  # this process, and all its descendants with it
            os.close(descriptor)
        mount_processes("/proc")
        if os.getuid() != 0:  # for root, control groups count processes, and the filter forbids namespaces
            own_users(config["uid"])
            write("/proc/sys/user/max_user_namespaces", "0")
        become_agent(config["filter"])
    answer(relay, 0)
    Forker(relay, interpreter).serve()
    os._exit(0)


def leave_the_others() -> None:
    """Enter namespaces in which nothing of another jail can be seen or reached."""
    os.setsid()
    unshare(NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_NET)
    keep_mounts_here()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:  # start loopback, the only network interface
        fcntl.ioctl(channel, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP_AND_RUNNING))
    for name, value in NETWORK_SETTINGS.items():
        write(f"/proc/sys/{name.replace('.', '/')}", value)


def make_own_root(workdir: str) -> None:
    """Enter a root that shows what the zygote's does, which no jail may change, and has a mount point for `workdir`."""
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=0755")
    for name in os.listdir("/"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"/tmp/{name}")
        else:
            os.mkdir(f"/tmp/{name}")
            if f"/{name}" not in ("/tmp", DEFAULT_WORKDIR):  # which are empty
                mount(f"/{name}", f"/tmp/{name}", None, MS_BIND | MS_REC)
    os.makedirs(f"/tmp{workdir}", exist_ok=True)
    enter_root("/tmp")


def make_disk(bytes_and_inodes: tuple[int, int], uid: int, workdir: str) -> None:
    """Make one file system in memory for all places that a program may write to, so that one limit bounds them."""
    options = "size={},nr_inodes={},mode=0755".format(*bytes_and_inodes)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, place in (("work", workdir), ("shm", "/dev/shm"), ("tmp", "/tmp")):  # /tmp last: it hides the others
        folder = f"/tmp/{name}"
        os.mkdir(folder, 0o700)
        if os.getuid() == 0:
            os.chown(folder, uid, uid)
        mount(folder, place, None, MS_BIND)


def become_agent(system_call_filter: str) -> None:
    """Give up every privilege for good but those that an agent needs, and these too if the host is not root."""
    if os.getuid() == 0:
        os.setgroups([])
        kernel.drop_privileges(kernel.SETUID | kernel.SETGID | kernel.KILL)
    else:
        kernel.drop_privileges()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no program may look into this process, though it may have the same user
    kernel.load_filter(bytes.fromhex(system_call_filter))


def answer(control: socket.socket, error: int, descriptors: Sequence[int] = ()) -> None:
    """Tell the host, or the relay, how it went."""
    with contextlib.suppress(ConnectionError):  # it is gone
        socket.send_fds(control, [ANSWER.pack(error)], descriptors)


@contextlib.contextmanager
def telling_the_host(control: socket.socket) -> Generator[None, None, None]:
    """Report an OSError in the block to the host, and end this process."""
    try:
        yield
    except OSError as error:
        answer(control, error.errno or errno.EIO)
        os._exit(1)


def unshare(flags: int) -> None:
    kernel.check(kernel.LIBC.unshare(ctypes.c_int(flags)))


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
    kernel.check(kernel.LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def pivot_root(new: str, old: str) -> None:
    kernel.syscall(PIVOT_ROOT[os.uname().machine], new.encode(), old.encode())


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
