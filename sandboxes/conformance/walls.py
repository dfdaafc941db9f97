"""Rows 14 to 20: programs that try to get out of a sandbox."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Generator

from sandboxes.conformance.row import JAILED, Row, in_box, prints, told
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Limits, Status

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
import ctypes, os, glob
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
    '/', '/usr', '/dev', '/sandbox', '/proc/sys/kernel/hostname', '/proc/sysrq-trigger', '/sys/kernel/uevent_helper',
    '/sys/fs/cgroup', *groups[:50],
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
    'x86_64': {'keyctl': 250, 'add_key': 248, 'bpf': 321, 'perf_event_open': 298, 'userfaultfd': 323, 'ptrace': 101},
    'aarch64': {'keyctl': 219, 'add_key': 217, 'bpf': 280, 'perf_event_open': 241, 'userfaultfd': 282, 'ptrace': 117},
}[machine]
for name, number in {**numbers, 'io_uring_setup': 425, 'open_tree': 428, 'fsopen': 430}.items():
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38): print(name, ctypes.get_errno())
for request in (0x5412, 0x541C):
    try:
        fcntl.ioctl(0, request, b'x')
        print(hex(request))
    except OSError as error:
        if error.errno != 1: print(hex(request), error)
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


async def reaching_out(box: Sandbox) -> str:
    with listeners() as (port, name):
        source = NETWORK.replace("{port}", str(port)).replace("{name}", name)
        result = await box.exec_python(source, limits=Limits(wall_s=30.0))
    return "" if result.is_ok and not result.stdout else f"{told(result)}, reached {result.stdout!r}"


async def against_the_launcher(box: Sandbox) -> str:
    """Attack the launcher. The program may kill itself; what runs afterwards shows whether the launcher lives."""
    result = await box.exec_python(AGAINST_THE_LAUNCHER)
    if b"traced" in result.stdout:
        return told(result)
    return "" if result.status in (Status.OK, Status.SIGNALED) else told(result)


async def host_is_absent(box: Sandbox) -> str:
    """Look for the host's files, name and environment; none may be there."""
    with tempfile.NamedTemporaryFile() as canary:
        source = HOST_FILES.replace("{paths}", repr([canary.name, os.getcwd(), __file__]))
        result = await box.exec_python(source.replace("{host}", repr(socket.gethostname())))
    expected = b"['HOME', 'PATH', 'TMPDIR']\n"
    return "" if result.is_ok and result.stdout == expected else f"{told(result)}, printed {result.stdout!r}"


ROWS = (
    Row(
        number=14, harm="the host through /proc", required="nothing of it", needs=JAILED,
        run=prints(HOST_BY_PROC, b""),
    ),
    Row(
        number=15, harm="signals, ptrace, a locked folder", required="the launcher lives", needs=JAILED,
        run=in_box(against_the_launcher),
    ),
    Row(number=16, harm="the network", required="unreachable", needs=JAILED, run=in_box(reaching_out)),
    Row(
        number=17, harm="undoing the walls", required="absent or denied", needs=JAILED,
        run=prints(UNDOING_THE_WALLS, b""),
    ),
    Row(number=18, harm="setuid, capabilities", required="no gain", needs=JAILED, run=prints(GAINING_PRIVILEGES, b"")),
    Row(number=19, harm="rare system calls", required="denied", needs=JAILED, run=prints(RARE_CALLS, b"")),
    Row(
        number=20, harm="environment, files of the host", required="absent", needs=JAILED,
        run=in_box(host_is_absent),
    ),
)  # fmt: skip
