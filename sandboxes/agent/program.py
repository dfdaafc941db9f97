"""The part of a forked process: it becomes the programs' user, within its limits, and then the program.

Its memory is a copy of the forker's, which holds nobody's data; the request is read here for the first time. All
signals are blocked until the process is the program, since other programs of its user may send them from the start.

Files of the working directory are read and written in such a process too, with the programs' rights. Data travels as
packed by `wire.py`: a file or folder is a triple of kind, path and data.
"""

import contextlib
import errno
import os
import resource
import signal
from typing import NoReturn

from sandboxes.agent import kernel
from sandboxes.agent.files import FOLDER_FLAGS, entries_below, open_folder, read_file, write_all, write_file
from sandboxes.agent.interpreter import Interpreter, run_source
from sandboxes.agent.wire import EXECUTABLE, FILE, FOLDER, REQUEST, Operation, pack, unpack

NICENESS = 10
"""Lets the agent get its turn among many programs on few CPUs."""
MAX_DESCRIPTORS = 256
"""The forker opens a dozen descriptors, with the lowest free numbers."""
MAX_DEPTH = 60
"""The deepest nesting of folders that is listed; each level holds a descriptor."""
CANNOT_RUN, NOT_FOUND = 126, 127
"""The exit codes of a shell for a program that cannot be run."""


def become_program(warm: Interpreter, request: bytes, standard: list[int], unwalled_parent: int | None) -> NoReturn:
    """Become the program.

    OSError when the process cannot be confined. What the programs before it may have spoiled, such as its folder, is
    its own failure: a message on stderr and an exit code. `unwalled_parent` is the forker where there are no walls.
    """
    operation, uid, gid, *limits = REQUEST.unpack_from(request)
    home, cwd, env, *arguments = unpack(request[REQUEST.size :])
    for target, descriptor in enumerate(standard):
        os.dup2(descriptor, target)
    _confine(uid, gid, limits)
    if unwalled_parent is not None:
        _open_up()
        _fence_in(home, unwalled_parent)
    os.closerange(3, MAX_DESCRIPTORS)
    if unwalled_parent is None:
        _open_up()
    for folder in (home, cwd):
        _enter(folder, home)
    variables = dict(text.split(b"=", 1) for text in unpack(env))
    if operation == Operation.EXECUTABLE:
        run_executable(arguments, variables)
    elif operation == Operation.SOURCE:
        run_python(warm, arguments[0], variables)
    serve_files(operation, arguments[0], int(arguments[1]))


def run_executable(argv: list[bytes], env: dict[bytes, bytes]) -> NoReturn:
    """Become an executable. One that cannot be run ends as in a shell: exit code 127 or 126, the reason on stderr."""
    for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    take_signals()
    try:
        os.execvpe(argv[0], argv, env)
    except (OSError, ValueError) as error:
        end_in_vain(
            f"cannot run {os.fsdecode(argv[0])!r}",
            error,
            NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN,
        )


def run_python(warm: Interpreter, source: bytes, env: dict[bytes, bytes]) -> NoReturn:
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_source(warm, source.decode(errors="surrogatepass"), variables, take_signals)


def take_signals() -> None:
    """Take signals from now on, also those that were sent meanwhile."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def end_in_vain(what: str, error: OSError | ValueError, code: int = CANNOT_RUN) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    with contextlib.suppress(OSError):
        os.write(2, f"sandbox: {what}: {reason}\n".encode(errors="replace"))
    os._exit(code)


def _enter(folder: bytes, home: bytes) -> None:
    """Change folder, even if an earlier program locked the working directory, as its owner may."""
    try:
        try:
            os.chdir(folder)
        except PermissionError:
            os.chmod(home, 0o700)
            os.chdir(folder)
    except OSError as error:
        end_in_vain(f"cannot enter {os.fsdecode(folder)!r}", error)


def _confine(uid: int, gid: int, limits: list[int]) -> None:
    """Set the limits, then the user; after that there is no way back."""
    os.nice(NICENESS)
    _limit(*limits)
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        kernel.drop_privileges(kernel.OF_ROOT if uid == 0 else 0)


def _open_up() -> None:
    """Let the program open its own streams by name, and so let others of its user look in and change what it does.

    Behind walls the kernel did not until now, since this came of a process that nobody may look into, or has changed
    its user: the others could stop it at any time, and it held the forker's socket.
    """
    if kernel.IS_LINUX:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    with contextlib.suppress(FileNotFoundError):
        adjustment = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(adjustment, b"1000")  # when memory is short, a program is killed, never the agent
        os.close(adjustment)


def _fence_in(home: bytes, parent: int) -> None:
    """Change folder, give up what the kernel lets a plain process give up, and die with the parent."""
    if not kernel.IS_LINUX:
        return
    kernel.drop_privileges()  # first: root with its privileges enters a locked folder, but cannot do anything in it
    _enter(home, home)
    if version := kernel.landlock_version():
        kernel.restrict_to_folder(version)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the forker died before this could watch it


def _limit(cpu_s: int, file_bytes: int, open_files: int, address_space: int, num_processes: int) -> None:
    """Set the kernel's limits. A core of one byte is none, also where the kernel would pipe cores to a program."""
    limits = {"core": (1, 1), "fsize": (file_bytes, file_bytes), "nofile": (open_files, open_files)}
    if cpu_s:
        limits["cpu"] = (cpu_s, cpu_s)  # SIGKILL: a program could handle SIGXCPU, which a lower soft limit sends
    if address_space:
        limits["as"] = (address_space, address_space)
    if num_processes:
        limits["nproc"] = (num_processes, num_processes)
    for name, (soft, hard) in limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}")
        ceiling = resource.getrlimit(number)[1]  # a stricter limit of the host's stays
        hard = hard if ceiling == resource.RLIM_INFINITY else min(hard, ceiling)
        resource.setrlimit(number, (min(soft, hard), hard))


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
