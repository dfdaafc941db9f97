"""Runs a task's tests in the verifier's sandbox, and tells what it saw. Sent there as text: it stands alone.

It traces the tests' processes. A program of the agent's is confined before its first instruction: `confine` makes it
call Landlock, so that neither it nor its children can open what the tests alone may read, or signal and trace the
tests. They keep their user and all else. Such programs are the agent's files themselves, also where the tests moved or
copied them, what its programs wrote, and tools that its files lead: compilers, archivers, `make`, `git`.

Processes of Python report to a socket as `witness.py` says; the kernel names the sender. Lines on stdout:

    unconfined WHY          once, where the kernel cannot trace or confine
    confined                of each program that was
    given WHAT              the tests hand what is theirs to a program of the agent's, or take its word
    changed PATH            a program of the agent's wrote a file that programs of the tests load by themselves
    PID loads PROGRAM       an interpreter of the tests
    PID started|agent|ended|saw ...  from witnesses ("met" of theirs is "agent" here, if the file is the agent's)
    PID exited STATUS       of processes with a witness
    done STATUS             of the tests' script; negative: killed by this signal
"""
# pyright: basic

import ctypes
import os
import re
import select
import signal
import socket
import stat
import struct
import time

NAME = "\0areal-agent-witness"
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
WALL = 0x4000_0000  # __WALL: also threads and other children
SEIZE, CONT, SYSCALL, LISTEN, GETREGSET, SETREGSET = 0x4206, 7, 24, 0x4208, 0x4204, 0x4205
OPTIONS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 7 | 1 << 20  # forks, exec, seccomp; they die with us
ON_EXEC, ON_SECCOMP, ON_STOP = 4, 7, 128
PRSTATUS = 1
X86 = os.uname().machine == "x86_64"
PTRACE, OPENAT, CLOSE, SECCOMP = (101, 257, 3, 317) if X86 else (117, 56, 57, 277)
OPEN, OPENAT2, NO_FOLDER, AT_CWD = 2, 437, -1, 2**32 - 100
LINKS = {88: (NO_FOLDER, 1), 266: (1, 2)} if X86 else {36: (1, 2)}
OLD_CALLS = {OPEN: (NO_FOLDER, 0), 82: (NO_FOLDER, 1), 85: (NO_FOLDER, 0), 86: (NO_FOLDER, 1)} if X86 else {}
MOVES = (264, 265, 316) if X86 else (37, 38, 276)  # renameat, linkat, renameat2
CALLS = {**OLD_CALLS, **LINKS, **dict.fromkeys(MOVES, (2, 3)), OPENAT: (0, 1), OPENAT2: (0, 1)}
"""Calls that are looked at: which of their arguments are the folder and the path that they make or open."""
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NUM_REGISTERS = 27 if X86 else 34
NUMBER, RESULT, PLACE, STACK = (10, 10, 16, 19) if X86 else (8, 0, 32, 31)
ARGUMENTS = (14, 13, 12, 7, 9, 8) if X86 else (0, 1, 2, 3, 4, 5)
TRAP = b"\x0f\x05" if X86 else b"\x01\x00\x00\xd4"  # the instruction that calls the kernel
READ, FILES = 1 | 1 << 2, 1 | 1 << 1 | 1 << 2 | 1 << 14  # rights: execute and read; and write and truncate
ALL = FILES | 0x1FF << 4 | 1 << 13  # and remove, make and link; folders may be listed anywhere
O_PATH = 0o10000000
O_DIRECTORY = os.O_DIRECTORY
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/opt", "/etc", "/.")
INSTALLED = ("/usr/local", "/opt")
SHELLS = "sh|bash|dash|zsh|ksh|fish|gawk|mawk|awk"
INTERPRETERS = re.compile(
    rf"({SHELLS}|python|pypy|perl|ruby|node|nodejs|deno|bun|php|lua|luajit|tclsh|Rscript|julia|guile"
    r"|racket|ocaml|runghc|elixir|escript|octave|swipl|java|dotnet|mono)[-\d.]*"
)
RUNNERS = re.compile(
    r"make|gmake|cmake|ctest|ninja|just|npm|npx|yarn|pnpm|go|cargo|java|gradle|mvn|dotnet|node|deno|bun|bundle|rake|tox"
    r"|nox|git|swift|zig|cabal|stack|dune|sbt|mix|composer"
)
MANY = ("busybox", "toybox", "coreutils")  # programs that are many by the name that they are called by
TOOLS = re.compile(
    r"\[|b2sum|base64|basename|cat|chgrp|chmod|chown|cksum|cmp|comm|cp|cut|date|dd|df|diff|dirname|du|echo|egrep"
    r"|env|expr|false|fgrep|file|find|grep|head|hexdump|id|install|join|kill|ldd|ln|ls|md5sum|mkdir|mkfifo|mktemp"
    r"|mv|nice|nl|nm|nohup|od|paste|pgrep|pkill|printenv|printf|ps|pwd|readelf|readlink|realpath|rev|rm|rmdir"
    r"|runuser|seq|setpriv|setsid|sha1sum|sha224sum|sha256sum|sha384sum|sha512sum|shuf|sleep|sort|split|stat"
    r"|stdbuf|strings|su|sudo|sum|sync|tac|tail|tee|test|time|timeout|touch|tr|true|truncate|uname|uniq|wc|which"
    r"|whoami|xargs|xxd|yes"
)
"""Programs that do with files what their arguments say, and nothing that the files say."""
STARTS_TESTS = re.compile(r"(?:^|[^a-z])(?:test|check(?!out)|spec|verify)|(?:ctest|[tn]ox)$")
COMMAND_LINE = re.compile(r"/proc/(\d+)/(?:task/\d+/)?cmdline")
MAX_COMPARED = 2**26
INLINE = {True: re.compile("-[A-Za-z]*c"), False: re.compile("-[A-Za-z]*[eEp]|--eval|--print")}
PRELOADED, LIBRARIES = re.compile("LD_PRELOAD=([^\0]*)"), re.compile("LD_LIBRARY_PATH=([^\0:]*)")
PATHS = re.compile(r"/[^\s'\",;:=]*")
FRAMEWORKS = ("unittest", "pytest", "py.test")


class Supervisor:
    def __init__(self, declared, kept):
        self.declared, self.kept = declared, kept
        self.started_s = time.time()
        self.confined, self.spared, self.watched, self.handed, self.written = (set() for _ in range(5))
        self.by_size = by_size(declared), by_size(kept[:1])
        if self.is_declared(os.path.expanduser("~")):
            tell("given", "their home, with settings, is where it worked")
        self.marks = {mark_of(os.stat(path)) for folder in declared for path in files_in(folder)}
        self.version = syscall(CREATE_RULESET, None, 0, 1)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(NAME)
        self.socket.setblocking(False)
        self.woken, waker = os.pipe()
        for end in (self.woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self, argv, env):
        """Run a program to its end, with all that it starts."""
        ready, go = os.pipe()
        first = os.fork()
        if first == 0:
            for descriptor in range(3):  # what is said on stdout is the supervisor's alone
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os.read(ready, 1)
            os.execve(argv[0], argv, env)
        is_traced = self.version > 0 and ptrace(SEIZE, first, 0, OPTIONS) == 0
        if not is_traced:
            tell("unconfined", "there is no Landlock" if self.version <= 0 else "tracing is not allowed")
        LIBC.prctl(4, 0, 0, 0, 0)  # nobody may look into this process, or use what it has open
        os.write(go, b"x")
        while True:
            select.select([self.socket, self.woken], [], [])
            self.receive()
            drain(self.woken)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG | WALL)
                except ChildProcessError:
                    pid, status = first, 0
                if pid == 0:
                    break
                if os.WIFSTOPPED(status):
                    self.attend(pid, status)
                    continue
                self.receive()
                if pid in self.watched:
                    tell(pid, "exited", os.waitstatus_to_exitcode(status))
                if pid == first:
                    tell("done", os.waitstatus_to_exitcode(status))
                    return

    def attend(self, pid, status):
        """Let a stopped process go on; one that has become a program of the agent's is confined first."""
        number, event = os.WSTOPSIG(status), status >> 16
        try:
            if event == ON_EXEC:
                self.judge(pid)
            elif event == ON_SECCOMP:
                self.look(pid)
        except OSError as error:
            if event == ON_EXEC and state_of(pid, "State") not in ("Z", "X"):
                tell("unconfined", error)
        is_group_stop = event == ON_STOP and number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
        ptrace(LISTEN if is_group_stop else CONT, pid, 0, 0 if event else number)

    def judge(self, pid):
        if is_below(pid, self.confined):
            self.confined.add(pid)
            return
        exe, cwd = os.readlink(f"/proc/{pid}/exe"), os.readlink(f"/proc/{pid}/cwd")
        argv = [os.fsdecode(word) for word in content(f"/proc/{pid}/cmdline").split(b"\0")[:-1]]
        script, called = real(cwd, asked_for(pid)), " ".join(argv)[:200]
        name = os.path.basename(argv[0] if os.path.basename(exe) in MANY else exe)
        given, program = list(self.given(cwd, argv)), None
        if INTERPRETERS.fullmatch(name):
            program = program_of(pid, name, cwd, argv)
            if program and RUNNERS.fullmatch(os.path.basename(program)) and not self.is_left(program):
                name, program = os.path.basename(program), None  # a script of the interpreter's, like npm
        is_runner = program is None and RUNNERS.fullmatch(name) is not None
        if not self.is_agents(pid, exe, script, program):
            if is_runner and not given and self.is_left(cwd):
                if any(map(STARTS_TESTS.search, argv)):
                    tell("given", f"its word is theirs, {called}")
            elif self.is_led(pid, name, cwd, argv, given):
                if given:
                    tell("given", called)
                    self.spared.add(pid)
                    return
            else:
                if (INTERPRETERS.fullmatch(name) and not re.match(SHELLS, name)) or is_runner:
                    tell(pid, "loads", name)
                return
        elif self.is_left(script) and (TOOLS.fullmatch(own := os.path.basename(script)) or INTERPRETERS.fullmatch(own)):
            tell("given", f"it is in place of theirs, {called}")
        self.handed.update(given)
        if any(os.path.isdir(path) or within(path, self.kept[1]) for path in given):
            tell("given", called)
            return
        for path in self.held(pid):
            tell("given", f"{path}, open, {called}")
        self.confine(pid, given, INSTALLED if is_runner else ())
        self.confined.add(pid)
        tell("confined", called)

    def is_agents(self, pid, exe, script, program):
        """Return whether a process has become a program that consists of the agent's files."""
        environ = os.fsdecode(content(f"/proc/{pid}/environ"))
        if any(map(self.is_left, LIBRARIES.findall(environ))):
            tell("given", f"{exe} loads its libraries")
        preloaded = (path for paths in PRELOADED.findall(environ) for path in re.split("[ :]", paths))
        return any(map(self.is_left, (exe, *preloaded))) or any(map(self.is_program, filter(None, (script, program))))

    def is_led(self, pid, name, cwd, argv, given):
        """Return whether a process is a tool that does what the agent's files say; with files of the tests, `given`."""
        if TOOLS.fullmatch(name) or INTERPRETERS.fullmatch(name) or is_below(pid, self.spared):
            return False
        named = [word for text in argv[1:] for word in (text, *PATHS.findall(text))]
        files = [real(cwd, path) for path in (*named, f"/proc/{pid}/fd/0")]
        given += [path for path in files if path.endswith((".o", ".a")) and is_file(path) and not self.is_left(path)]
        return any(map(self.is_left, files))

    def is_program(self, path):
        """Return whether a file is one of the agent's, to be run."""
        if os.path.basename(path) in FRAMEWORKS or not self.is_left(path):
            return False
        if self.is_written(path) and (not os.path.isfile(path) or content(path)[:4] != b"\x7fELF"):
            tell("given", f"what they run is of its making, {path}")
        return True

    def is_left(self, path):
        """Return whether a file is the agent's, also a copy that the tests made; of a folder, whether one in it is."""
        if not os.path.exists(path) or any(within(path, kept) for kept in self.kept):
            return False
        if os.path.isdir(path):
            return self.is_declared(path) or any(self.is_left(one.path) for one in os.scandir(path) if one.is_file())
        state = os.stat(path)
        if mark_of(state) in self.marks or not stat.S_ISREG(state.st_mode):
            return mark_of(state) in self.marks or stat.S_ISFIFO(state.st_mode)
        is_written = self.is_written(path)
        of_work, of_tests = (files.get(state.st_size, ()) for files in self.by_size)
        if state.st_ctime <= self.started_s or state.st_size > MAX_COMPARED or not (is_written or of_work):
            return is_written
        data = content(path)
        return not is_among(data, of_tests) and (is_written or is_among(data, of_work))

    def is_written(self, path):
        """Return whether a program of the agent's may have written a file, or moved a folder that it is in."""
        return not self.written.isdisjoint(parents_of(path)) or stat.S_ISFIFO(os.stat(path).st_mode)

    def held(self, pid):
        """Yield what is kept and open for a program, but not a file on stdin from its start; note what it may write."""
        for number in os.listdir(f"/proc/{pid}/fd"):
            path, info = os.readlink(f"/proc/{pid}/fd/{number}"), content(f"/proc/{pid}/fdinfo/{number}").split()
            is_input = number == "0" and info[1] == b"0"
            if int(info[3], 8) & 3 and is_file(path):
                self.written.add(path)
            if (within(path, self.kept[0]) and not is_input) or path.startswith(f"{self.kept[1]}/reward."):
                yield path

    def given(self, cwd, argv):
        """Yield the paths among what is kept that a program's arguments name."""
        for word in argv[1:]:
            for path in (os.path.join(cwd, word), *PATHS.findall(word)):
                if any(within(os.path.normpath(path), kept) for kept in self.kept) and (
                    os.path.exists(path) or within(path, self.kept[1])
                ):
                    yield os.path.normpath(path)

    def is_declared(self, path):
        return any(within(path, declared) for declared in self.declared)

    def confine(self, pid, given, writable):
        """Make a process that is about to start give up what is kept, for itself and its children.

        What the tests run later can only be read, but for what is `writable` of it.
        """
        step(pid)  # to the end of its call to exec
        saved = registers(pid)
        place, data = saved[PLACE], (saved[STACK] - 4096) & -16
        with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
            code = os.pread(memory.fileno(), 8, place)
            os.pwrite(memory.fileno(), TRAP, place)

            def call(number, *arguments):
                state = list(saved)
                if X86:
                    state[15] = 2**64 - 1  # no call to restart
                state[NUMBER], state[PLACE] = number, place
                for index, value in zip(ARGUMENTS, arguments):  # noqa: B905  # also for Python 3.9
                    state[index] = value & (2**64 - 1)
                set_registers(pid, state)
                step(pid)
                step(pid)
                result = registers(pid)[RESULT]
                return result - 2**64 if result >> 63 else result

            def put(content):
                os.pwrite(memory.fileno(), content, data)
                return data

            scopes = 3 if self.version >= 6 else 0
            handled = ALL if self.version >= 3 else ALL & ~(1 << 14)
            handled = handled if self.version >= 2 else handled & ~(1 << 13)
            ruleset = call(CREATE_RULESET, put(struct.pack("=QQQ", handled, 0, scopes)), 24 if scopes else 8, 0)
            rules = [(path, READ if path.startswith(SYSTEM) else ALL) for path in self.free("/")]
            rules += [(path, ALL) for path in (*writable, *self.declared)] + [(path, READ) for path in given]
            for path, rights in rules:
                rights &= handled if os.path.isdir(path) else handled & FILES
                beneath = call(OPENAT, -100, put(os.fsencode(path) + b"\0"), O_PATH, 0)
                if beneath >= 0:
                    call(ADD_RULE, ruleset, 1, put(struct.pack("=Qi", rights, beneath)), 0)
                    call(CLOSE, beneath)
            result = call(RESTRICT_SELF, ruleset, 0)
            call(CLOSE, ruleset)
            call(SECCOMP, 1, 0, put(struct.pack("=HxxxxxxQ", 3 + len(CALLS), data + 16) + reporting()))
            os.pwrite(memory.fileno(), code, place)
        set_registers(pid, saved)
        if ruleset < 0 or result < 0:
            tell("unconfined", f"Landlock: {os.strerror(-min(ruleset, result))}")

    def free(self, folder):
        """Yield the paths that are not kept and hold nothing that is."""
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if any(within(kept, path) for kept in self.kept):
                if path not in self.kept:
                    yield from self.free(path)
            elif not os.path.islink(path):
                yield path

    def look(self, pid):
        """Note what a confined program opens, links and writes; whether it can is not decided here."""
        state = list(registers(pid))
        number = state[15 if X86 else NUMBER]
        folder, place = CALLS[number]
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:

            def text(index):
                return os.fsdecode(os.pread(memory.fileno(), 4096, state[ARGUMENTS[index]]).split(b"\0")[0])

            def named(folder, index):
                number = AT_CWD if folder == NO_FOLDER else state[ARGUMENTS[folder]] & 0xFFFF_FFFF
                base = os.readlink(f"/proc/{pid}/cwd" if number == AT_CWD else f"/proc/{pid}/fd/{number}")
                return os.path.normpath(os.path.join(base, text(index)))

            path, flags, target = named(folder, place), os.O_WRONLY, None
            if number in (OPEN * X86, OPENAT):
                flags = state[ARGUMENTS[place + 1]]
            elif number == OPENAT2:
                flags = struct.unpack("=Q", os.pread(memory.fileno(), 8, state[ARGUMENTS[2]]))[0]
            elif number in LINKS:
                target = text(0)
            elif place and os.path.islink(old := named(max(folder - 2, NO_FOLDER), place // 2)):
                target = os.readlink(old)
        leads = target is not None and real(os.path.dirname(path), target)
        if leads and any(within(leads, kept) or within(kept, leads) for kept in self.kept):
            tell(pid, "saw", "link", f"a program of the agent's links {path} to {leads}")
            state[ARGUMENTS[place]] = 0  # so that it fails
            set_registers(pid, state)
        elif flags & (os.O_WRONLY | os.O_RDWR):
            self.written.add(os.path.realpath(path))
            if (path.startswith(os.path.expanduser("~/.")) and "/.cache/" not in path) or path.endswith(".pth"):
                tell("changed", path)
        looked_up = COMMAND_LINE.fullmatch(path)
        if looked_up and not is_below(int(looked_up[1]), self.confined):
            tell("given", "it looks up their command lines")
        for kept, kind in zip(self.kept, ("reads_tests", "writes_reward")):  # noqa: B905
            if within(path, kept) and path not in self.handed and not flags & O_DIRECTORY:
                tell(pid, "saw", kind, f"a program of the agent's opens {path}")

    def receive(self):
        while True:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return
            for _, kind, credentials in ancillary:
                if kind == 2:  # SCM_CREDENTIALS
                    pid = struct.unpack("=iII", credentials)[0]
                    word, _, path = data.decode(errors="replace").partition(" ")
                    if pid not in self.confined and (word != "met" or self.is_left(os.path.realpath(path))):
                        self.watched.add(pid)
                        tell(pid, "agent" if word == "met" else word, path)


def reporting():
    """Return a filter of system calls under which those that are looked at stop for the tracer."""
    last = 1 + len(CALLS)
    steps = [(0x20, 0, 0, 0)]  # load the number of the call
    steps += [(0x15, last - index, 0, number) for index, number in enumerate(CALLS, 1)]
    steps += [(0x06, 0, 0, 0x7FFF_0000), (0x06, 0, 0, 0x7FF0_0000)]  # allow; stop
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def content(path):
    with open(path, "rb") as file:
        return file.read()


def is_file(path):
    return os.path.isfile(path) and not os.path.islink(path)


def files_in(folder):
    for root, _, names in os.walk(folder):
        yield from (path for path in (os.path.join(root, name) for name in names) if is_file(path))


def real(folder, path) -> str:
    return os.path.realpath(os.path.join(folder, path))


def parents_of(path):
    """Return a path and the folders that it is in."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(2, len(parts) + 1)]


def by_size(folders):
    found = {}
    for path in (path for folder in folders for path in files_in(folder)):
        found.setdefault(os.path.getsize(path), []).append(path)
    return found


def is_among(data, paths):
    return any(os.path.isfile(path) and content(path) == data for path in paths)


def mark_of(state):
    """Return what stays of a file when it is moved, or its mode is changed."""
    return state.st_ino, state.st_size, state.st_mtime_ns


def asked_for(pid):
    """Return the path that a process gave to exec: of a script, where `exe` is its interpreter."""
    with open(f"/proc/{pid}/auxv", "rb") as file, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        place = dict(struct.iter_unpack("=QQ", file.read()))[31]  # AT_EXECFN
        return os.fsdecode(os.pread(memory.fileno(), 4096, place).split(b"\0")[0])


def state_of(pid, key):
    """Return what the kernel says of a process; "X" where it has gone."""
    try:
        lines = content(f"/proc/{pid}/status").decode(errors="replace").split("\n")
        return next(line.split()[1] for line in lines if line.startswith(key))
    except (OSError, StopIteration):
        return "X"


def is_below(pid, among):
    """Return whether a process, or one of its ancestors, is among others."""
    while pid > 1 and pid not in among:
        parent = state_of(pid, "PPid")
        pid = int(parent) if parent.isdigit() else 0
    return pid in among


def program_of(pid, name, cwd, argv):
    """Return the file that an interpreter runs; "" for a module or text in its arguments, None for nothing."""
    rest = argv[1:]
    if "-m" in rest[:-1]:
        module = rest[rest.index("-m") + 1].split(".")[0]
        rest = [] if module in FRAMEWORKS else [module, f"{module}.py"]
        return next((place for word in rest if os.path.exists(place := real(cwd, word))), "")
    for word in rest:
        if INLINE[re.match(f"{SHELLS}|python|pypy", name) is not None].fullmatch(word):
            return ""
        if os.path.exists(place := real(cwd, word)):
            return place
    stdin = real(cwd, f"/proc/{pid}/fd/0")
    return stdin if is_file(stdin) else None


def within(path, folder):
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def registers(pid):
    buffer = ctypes.create_string_buffer(NUM_REGISTERS * 8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), len(buffer))
    if ptrace(GETREGSET, pid, PRSTATUS, ctypes.addressof(vector)) < 0:
        raise OSError("gone")
    return struct.unpack(f"={NUM_REGISTERS}Q", buffer.raw)


def set_registers(pid, values):
    buffer = ctypes.create_string_buffer(struct.pack(f"={NUM_REGISTERS}Q", *values), NUM_REGISTERS * 8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), len(buffer))
    if ptrace(SETREGSET, pid, PRSTATUS, ctypes.addressof(vector)) < 0:
        raise OSError("gone")


def step(pid):
    """Let a process go on to the next beginning or end of a system call."""
    number = 0
    while number != signal.SIGTRAP | 0x80:
        ptrace(SYSCALL, pid, 0, number)
        _, status = os.waitpid(pid, WALL)
        if not os.WIFSTOPPED(status):
            raise OSError("gone")
        number = os.WSTOPSIG(status)


def ptrace(request, pid, address, data):
    return syscall(PTRACE, request, pid, address, data)


def syscall(number, *arguments):
    return LIBC.syscall(number, *(ctypes.c_void_p(value) for value in arguments))


def drain(descriptor):
    try:
        while os.read(descriptor, 512):
            pass
    except BlockingIOError:
        pass


def tell(*words):
    line = " ".join(map(str, words)).encode(errors="replace").replace(b"\n", b" ")
    os.write(1, line[:2000] + b"\n")


def supervise(command, env, declared, kept, modules):
    env = {**os.environ, **env}
    if modules:
        env["PYTHONPATH"] = ":".join(filter(None, (modules, env.get("PYTHONPATH"))))
    Supervisor(declared, kept).run(["/bin/sh", "-c", command], env)
