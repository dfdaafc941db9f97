"""Rows 1 to 20 and 25 to 32: programs that use up resources, leave hostile files, get out, or fake how they ended.

A `Row` is one kind of harm, with the way to do it; most run one program by `ends_with` or `prints`.
"""

import contextlib
import io
import os
import socket
import sys
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sandboxes.pool import Pool
from sandboxes.sandbox import Sandbox
from sandboxes.spec import ExecResult, Isolation, Limits, SandboxSpec, Status

MIB = 2**20
JAILED = Isolation.NAMESPACES
SURVIVES = "print('still works')"
OTHER_PROCESSES = """
import os
mine = [int(name) for name in os.listdir('/proc') if name.isdigit() and os.stat(f'/proc/{name}').st_uid == os.getuid()]
print(*set(mine) - {1, os.getpid()} if os.getppid() == 1 else '')
"""

Act = Callable[[Sandbox], Awaitable[str]]
"""Does harm in a sandbox, and returns what was seen if it is not what is required, else nothing."""


class Verdict(StrEnum):
    """The outcome of a row."""

    HELD = "held"
    BEYOND = "beyond"  # the backend says that it cannot stop this
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of harm. `run` returns what was seen if it is not what is required, else nothing."""

    number: int
    harm: str
    required: str
    run: Callable[[Pool], Awaitable[str]]
    needs: Isolation = Isolation.PROCESS
    needs_groups: bool = False  # whether all processes of a program must be bounded together

    def is_within(self, pool: Pool) -> bool:
        """Return whether the backend promises to stop this."""
        capabilities = pool.capabilities()
        has_groups = "memory of many processes together" not in capabilities.cannot_stop
        return capabilities.isolation.covers(self.needs) and (has_groups or not self.needs_groups)


async def check(row: Row, pool: Pool) -> tuple[Verdict, str]:
    """Return the verdict on a row, and what was seen if it failed."""
    if not row.is_within(pool):
        return Verdict.BEYOND, ""
    seen = await row.run(pool)
    return (Verdict.FAILED, seen) if seen else (Verdict.HELD, "")


def in_box(act: Act, spec: SandboxSpec | None = None) -> Callable[[Pool], Awaitable[str]]:
    """Return a `Row.run` that acts in its own sandbox, which must still work afterwards, with no process left."""

    async def run(pool: Pool) -> str:
        async with pool.acquire(spec) as box:
            if seen := await act(box):
                return seen
            after = await box.exec_python(SURVIVES)
            if after.stdout != b"still works\n":
                return f"afterwards the sandbox gives {told(after)}"
            return await processes_left(box)

    return run


def told(result: ExecResult) -> str:
    """Describe a result in one line."""
    last = (result.stderr or result.stdout).rstrip().rpartition(b"\n")[2]
    return f"{result.status.value}, exit code {result.exit_code}, oom kills {result.oom_kills}, {last[-200:]!r}"


def ends_with(source: str, status: Status, limits: Limits) -> Callable[[Pool], Awaitable[str]]:
    """Return a `Row.run` whose program must end with this status."""

    async def act(box: Sandbox) -> str:
        result = await box.exec_python(source, limits=limits)
        return told(result) if result.status is not status else ""

    return in_box(act)


def prints(source: str, output: bytes) -> Callable[[Pool], Awaitable[str]]:
    """Return a `Row.run` whose program, which prints what it reached, must end well and print exactly `output`."""

    async def act(box: Sandbox) -> str:
        result = await box.exec_python(source)
        if result.is_ok and result.stdout == output:
            return ""
        return f"{told(result)}, printed {result.stdout[-300:]!r}"

    return in_box(act)


async def processes_left(box: Sandbox) -> str:
    """Report processes other than a jail's first one and the one that looks; without a jail a program cannot tell."""
    result = await box.exec_python(OTHER_PROCESSES)
    return f"processes are left: {result.stdout!r}" if result.stdout.strip() else ""


# ── rows 1 to 9: using up resources ───────────────────────────────────────────────────────────────────────────────────

FORK_BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
MEMORY_BOMB = "hoard = []\nwhile True: hoard.append(bytearray(2**20))"
MANY_CHILDREN = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(b"x" * 40_000_000)
        time.sleep(60)
os.wait()
"""
CHILD_OUT_OF_MEMORY = f"""
import os
if os.fork() == 0:
    exec({MEMORY_BOMB!r})
os.wait()
"""
DEAF_LOOP = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
while True: pass
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
os.wait()
print("gone")
"""
OPEN_FILES = """
import os
try:
    while True: os.open('/dev/null', os.O_RDONLY)
except OSError as error: print(error.errno)
"""
FILL = """
number = 0
while True:
    number += 1
    with open(f'{place}/{number}', 'wb') as file: file.write(bytes(2**20))
"""
FILLS = [FILL.replace("{place}", place) for place in (".", "/tmp", "/dev/shm")]
FALLOCATE = "import os\nwhile True: os.posix_fallocate(os.open('big', os.O_CREAT | os.O_RDWR), 0, 2**34)"
MANY_FILES = "for number in range(10**6): open(str(number), 'w').close()"
ZIP_BOMB = """
import zlib
bomb = zlib.compress(bytes(2**24))
for number in range(1000): open(f'part{number}', 'wb').write(zlib.decompress(bomb))
"""


async def endless_output(box: Sandbox) -> str:
    for stream in ("stdout", "stderr"):
        source = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)"
        result = await box.exec_python(source, limits=Limits(wall_s=20.0, output_bytes=10_000))
        if (result.status, getattr(result, stream)) != (Status.OUTPUT_LIMIT, b"x" * 10_000):
            return told(result)
    honest = await box.exec_python("print('x' * 2**20)", limits=Limits(wall_s=20.0, output_bytes=2 * MIB))
    return "" if honest.is_ok and len(honest.stdout) == MIB + 1 else f"an honest megabyte: {told(honest)}"


async def full_disk(box: Sandbox) -> str:
    small = Limits(wall_s=30.0, memory_bytes=256 * MIB, file_bytes=2**40)
    for source in (*FILLS, FALLOCATE, ZIP_BOMB, MANY_FILES):
        result = await box.exec_python(source, limits=small)
        if result.status is not Status.DISK:
            return f"{source!r}: {told(result)}"
        await box.exec(["sh", "-c", "find . /tmp /dev/shm -mindepth 1 -delete"], limits=small)
    return ""


SMALL = Limits(wall_s=20.0, memory_bytes=100 * MIB)

# ── rows 10 to 13: files that the host handles ────────────────────────────────────────────────────────────────────────

DEEP = "import os\nfor _ in range(1000):\n    os.mkdir('d' * 50)\n    os.chdir('d' * 50)\nopen('leaf', 'w').close()"
TRAPS = """
import os, socket
os.symlink('/etc/passwd', 'link'); os.symlink('/', 'root'); os.mkfifo('fifo'); os.mkdir('folder')
socket.socket(socket.AF_UNIX).bind('socket')
"""
LINKS = """
import os
os.mkdir('aim')
open('aim/target', 'w').write('old')
os.symlink('/', 'root'); os.symlink('aim', 'folder'); os.symlink('aim/target', 'file')
"""


async def strange_names(box: Sandbox) -> str:
    for name in ("new\nline", os.fsdecode(b"not-utf8-\xff"), "a" * 200):
        data = bytes(range(256))
        await box.write(name, data)
        if await box.read(name) != data:
            return f"{name!r} does not round-trip"
    result = await box.exec_python(DEEP)
    return "" if result.is_ok else told(result)


async def traps_for_readers(box: Sandbox) -> str:
    await box.exec_python(TRAPS)
    for path in ("link", "root/usr/bin/env", "fifo", "folder", "socket", "/etc/passwd", "../x"):
        with contextlib.suppress(OSError):
            return f"reading {path!r} gives {(await box.read(path))[:50]!r}"
    return ""


def _tar(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", data: bytes = b"", pax: dict[str, str] | None = None
) -> bytes:
    """Return a tar with one member."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size, member.pax_headers = kind, target, len(data), pax or {}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(10**10)}
HOSTILE_TARS = {
    "a path above": _tar("../above"),
    "a path above, inside": _tar("a/../../above"),
    "an absolute path": _tar("/tmp/absolute"),
    "a path above, by an extended header": _tar("plain", pax={"path": "../above"}),
    "a symbolic link": _tar("link", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": _tar("link", tarfile.LNKTYPE, "/etc/passwd"),
    "a device": _tar("device", tarfile.CHRTYPE),
    "a FIFO": _tar("fifo", tarfile.FIFOTYPE),
    "a sparse file": _tar("sparse", tarfile.GNUTYPE_SPARSE),
    "no tar": b"\x1f\x8b" + bytes(600),
    "a file that is not all there": _tar("short", data=bytes(4096))[:2000],
    "ten sparse gigabytes": _tar("GNUSparseFile.0/x", data=b"0\n".ljust(512, b"\0"), pax=SPARSE),
}


async def hostile_tars(box: Sandbox) -> str:
    for name, tar in HOSTILE_TARS.items():
        with contextlib.suppress(ValueError):
            await box.upload(tar)
            return f"a tar with {name} is taken"
    await box.upload(_tar("folder/honest"))
    await box.exec_python(TRAPS)
    with tarfile.open(fileobj=io.BytesIO(await box.download())) as tar:
        found = {member.name for member in tar if not (member.isreg() or member.isdir())} | {
            name for name in tar.getnames() if "passwd" in name or name.startswith(("root/", "/"))
        }
        return f"downloaded: {found}" if found or "folder/honest" not in tar.getnames() else ""


async def links_for_writers(box: Sandbox) -> str:
    """Put links where the host is about to write: the write must fail or replace the link, never follow it."""
    await box.exec_python(LINKS)
    for path in ("root/planted", "folder/planted"):
        with contextlib.suppress(OSError):
            await box.write(path, b"new")
            return f"writing {path!r} succeeds"
    with contextlib.suppress(OSError):
        await box.upload(_tar("planted"), "folder")
        return "an upload through a link succeeds"
    with contextlib.suppress(OSError):
        await box.write("file", b"new")
    result = await box.exec_python("import os; print(os.listdir('aim'), open('aim/target').read())")
    return "" if b"planted" not in result.stdout and b"old" in result.stdout else told(result)


# ── rows 14 to 20: getting out ────────────────────────────────────────────────────────────────────────────────────────

HOST_BY_PROC = """
import os
for pid in (p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()):
    for name in ('environ', 'mem', 'maps', 'fd', 'root', 'cwd', 'exe'):
        path = f'/proc/{pid}/{name}'
        try: print(path, os.listdir(path) if name in ('fd', 'root', 'cwd') else open(path, 'rb').read(9))
        except OSError: pass
"""
AGAINST_THE_LAUNCHER = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
for request in (16, 0x4206):
    if libc.ptrace(request, os.getppid(), 0, 0) == 0: print('traced')
os.chmod('.', 0)
for number in signal.valid_signals():
    try: os.kill(1, number)
    except PermissionError: pass
try: os.kill(-1, signal.SIGKILL)
except (ProcessLookupError, PermissionError): pass
"""
NETWORK = """
import socket
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ('1.1.1.1', 53)),
    (socket.AF_INET, socket.SOCK_STREAM, ('169.254.169.254', 80)),
    (socket.AF_INET, socket.SOCK_DGRAM, ('8.8.8.8', 53)),
    (socket.AF_INET6, socket.SOCK_STREAM, ('2606:4700::1111', 53)),
    (socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', {port})), (socket.AF_UNIX, socket.SOCK_STREAM, '\\0{name}'),
    (40, socket.SOCK_STREAM, (2, 1024)), (17, socket.SOCK_RAW, None),
):
    try:
        channel = socket.socket(family, kind)
        channel.settimeout(3)
        if address is not None: channel.connect(address)
        print(family, address, 'reached')
    except OSError: pass
try: print(socket.getaddrinfo('example.com', 80))
except OSError: pass
"""
UNDOING_THE_WALLS = """
import ctypes, os, glob, sys
libc = ctypes.CDLL(None, use_errno=True)
for name in (
    '/var/run/docker.sock', '/run/docker.sock', '/dev/mem', '/dev/kmsg',
    '/proc/kcore', '/dev/vda', '/dev/kvm',
):
    try:
        os.close(os.open(name, os.O_RDONLY))
        print(name, 'is there')
    except OSError: pass
tries = {
    'mount': lambda: libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), 'umount': lambda: libc.umount2(b'/work', 2),
    'remount': lambda: libc.mount(b'none', b'/', None, 32 | 4096, None), 'chroot': lambda: libc.chroot(b'.'),
    'unshare user': lambda: libc.unshare(0x10000000), 'unshare mounts': lambda: libc.unshare(0x20000),
    'setns': lambda: libc.setns(os.open('/proc/self/ns/net', os.O_RDONLY), 0),
    'clone user': lambda: libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0),
    'sethostname': lambda: libc.sethostname(b'x', 1), 'setuid': lambda: libc.setuid(0),
}
for name, act in tries.items():
    if act() == 0: print(name, 'is allowed')
for path in ('block', '/dev/block'):
    try:
        os.mknod(path, 0o60666, os.makedev(8, 0))
        print(path, 'is made')
    except OSError: pass
groups = [
    path for name in ('cgroup.procs', '*.max') for path in glob.glob(f'/sys/fs/cgroup/**/{name}', recursive=True)
]
for path in (
    '/', '/usr', '/etc', '/dev', sys.base_prefix, '/proc/sys/kernel/hostname', '/proc/sysrq-trigger',
    '/sys/kernel/uevent_helper', '/sys/fs/cgroup', *groups[:50],
):
    if os.access(path, os.W_OK) and os.path.isdir(path): print(path, 'is writable')
    try:
        open(path, 'w').close()
        print(path, 'is written')
    except OSError: pass
"""
GAINING_PRIVILEGES = """
import os, shutil, subprocess
shutil.copy('/usr/bin/id', 'mine')
os.chmod('mine', 0o6755)
before = (os.getuid(), os.getgid())
ids = subprocess.run(['./mine', '-u'], capture_output=True, text=True).stdout.split()
if ids != [str(before[0])] or 0 in before: print('another user', ids, before)
status = dict(line.split(':', 1) for line in open('/proc/self/status') if ':' in line)
if int(status['CapEff'], 16) or int(status['CapPrm'], 16) or status['NoNewPrivs'].strip() != '1': print(status)
"""
RARE_CALLS = """
import ctypes, fcntl, os
libc = ctypes.CDLL(None, use_errno=True)
machine = os.uname().machine
numbers = {
    'x86_64': {
        'keyctl': 250, 'add_key': 248, 'bpf': 321, 'perf_event_open': 298, 'userfaultfd': 323, 'ptrace': 101,
        'shmget': 29, 'semget': 64, 'msgget': 68, 'mq_open': 240, 'io_setup': 206,
    },
    'aarch64': {
        'keyctl': 219, 'add_key': 217, 'bpf': 280, 'perf_event_open': 241, 'userfaultfd': 282, 'ptrace': 117,
        'shmget': 194, 'semget': 190, 'msgget': 186, 'mq_open': 180, 'io_setup': 0,
    },
}[machine]
for name, number in {**numbers, 'io_uring_setup': 425, 'open_tree': 428, 'fsopen': 430}.items():
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38): print(name, ctypes.get_errno())
if libc.memfd_create(b'huge pages', 4) != -1: print('huge pages')
for request in (0x5412, 0x541C):
    try:
        fcntl.ioctl(0, request, b'x')
        print(hex(request))
    except OSError as error:
        if error.errno not in (1, 38): print(hex(request), error)
if machine == 'x86_64' and (libc.syscall(0x40000000 | 39) != -1 or ctypes.get_errno() != 38): print('x32')
"""
HOST_FILES = """
import os
print(sorted(os.environ))
for path in {paths}:
    if os.path.exists(path): print(path, 'is there')
if os.uname().nodename == {host}: print('the name of the host is known')
for path in ('/etc/shadow', '/etc/ssh'):
    try: print(path, os.listdir(path) if os.path.isdir(path) else open(path).read(9))
    except OSError: pass
"""


@contextlib.contextmanager
def listeners() -> Generator[tuple[int, str], None, None]:
    """Open a loopback TCP port and an abstract socket on the host; both must be out of reach."""
    name = f"areal-agent-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield server.getsockname()[1], name


@contextlib.contextmanager
def canaries() -> Generator[list[str], None, None]:
    """Make a file in the temporary folder and one in the working directory, unless a box shows that folder by design.

    The folders themselves prove nothing: a box has a /tmp of its own, for example.
    """
    with contextlib.ExitStack() as stack:
        paths: list[str] = []
        for folder in {Path(tempfile.gettempdir()).resolve(), Path.cwd()}:
            if not any(folder.is_relative_to(shown) for shown in ("/usr", sys.base_prefix)):
                with contextlib.suppress(OSError):  # a folder where nothing can be written
                    paths.append(stack.enter_context(tempfile.NamedTemporaryFile(dir=folder)).name)
        yield paths


async def reaching_out(box: Sandbox) -> str:
    with listeners() as (port, name):
        source = NETWORK.replace("{port}", str(port)).replace("{name}", name)
        result = await box.exec_python(source, limits=Limits(wall_s=30.0))
    return "" if result.is_ok and not result.stdout else f"{told(result)}, reached {result.stdout!r}"


async def against_the_launcher(box: Sandbox) -> str:
    """Attack the launcher. The program may kill itself; what runs afterwards shows whether the launcher lives."""
    result = await box.exec_python(AGAINST_THE_LAUNCHER)
    is_harmless = b"traced" not in result.stdout and result.status in (Status.OK, Status.SIGNALED)
    return "" if is_harmless else told(result)


async def host_is_absent(box: Sandbox) -> str:
    """Look for the host's files, name and environment; none may be there."""
    with canaries() as paths:
        source = HOST_FILES.replace("{paths}", repr(paths))
        result = await box.exec_python(source.replace("{host}", repr(socket.gethostname())))
    expected = b"['HOME', 'PATH', 'TMPDIR']\n"
    return "" if result.is_ok and result.stdout == expected else f"{told(result)}, printed {result.stdout!r}"


# ── row 25: faking one's own end ──────────────────────────────────────────────────────────────────────────────────────

FAKE_FRAMES = """
import os
os.write(1, {data})
for descriptor in range(3, 64):
    try: os.write(descriptor, bytes(29))
    except OSError: pass
os._exit(9)
"""
FAKE = b"status: ok\n\x00\x1b[2J\xc3\n__EXIT__0\n$ >>> " + bytes(29) + b"\x03\x11\0\0\0" + bytes(17)
IN_A_SHELL = """
printf '%s' "$kept"
cat
for fd in 3 4 5 6 7; do echo 0 >&$fd; done 2> /dev/null
exit 9
"""


async def fake_frames(box: Sandbox) -> str:
    """Write fake frames to every descriptor, in a program, a shell and an interpreter."""
    source = FAKE_FRAMES.replace("{data}", repr(FAKE))
    shell = box.shell()
    await shell.run("kept=1")
    async with box.python() as python:
        ends = {
            "a program": (await box.exec_python(source), FAKE),
            "a shell": (await shell.run(IN_A_SHELL, stdin=FAKE), b"1" + FAKE),
            "an interpreter": (await python.run(source), FAKE),
        }
    for where, (result, printed) in ends.items():
        if (result.status, result.exit_code, result.stdout) != (Status.NONZERO, 9, printed):
            return f"{where}: {told(result)}"
    return ""


# ── rows 26 to 30: what the kernel shares between programs and others, or counts apart ────────────────────────────────

REACHING_THE_LAUNCHER = """
import ctypes, os, resource
ioprio_set = 251 if os.uname().machine == 'x86_64' else 30
for pid in {1, os.getppid()}:
    for act in (
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)), lambda: os.sched_setaffinity(pid, {0}),
        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda: os.setpriority(os.PRIO_USER, 0, 19),
    ):
        try: print(act(), act.__code__.co_names)
        except OSError: pass
    if ctypes.CDLL(None).syscall(ioprio_set, 1, pid, 3 << 13) == 0: print('ioprio_set')
"""
SOCKET_BUFFERS = """
import socket, struct
sizes = []
for number in range(50):
    near, far = sockets = [socket.socket(type=number % 2 + 1) for _ in range(2)]
    for channel in sockets:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF): channel.setsockopt(socket.SOL_SOCKET, option, 2**26)
    far.bind(('127.0.0.1', 0))
    if far.type == socket.SOCK_STREAM: far.listen()
    near.connect(far.getsockname())
    if far.type == socket.SOCK_STREAM: far, _ = far.accept()
    near.setblocking(False)
    try:
        for _ in range(1000): near.send(bytes(60_000))
    except OSError: pass
    for channel in (near, far):
        meminfo = channel.getsockopt(socket.SOL_SOCKET, 55, 24)  # SO_MEMINFO
        received, _, _, _, ahead, queued = struct.unpack('6I', meminfo)
        sizes.append((received + ahead + queued, channel))
print(sum(size for size, _ in sizes) <= MEMORY)
"""
MUCH_DISK = SandboxSpec(limits=Limits(wall_s=30.0, memory_bytes=64 * MIB, disk_bytes=256 * MIB, file_bytes=2**40))


async def full_disk_and_memory(box: Sandbox) -> str:
    """Fill a disk that is larger than memory, and then memory; what runs next finds the disk full, and runs."""
    for fill in FILLS:
        result = await box.exec_python(fill)
        if result.status not in (Status.DISK, Status.MEMORY):
            return f"{fill!r}: {told(result)}"
    result = await box.exec_python(MEMORY_BOMB)
    return told(result) if result.status is not Status.MEMORY else ""


COUNTERS = """
import ctypes, fcntl, os, signal
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
info = (ctypes.c_int * 32)(signal.SIGRTMIN, 0, -1)
def queue(): return libc.syscall(129 if os.uname().machine == 'x86_64' else 138, os.getpid(), signal.SIGRTMIN, info)
"""
USE_UP_COUNTERS = f"""{COUNTERS}
for _ in range(3): os.fork()
for _ in range(30): libc.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 2**20)
while libc.inotify_init() >= 0 or queue() == 0: pass
os.write(1, b'.')
signal.pause()
"""
NEED_COUNTERS = f"{COUNTERS}print(libc.inotify_init() >= 0, fcntl.fcntl(os.pipe()[0], fcntl.F_GETPIPE_SZ), queue())"


async def counters_of_a_user(pool: Pool) -> str:
    """Use up, in one sandbox, what the kernel counts for each user; another sandbox must not notice."""
    async with pool.acquire() as greedy, pool.acquire() as other:
        program = await greedy.spawn_python(USE_UP_COUNTERS)
        dots = b""
        async for chunk in program.stdout:
            if len(dots := dots + chunk) == 8:
                break
        result = await other.exec_python(NEED_COUNTERS)
        await program.kill()
    return "" if result.stdout == b"True 65536 0\n" else f"{told(result)}, printed {result.stdout!r}"


# ── rows 31 and 32: harming what comes after it in its sandbox ────────────────────────────────────────────────────────

SHARED_MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
while (number := libc.shmget(0, 2**22, 0o1600)) >= 0:
    ctypes.memset(ctypes.c_void_p(libc.shmat(number, None, 0)), 1, 2**22)
"""
SPOILED_FOLDERS = """
import os
for name in ('removed', 'locked'): os.mkdir(name)
os.rmdir('removed')
os.chmod('locked', 0)
"""


async def memory_taken_for_good(pool: Pool) -> str:
    """Fill the memory with what outlives its program. No call may hang, or call that the sandbox's failure."""
    own = Limits(wall_s=10.0, memory_bytes=64 * MIB, disk_bytes=1024 * MIB)
    for source in (SHARED_MEMORY, FILLS[0]):
        async with pool.acquire(SandboxSpec(limits=own)) as box:
            first = await box.exec_python(source)
            if first.status not in (Status.MEMORY, Status.DISK) and source is FILLS[0]:
                return told(first)
            for _ in range(2):
                await box.exec_python("held = bytes(2**25)")
            fed = await box.exec(["cat"], stdin=bytes(3 * MIB))
            if fed.status not in (Status.MEMORY, Status.OUTPUT_LIMIT):
                return f"the next program: {told(fed)}"
    return ""


async def spoiled_folders(box: Sandbox) -> str:
    await box.exec_python(SPOILED_FOLDERS)
    for name in ("removed", "locked"):
        result = await box.exec(["true"], cwd=name)
        if result.exit_code != 126:
            return f"in the {name} folder: {told(result)}"
    return ""


ROWS = (
    Row(1, "fork bomb", "PIDS, nothing left", needs=JAILED, needs_groups=True,
        run=ends_with(FORK_BOMB, Status.PIDS, Limits(wall_s=2.0, pids=32))),
    Row(2, "memory bomb", "MEMORY", run=ends_with(MEMORY_BOMB, Status.MEMORY, SMALL)),
    Row(3, "memory of many children", "MEMORY", needs=JAILED, needs_groups=True,
        run=ends_with(MANY_CHILDREN, Status.MEMORY, SMALL)),
    Row(4, "a child is out of memory, its parent exits with 0", "MEMORY", needs=JAILED,
        needs_groups=True, run=ends_with(CHILD_OUT_OF_MEMORY, Status.MEMORY, SMALL)),
    Row(5, "endless output", "OUTPUT_LIMIT; a megabyte is fine", run=in_box(endless_output)),
    Row(6, "busy loop deaf to signals", "TIMEOUT", run=ends_with(DEAF_LOOP, Status.TIMEOUT, Limits(wall_s=0.5))),
    Row(7, "daemon that holds stdout", "the call returns, it is dead", run=prints(DAEMON, b"gone\n")),
    Row(8, "open files", "inside only", run=prints(OPEN_FILES, b"24\n")),
    Row(9, "full disk, many files", "DISK", needs=JAILED, run=in_box(full_disk)),
    Row(10, "strange names, deep folders", "bytes round-trip", run=in_box(strange_names)),
    Row(11, "link, FIFO, socket in place of a file", "an error", run=in_box(traps_for_readers)),
    Row(12, "hostile tar", "rejected", run=in_box(hostile_tars)),
    Row(13, "link where the host writes", "not followed", run=in_box(links_for_writers)),
    Row(14, "the host through /proc", "nothing of it", needs=JAILED, run=prints(HOST_BY_PROC, b"")),
    Row(15, "signals, ptrace, a locked folder", "the launcher lives", needs=JAILED, run=in_box(against_the_launcher)),
    Row(16, "the network", "unreachable", needs=JAILED, run=in_box(reaching_out)),
    Row(17, "undoing the walls", "absent or denied", needs=JAILED, run=prints(UNDOING_THE_WALLS, b"")),
    Row(18, "setuid, capabilities", "no gain", needs=JAILED, run=prints(GAINING_PRIVILEGES, b"")),
    Row(19, "rare system calls", "denied", needs=JAILED, run=prints(RARE_CALLS, b"")),
    Row(20, "environment, files of the host", "absent", needs=JAILED, run=in_box(host_is_absent)),
    Row(25, "faked statuses, frames", "raw bytes, true status", run=in_box(fake_frames)),
    Row(26, "limits and priorities of the launcher", "out of reach", needs=JAILED,
        run=prints(REACHING_THE_LAUNCHER, b"")),
    Row(27, "memory in sockets", "bounded like memory", needs=JAILED, needs_groups=True,
        run=prints(SOCKET_BUFFERS.replace("MEMORY", str(100 * MIB)), b"True\n")),
    Row(28, "core dumps that the host pipes to a program", "none",
        run=prints("import resource; print(*resource.getrlimit(resource.RLIMIT_CORE))", b"1 1\n")),
    Row(29, "full disk, then full memory", "DISK or MEMORY, then MEMORY", needs=JAILED,
        run=in_box(full_disk_and_memory, MUCH_DISK)),
    Row(30, "what the kernel counts for each user", "others have theirs", needs=JAILED, run=counters_of_a_user),
    Row(31, "memory taken for good", "MEMORY, no call hangs", needs=JAILED, needs_groups=True,
        run=memory_taken_for_good),
    Row(32, "a removed or locked folder", "the next program fails", run=in_box(spoiled_folders)),
)  # fmt: skip
