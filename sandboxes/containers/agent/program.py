"""The part of a forked process: it becomes the programs' user, within its limits, and then the program.

Its memory is a copy of the forker's, which holds nobody's data; the request is read here for the first time.

Files of the working directory are read and written in such a process too, with the programs' rights. Data travels as
packed by `wire.py`: a file or folder is a triple of kind, path and data.
"""

import errno
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from sandboxes.containers.agent.wire import EXECUTABLE, FILE, FOLDER, REQUEST, Operation, pack, unpack
from sandboxes.inner.files import FOLDER_FLAGS, entries_below, open_folder, read_file, write_all, write_file
from sandboxes.inner.processes import run_executable

try:
    import resource

    subprocess = None  # importing it would take longer than everything else here
except ImportError:  # python3-minimal: a program of util-linux sets limits there
    import subprocess

    resource = None
try:
    from sandboxes.inner import kernel, program
except ImportError:  # no ctypes: a Python program gets an interpreter of its own
    kernel = program = None

if TYPE_CHECKING:
    from sandboxes.inner.program import Interpreter

NICENESS = 10
"""Lets the agent get its turn among many programs on few CPUs."""
ROOT_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3
"""What programs that run as root keep: CHOWN, DAC_OVERRIDE and FOWNER, so that they may change any file of theirs."""
MAX_DESCRIPTORS = 256
"""The forker opens a dozen descriptors, with the lowest free numbers."""
MAX_DEPTH = 60
"""The deepest nesting of folders that is listed; each level holds a descriptor."""


def become_program(interpreter: "Interpreter | None", request: bytes, standard: list[int]) -> NoReturn:
    """Become the program, in the container's working directory; without `interpreter`, Python starts afresh."""
    operation, uid, gid, *limits = REQUEST.unpack_from(request)
    cwd, env, *arguments = unpack(request[REQUEST.size :])
    _confine(uid, gid, limits)
    _enter(cwd)
    for target, descriptor in enumerate(standard):
        os.dup2(descriptor, target)
    os.closerange(3, MAX_DESCRIPTORS)
    variables = dict(text.split(b"=", 1) for text in unpack(env))
    if operation == Operation.EXECUTABLE:
        run_executable(arguments, variables)
    elif operation == Operation.SOURCE:
        run_python(interpreter, arguments[0], variables)
    serve_files(operation, arguments[0], int(arguments[1]))


def run_python(interpreter: "Interpreter | None", source: bytes, env: dict[bytes, bytes]) -> NoReturn:
    if kernel is None or program is None or interpreter is None:
        run_executable([os.fsencode(sys.executable), b"-X", b"utf8", b"-c", source], env)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # changing the user cleared it, which made /dev/stdin unreadable
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    program.run_source(interpreter, source.decode(errors="surrogatepass"), variables)


def _enter(cwd: bytes) -> None:
    """Change folder, even if an earlier program locked the working directory, as its owner may."""
    try:
        os.chdir(cwd)
    except PermissionError:
        os.chmod(os.getcwdb(), 0o700)
        os.chdir(cwd)


def _confine(uid: int, gid: int, limits: list[int]) -> None:
    """Set the limits, then the user; after that there is no way back."""
    os.nice(NICENESS)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory is short, a program is killed, never the agent
    _limit(*limits)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if kernel is not None:
        mask = ROOT_CAPABILITIES if uid == 0 else 0
        kernel.set_capabilities(mask, mask)
    elif uid == 0:
        raise OSError(errno.EPERM, "root would keep what lets it become the agent's user")


def _limit(cpu_s: int, file_bytes: int, open_files: int) -> None:
    limits = {"fsize": (file_bytes, file_bytes), "nofile": (open_files, open_files), "core": (0, 0)}
    if cpu_s:
        limits["cpu"] = (cpu_s, cpu_s + 1)  # a program that ignores the first limit's signal is killed at the second
    if resource is not None:
        for name, pair in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), pair)
    elif subprocess is not None:
        options = [f"--{name}={soft}:{hard}" for name, (soft, hard) in limits.items()]
        subprocess.run(["prlimit", f"--pid={os.getpid()}", *options], check=True, env={"PATH": "/usr/bin:/bin"})


def serve_files(operation: int, path: bytes, max_bytes: int) -> NoReturn:
    """Handle files; the exit code is the errno."""
    try:
        FILE_ACTS[Operation(operation)](path, max_bytes)
    except OSError as error:
        os._exit(error.errno or 255)
    os._exit(0)


def send_file(path: bytes, max_bytes: int) -> None:
    *parents, name = _names(path)
    with open_folder(_here(), parents) as folder:
        data = read_file(folder, name, max_bytes)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, "longer than allowed")
    write_all(1, data)


def receive_files(path: bytes, _max_bytes: int) -> None:
    """Write files and folders from packed triples, whose paths are below `path`."""
    with open(0, "rb") as source:
        triples = unpack(source.read())
    top, above = _here(), _names(path)
    for kind, place, data in zip(triples[::3], triples[1::3], triples[2::3], strict=True):
        names = above + _names(place)
        with open_folder(top, names if kind == FOLDER else names[:-1], create=True) as folder:
            if kind != FOLDER:
                write_file(folder, names[-1], data, 0o700 if kind == EXECUTABLE else 0o600)


def send_tree(path: bytes, max_bytes: int) -> None:
    """Send what is below a folder as such triples; EFBIG when they exceed `max_bytes`."""
    room = max_bytes
    with open_folder(_here(), _names(path)) as folder:
        for place, data, is_executable in entries_below(folder, max_bytes, MAX_DEPTH):
            kind = FOLDER if data is None else EXECUTABLE if is_executable else FILE
            entry = pack(kind, os.fsencode(place), data or b"")
            room -= len(entry)
            if room < 0:
                raise OSError(errno.EFBIG, "more than asked for")
            write_all(1, entry)


FILE_ACTS = {Operation.READ: send_file, Operation.WRITE: receive_files, Operation.LIST: send_tree}


def _here() -> int:
    return os.open(".", FOLDER_FLAGS)


def _names(path: bytes) -> list[str]:
    return [os.fsdecode(name) for name in path.split(b"/") if name not in (b"", b".")]
