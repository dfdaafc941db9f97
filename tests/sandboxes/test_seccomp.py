"""The system-call filter, run by a small interpreter of its language that is written from the kernel's documentation.

1. What programs need is allowed on every machine, and what nobody listed does not exist; 2. arguments decide, as the
kernel reads them; 3. another calling convention is refused; 4. any number and argument ends in a verdict; all of ioctl
is allowed but typing into a terminal, all of setsockopt but the sizes of buffers (by property); 5. a machine without a
list, and a host without libseccomp, are errors that say so; 6. real programs run behind it.
"""

import shutil
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.errors import SandboxError
from sandboxes import Limits, Pool, seccomp
from sandboxes.seccomp import MACHINES, allowing_filter

ALLOW, NO_EFFECT, NO_SUCH_CALL = 0x7FFF_0000, 0x0005_0000, 0x0005_0000 | 38
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {
        "read": 0, "mmap": 9, "ioctl": 16, "socket": 41, "socketpair": 53, "setsockopt": 54, "clone": 56, "execve": 59,
        "exit_group": 231, "setpriority": 141, "ioprio_set": 251, "sched_setaffinity": 203, "prlimit64": 302,
        "memfd_create": 319, "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "mount": 165, "sync": 162,
        "io_setup": 206, "mq_open": 240, "keyctl": 250, "unshare": 272, "setns": 308, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "read": 63, "mmap": 222, "ioctl": 29, "socket": 198, "socketpair": 199, "setsockopt": 208, "clone": 220,
        "execve": 221, "exit_group": 94, "setpriority": 140, "ioprio_set": 30, "sched_setaffinity": 122,
        "prlimit64": 261, "memfd_create": 279, "shmget": 194, "semget": 190, "msgget": 186, "ptrace": 117, "mount": 40,
        "sync": 81, "io_setup": 0, "mq_open": 180, "keyctl": 219, "unshare": 97, "setns": 268, "bpf": 280,
        "userfaultfd": 282,
    },
}  # fmt: skip
SINCE_2019 = {"io_uring_setup": 425, "open_tree": 428, "clone3": 435, "pidfd_getfd": 438, "not yet made": 999}
REFUSED = (
    "shmget", "semget", "msgget", "ptrace", "mount", "sync", "io_setup", "mq_open", "keyctl", "unshare", "setns", "bpf",
    "userfaultfd", *SINCE_2019,
)  # fmt: skip
HIGH = 0xFFFF_FFFF_0000_0000
"""The bits of an argument that the kernel drops where it expects a C int."""


def verdict(machine: str, call: str | int, *arguments: int, audit: int | None = None) -> int:
    """What the filter returns for a call, by name or number."""
    number = call if isinstance(call, int) else {**NUMBERS[machine], **SINCE_2019}[call]
    filled = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number, audit or AUDIT[machine], 0, *filled)
    program = list(struct.iter_unpack("=HBBI", allowing_filter(machine)))
    word, position = 0, 0
    while True:
        code, on_true, on_false, operand = program[position]
        position += 1
        if code == 0x20:
            [word] = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            word &= operand
        elif code == 0x05:
            position += operand
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: word == operand, 0x25: word > operand, 0x35: word >= operand}[code]
            position += on_true if holds else on_false


@pytest.mark.parametrize("machine", MACHINES)
def test_listed_calls_alone_are_allowed(machine: str) -> None:
    for name in ("read", "execve", "exit_group"):
        assert verdict(machine, name) == ALLOW, name
    for name in REFUSED:
        assert verdict(machine, name) == NO_SUCH_CALL, name


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("clone", [(17,), (0x3D0F00,)], [(0x1000_0011,), (0x80,), (HIGH | 0x0002_0000,)]),
        ("mmap", [(0, 0, 0, 0x22)], [(0, 0, 0, 0x4_0022)]),
        ("memfd_create", [(0, 3)], [(0, 5)]),
        ("ioctl", [(0, 0x5401), (0, HIGH | 0x802C_542A)], [(0, 0x5412), (0, 0x541C), (0, HIGH | 0x5412)]),
        ("socketpair", [(1,)], [(2,), (16,)]),
        ("socket", [(1,), (2, 1, 0), (10, 2, 17), (16, 3, 0)], [(40,), (17, 3), (2, 1, 262), (16, 3, 2), (HIGH | 38,)]),
        ("setpriority", [(0, 0, 5)], [(0, 1, 5), (1, 0, 5), (2, 0, 5)]),
        ("ioprio_set", [(1, 0)], [(1, 1), (2, 0), (3, 0)]),
        ("prlimit64", [(0, 7), (HIGH, 7)], [(1, 7), (HIGH | 1, 7)]),
        ("sched_setaffinity", [(0,)], [(1,)]),
    ],
)
def test_arguments_decide(
    machine: str, name: str, allowed: list[tuple[int, ...]], refused: list[tuple[int, ...]]
) -> None:
    for expected, cases in ((ALLOW, allowed), (NO_SUCH_CALL, refused)):
        for arguments in cases:
            assert verdict(machine, name, *arguments) == expected, arguments


def test_other_calling_conventions() -> None:
    assert verdict("x86_64", 1, audit=0x4000_0003) == NO_SUCH_CALL  # i386
    assert verdict("x86_64", 0x4000_0001) == NO_SUCH_CALL  # x32


ints = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2, 7, 8, 0x5412, 0x541C, HIGH | 1, HIGH | 7, HIGH | 0x5412])


@given(machine=st.sampled_from(MACHINES), number=st.integers(0, 2**32 - 1), first=ints, second=ints)
def test_every_call_gets_a_verdict(machine: str, number: int, first: int, second: int) -> None:
    assert verdict(machine, number, first, second) in {ALLOW, NO_EFFECT, NO_SUCH_CALL}
    first_int, second_int = first & 0xFFFF_FFFF, second & 0xFFFF_FFFF  # what the kernel makes of them
    is_typing = second_int in (0x5412, 0x541C)
    assert verdict(machine, "ioctl", first, second) == (NO_SUCH_CALL if is_typing else ALLOW)
    is_widening = first_int == 1 and second_int in (7, 8)
    assert verdict(machine, "setsockopt", 3, first, second) == (NO_EFFECT if is_widening else ALLOW)


def test_a_machine_without_a_list() -> None:
    with pytest.raises(SandboxError, match="no system-call filter for 'vax'"):
        allowing_filter("vax")


def test_a_host_without_libseccomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "LIBRARY", "libseccomp.so.none")
    allowing_filter.cache_clear()
    with pytest.raises(SandboxError, match="install the package libseccomp2"):
        allowing_filter("x86_64")


PYTHON = """
import asyncio, concurrent.futures, mmap, multiprocessing, os, signal, sqlite3, subprocess, tempfile

def double(number): return 2 * number

async def talk():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), '127.0.0.1', 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b''
    child = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)
    assert await child.communicate(b'x') == (b'x', None)

asyncio.run(talk())
with concurrent.futures.ThreadPoolExecutor() as threads: assert list(threads.map(double, range(9)))[8] == 16
with multiprocessing.get_context('fork').Pool(2) as workers: assert workers.map(double, range(9))[8] == 16
memory = mmap.mmap(-1, 4096); memory.write(b'x'); memory.flush()
base = sqlite3.connect('base'); base.execute('pragma journal_mode=wal'); base.execute('create table t (x)')
with tempfile.TemporaryFile() as file: file.write(b'x')
os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0)); os.mkfifo('fifo'); signal.setitimer(signal.ITIMER_REAL, 9)
print(subprocess.run(['sh', '-c', 'ulimit -n 50; nice -n 1 echo done | cat'], capture_output=True, text=True).stdout)
"""
PROGRAMS = {
    "python": ("python3", f"cat > p.py <<'EOF'\n{PYTHON}\nEOF\npython3 p.py"),
    "C": (
        "gcc",
        "printf '#include <pthread.h>\\n#include <stdio.h>\\nvoid *f(void *x) {return x;}\\nint main() {pthread_t t; "
        'pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("done");}\' > p.c && gcc -pthread p.c -o p && ./p',
    ),
    "bash": ("bash", "coproc cat; echo done >&${COPROC[1]}; read -r x <&${COPROC[0]}; cat <(echo $x) <<< y"),
    "node": (
        "node",
        'echo \'require("child_process").exec("echo done", (e, out) => require("fs").writeFile("f", out, () => '
        'console.log(require("fs").readFileSync("f", "utf8"))))\' > p.js; node p.js',
    ),
    "java": ("java", "java -Xmx64m -version && echo done"),
    "git": ("git", "git init -q . && git -c user.name=x -c user.email=x commit -q --allow-empty -m done && git log"),
    "tar": ("tar", "mkdir d; echo done > d/f; tar czf t.gz d; rm -r d; tar xzf t.gz; cp --reflink=auto d/f g; cat g"),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_real_programs(jails: Pool, name: str) -> None:
    program, script = PROGRAMS[name]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    async with jails.acquire() as box:
        result = await box.exec(
            ["bash", "-c", script], limits=Limits(wall_s=60.0, memory_bytes=2**30, file_bytes=2**30)
        )
    assert result.is_ok and b"done" in result.stdout, result
