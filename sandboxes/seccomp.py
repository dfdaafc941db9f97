"""The system-call filter of jails and containers: a list of what programs may call.

What is not listed fails with ENOSYS, as on a kernel that does not have it, so libc and runtimes fall back. Left out are
what would undo the walls (mounts, namespaces, tracing), what reaches other programs (their limits, priorities and
memory), what the kernel keeps after a program or counts for nobody (System V IPC, message queues, keyrings, kernel AIO,
huge pages), and large parts that programs rarely need (bpf, io_uring, perf, userfaultfd).

libseccomp turns the list into the kernel's instructions. They are made on the host and loaded inside. The filter is a
second wall behind namespaces and dropped capabilities, not the first.
"""

import ctypes
import errno
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from areal_agent.errors import SandboxError

MACHINES = ("x86_64", "aarch64")
ALLOWED = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate
fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync flock fstat fstatfs fsync ftruncate futimesat getcwd
getdents getdents64 lchown link linkat lseek lstat mkdir mkdirat mknod mknodat newfstatat open openat openat2 pread64
preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename renameat renameat2 rmdir
sendfile splice stat statfs statx symlink symlinkat sync_file_range tee truncate umask unlink unlinkat utime utimensat
utimes vmsplice write writev
getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr setxattr lsetxattr fsetxattr removexattr lremovexattr
fremovexattr inotify_init inotify_init1 inotify_add_watch inotify_rm_watch

fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal getpid getppid
gettid getpgid getpgrp getsid setpgid setsid getrlimit setrlimit getrusage times getpriority ioprio_get sched_yield
sched_getaffinity sched_getparam sched_getscheduler sched_getattr sched_get_priority_max sched_get_priority_min
sched_rr_get_interval prctl arch_prctl personality set_tid_address set_robust_list get_robust_list rseq membarrier futex
futex_waitv futex_wait futex_wake futex_requeue restart_syscall capget capset seccomp landlock_create_ruleset
landlock_add_rule landlock_restrict_self
getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid setresgid setfsuid
setfsgid setgroups getcpu getrandom sysinfo uname
rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_tgsigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
sigaltstack signalfd signalfd4 pause alarm

brk mprotect munmap mremap madvise mincore msync mlock mlock2 mlockall munlock munlockall mseal map_shadow_stack
pkey_alloc pkey_free pkey_mprotect
clock_getres clock_gettime clock_nanosleep gettimeofday time nanosleep getitimer setitimer timer_create timer_delete
timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime

pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd
eventfd2 bind connect listen accept accept4 getpeername getsockname getsockopt recvfrom recvmsg recvmmsg sendto sendmsg
sendmmsg shutdown
"""
"""Calls that are allowed with any arguments. Those that a machine or its libseccomp does not have are passed over."""


class Comparison(ctypes.Structure):
    """libseccomp's struct scmp_arg_cmp."""

    _fields_ = (
        ("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("mask", ctypes.c_uint64), ("value", ctypes.c_uint64),
    )  # fmt: skip


def masked(argument: int, mask: int, value: int) -> Comparison:
    """Return the condition that the bits `mask` of an argument have this value."""
    return Comparison(argument, MASKED_EQUAL, mask, value)


MASKED_EQUAL = 7
INT = 0xFFFF_FFFF
"""The bits of a C int, to which the kernel shortens such an argument."""
CLONE_NEW_ANY = 0x7E02_0080
"""Every flag of clone that makes a namespace. clone3 keeps its flags in memory, which a filter cannot read."""
MAP_HUGETLB, MFD_HUGETLB = 0x4_0000, 4
UNIX, IPV4, IPV6, NETLINK = 1, 2, 10, 16
PROTOCOLS = (0, 6, 17)  # the usual one, TCP, UDP
NETLINK_ROUTE = 0  # lists addresses; through some others, programs can send to each other
SOL_SOCKET, BUFFER_SIZES = 1, (7, 8)  # SO_SNDBUF, SO_RCVBUF
PRIO_PROCESS, IOPRIO_WHO_PROCESS = 0, 1
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX


def _all_but(values: Sequence[int], bit: int = 31, above: int = 0) -> Iterator[tuple[int, int]]:
    """Yield masks and values such that exactly the C ints that are not `values` match one of them."""
    for prefix in (above, above | 1 << bit):
        same = [value for value in values if value >> bit == prefix >> bit]
        if not same:
            yield INT & -(1 << bit), prefix
        elif bit:
            yield from _all_but(same, bit - 1, prefix)


PRIORITIES = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setattr", "sched_setaffinity")
ALLOWED_IF: dict[str, Sequence[tuple[Comparison, ...]]] = {
    "clone": [(masked(0, CLONE_NEW_ANY, 0),)],
    "mmap": [(masked(3, MAP_HUGETLB, 0),)],
    "memfd_create": [(masked(1, MFD_HUGETLB, 0),)],
    "ioctl": [(masked(1, *pair),) for pair in _all_but(TERMINAL_INPUT)],
    "socketpair": [(masked(0, INT, UNIX),)],
    "socket": [
        (masked(0, INT, UNIX),),
        (masked(0, INT, NETLINK), masked(2, INT, NETLINK_ROUTE)),
        *((masked(0, INT, ip), masked(2, INT, protocol)) for ip in (IPV4, IPV6) for protocol in PROTOCOLS),
    ],
    "setsockopt": [
        *((masked(1, *pair),) for pair in _all_but([SOL_SOCKET])),
        *((masked(1, INT, SOL_SOCKET), masked(2, *pair)) for pair in _all_but(BUFFER_SIZES)),
    ],
    **dict.fromkeys(PRIORITIES, ((masked(0, INT, 0),),)),  # a process id of 0 means the caller
    "setpriority": [(masked(0, INT, PRIO_PROCESS), masked(1, INT, 0))],
    "ioprio_set": [(masked(0, INT, IOPRIO_WHO_PROCESS), masked(1, INT, 0))],
}
"""Calls that are allowed if all conditions of one row hold."""
PRETENDED_IF = {"setsockopt": [(masked(1, INT, SOL_SOCKET), masked(2, INT, option)) for option in BUFFER_SIZES]}
"""Calls that succeed without effect: wide buffers of netlink, and of connections not yet accepted, are counted nowhere.
To programs it looks as if the host allowed no wider ones."""

LIBRARY = "libseccomp.so.2"
NO_SUCH_CALL = -1
ACT_ALLOW, ACT_PRETEND, ACT_REFUSE = 0x7FFF_0000, 0x0005_0000, 0x0005_0000 | errno.ENOSYS
ATTRIBUTE_BAD_ARCHITECTURE = 2


@functools.cache
def allowing_filter(machine: str, *, with_tracing: bool = False) -> bytes:
    """Return the filter as an array of struct sock_filter; SandboxError where it cannot be made."""
    if machine not in MACHINES:
        raise SandboxError(f"there is no system-call filter for {machine!r}, only for {', '.join(MACHINES)}")
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise SandboxError(f"{LIBRARY} is missing ({error}); install the package libseccomp2 or libseccomp") from error
    library.seccomp_init.restype = ctypes.c_void_p
    state = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ACT_REFUSE)))
    try:
        return _exported(library, state, machine, f"{ALLOWED} ptrace" if with_tracing else ALLOWED)
    finally:
        library.seccomp_release(state)


def _exported(library: Any, state: ctypes.c_void_p, machine: str, names: str) -> bytes:
    """Fill libseccomp's state, whose default is to refuse, and return the instructions."""
    architecture, native = library.seccomp_arch_resolve_name(machine.encode()), library.seccomp_arch_native()
    if architecture != native:
        _check(library.seccomp_arch_add(state, architecture))
        _check(library.seccomp_arch_remove(state, native))
    _check(library.seccomp_attr_set(state, ATTRIBUTE_BAD_ARCHITECTURE, ctypes.c_uint32(ACT_REFUSE)))
    allowed = dict.fromkeys(names.split(), ((),)) | ALLOWED_IF
    for action, calls in ((ACT_ALLOW, allowed), (ACT_PRETEND, PRETENDED_IF)):
        for name, rows in calls.items():
            number = library.seccomp_syscall_resolve_name(name.encode())
            for row in rows if number != NO_SUCH_CALL else ():
                tests = (Comparison * len(row))(*row)
                _check(library.seccomp_rule_add_array(state, ctypes.c_uint32(action), number, len(row), tests))
    descriptor = os.memfd_create("filter")
    try:
        _check(library.seccomp_export_bpf(state, descriptor))
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def _check(result: int) -> None:
    if result < 0:
        raise SandboxError(f"libseccomp could not make the system-call filter: {os.strerror(-result)}")
