"""Judges a program by unit tests, which run in another sandbox than the program.

::

    tests' sandbox                  host                         program's sandbox
    pytest, with
    run_tests.py ── do ──▶ relays, keeps the time ── do ──▶ serve_program.py
                 ◀─ value, raised, gone ──        ◀─ value, raised ──

A pass rests on what the tests' process says, in which nothing of the program ever runs. The program's process gives
only plain values, as any function does, and cannot say how a test went: what it answers is hostile data. A program that
dies or is killed during a test fails it, even if the test does not notice; it is started anew for the next test. What
the two say to each other passes through the host unread.

pytest is the host's own: its modules are sent to the tests' sandbox in memory, and nothing of it lies in the folder.
"""

import asyncio
import contextlib
import functools
import importlib.machinery
import importlib.util
import json
import marshal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_agent.errors import SandboxError
from sandboxes.cell import Process
from sandboxes.judge.languages import bundle
from sandboxes.judge.verdict import (
    CaseVerdict,
    Outcome,
    UnitTests,
    Verdict,
    ending_of,
    outcome_of,
    skip_after_first_failure,
)
from sandboxes.pool import Pool
from sandboxes.sandbox import Sandbox
from sandboxes.spec import ExecResult, Limits, SandboxSpec

SERVE = bundle("call", "plain", "serve_program")
RUN = bundle("plain", "stand_in", "run_tests")
PYTEST_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging")
PYGMENTS = ("", ".formatters", ".formatters.terminal", ".lexer", ".lexers", ".lexers.diff", ".lexers.python")
NO_COLOURS = "TerminalFormatter = Lexer = DiffLexer = PythonLexer = None"
"""What pytest imports of pygments, which it uses for colours alone."""
LOADING_S = 30.0
"""The time that the tests' interpreter may take to start and load them, in addition to the time of one test."""
WHOLE_S = 86_400.0
"""The time that the program's process may live, from its start through many tests, each of which has a deadline."""
MAX_NAMES_BYTES = 256 * 1024
"""The most bytes of all names of a program together; more could fill the memory of the tests' sandbox."""
MAX_LINE_BYTES = 4 * 2**20
MAX_REQUEST_BYTES = 8 * MAX_LINE_BYTES
"""The most bytes of a request. Tests are trusted, and may hand over much."""
MAX_STDERR_BYTES = 4_096
NO_END = "the test did not end"
REQUEST = b'{"do":'
"""The beginning of a line for the program, as run_tests.py writes it."""
Names = dict[str, tuple[str, list[str]]]
"""By name of the program: what kind of thing it is, and the built-in exceptions that it derives from."""


async def judge_unit_tests(
    code: str, tests: UnitTests, *, pool: Pool, spec: SandboxSpec, limits: Limits | None, stop_early: bool
) -> Verdict:
    """Return the verdict on each test. ValueError when the tests, not the program, are at fault."""
    test_files = {path: source.encode() for path, source in tests.files.items()}
    test_spec = replace(spec, files={**spec.files, **test_files})
    async with pool.acquire(spec) as program_box, pool.acquire(test_spec) as test_box, AsyncExitStack() as stack:
        program = RemoteProgram(program_box, code, tests.module, limits or program_box.limits)
        stack.push_async_callback(program.stop)
        names = await program.start()
        if names is None:
            return Verdict(cases=(program.failure,))
        conversation = Conversation(await test_box.spawn_python(RUN))
        stack.push_async_callback(conversation.end)
        await greet(conversation, {"module": tests.module, "files": tests.test_files, "names": names})
        return await TestRun(conversation, program, stop_early).verdict()


async def greet(conversation: "Conversation", order: dict[str, Any]) -> None:
    """Tell the tests' process what to run, and send it pytest, as bytecode if its Python has the host's."""
    hello = message_of(await conversation.line())
    has_same_bytecode = hello.get("bytecode") == importlib.util.MAGIC_NUMBER.hex()
    modules = await asyncio.to_thread(pytest_modules, has_same_bytecode)
    await conversation.tell({**order, "pytest": len(modules)})
    await conversation.send(modules)


@functools.cache
def pytest_modules(as_bytecode: bool) -> bytes:
    """Return pytest as the tests' process takes it: by name, the file, whether it is a package, bytecode or source.

    Loading it from source takes 0.2 s of CPU time more, for each grading.
    """
    modules: dict[str, tuple[str, bool, bytes | str]] = {}
    for package in PYTEST_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise SandboxError(f"unit tests are judged by pytest, and {package!r} is not installed; install pytest")
        folder = Path(spec.origin).parent
        root = folder.parent if spec.submodule_search_locations else folder
        for path in sorted(folder.rglob("*.py")) if spec.submodule_search_locations else [Path(spec.origin)]:
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            loader = importlib.machinery.SourceFileLoader(name, str(path))
            code = marshal.dumps(loader.get_code(name)) if as_bytecode else path.read_text()
            modules[name] = (str(path), path.name == "__init__.py", code)
    modules |= {f"pygments{name}": ("<pygments>", True, NO_COLOURS) for name in PYGMENTS}
    return marshal.dumps(modules, 4)  # in the form that every Python reads


class RemoteProgram:
    """A program in its sandbox that does what its tests ask. Its process starts when needed; call `stop` at the end."""

    def __init__(self, box: Sandbox, code: str, module: str, limits: Limits) -> None:
        self._box = box
        self._code = code
        self._module = module
        self._limits = limits
        self.wall_s = limits.wall_s  # of its start, and of one test
        self._conversation: Conversation | None = None
        self._stopping = asyncio.Lock()
        self.failure = CaseVerdict(outcome=Outcome.CRASHED)  # the reason of its last end
        self.num_ends = 0

    async def start(self) -> Names | None:
        """Start the process and return the program's names; None, with `failure` set, when it cannot be loaded."""
        process = await self._box.spawn_python(SERVE, limits=replace(self._limits, wall_s=WHOLE_S))
        conversation = self._conversation = Conversation(process)
        await conversation.tell({"code": self._code, "module": self._module, "serial": self.num_ends})
        names, outcome = None, None
        try:
            async with asyncio.timeout(self.wall_s):
                names = names_of(message_of(await conversation.line(MAX_NAMES_BYTES)))
        except TimeoutError:
            outcome = Outcome.TIMEOUT
        if names is None:
            await self.stop(outcome)
        return names

    async def ask(self, request: bytes) -> bytes:
        """Send a request and return the reply, both as lines; if there is none, a message that the program is gone."""
        if self._conversation is None:
            await self.start()
        if (conversation := self._conversation) is not None:
            await conversation.send(request)
            reply = await conversation.line()
            if conversation.num_stderr > self._limits.output_bytes:
                await self.stop(Outcome.OUTPUT_LIMIT)
            elif reply is not None:
                return reply
        await self.stop()
        return line_of({"gone": self.failure.detail})

    def new_test(self) -> None:
        if self._conversation is not None:
            self._conversation.num_stderr = 0

    async def stop(self, outcome: Outcome | None = None) -> None:
        """Kill the process and keep the reason in `failure`; if `outcome` is None, the kernel's reason."""
        async with self._stopping:  # a second caller finds it stopped, and `failure` set
            conversation, self._conversation = self._conversation, None
            if conversation is None:
                return
            result, stderr = await conversation.end()
            self.num_ends += 1
            detail = ending_of(stderr) or "the program ended"
            self.failure = CaseVerdict(outcome=outcome or outcome_of(result.status), detail=detail)


def names_of(hello: Mapping[str, Any]) -> Names | None:
    """Return the names that a program reports, or None if they are malformed."""
    try:
        return {str(name): (str(kind), [str(base) for base in bases]) for name, (kind, bases) in hello["names"].items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def line_of(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def message_of(line: bytes | None) -> dict[str, Any]:
    """Return what a line says; nothing if there is no line, or it is anything else."""
    try:
        message = json.loads(line or b"")
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


class Conversation:
    """A conversation with one process, from its start to its death by `end`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._chunks = process.stdout
        self._received = bytearray()
        self._stderr = bytearray()
        self.num_stderr = 0  # bytes since a test began
        self._draining = asyncio.create_task(self._drain())

    async def tell(self, message: Any) -> None:
        await self.send(line_of(message))

    async def send(self, data: bytes) -> None:
        """Send bytes. If nobody listens any more, `line` finds out."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            await self._process.write(data)

    async def line(self, max_bytes: int = MAX_LINE_BYTES) -> bytes | None:
        """Return the next line; None when there is none, or it is too long."""
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            chunk = None if searched > max_bytes else await anext(self._chunks, None)
            if chunk is None:
                return None
            self._received += chunk
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    async def end(self) -> tuple[ExecResult, bytes]:
        """Kill the process, and return its result and the last of its stderr."""
        await self._process.kill()
        result = await self._process.wait()
        await self._draining
        return result, bytes(self._stderr)

    async def _drain(self) -> None:
        """Read stderr until the process dies, so that it never blocks on a full pipe."""
        async for chunk in self._process.stderr:
            self._stderr += chunk
            self.num_stderr += len(chunk)
            del self._stderr[:-MAX_STDERR_BYTES]


@dataclass(eq=False)
class TestRun:
    """One run of the tests."""

    __test__ = False  # keeps pytest from collecting it

    conversation: Conversation
    program: RemoteProgram
    stop_early: bool
    _tests: list[str] = field(default_factory=list[str])
    _verdicts: dict[int, CaseVerdict] = field(default_factory=dict[int, CaseVerdict])
    _running: int | None = None
    _ends_before: int = 0  # the program's `num_ends` when the running test started
    _has_asked: bool = False

    async def verdict(self) -> Verdict:
        """Follow the tests until they are done, or their outcome is known."""
        allowed_s = self.program.wall_s + LOADING_S
        while await self._within(allowed_s):
            allowed_s = self.program.wall_s
        if not self._tests:
            await self._explain_no_tests()
        unknown = CaseVerdict(outcome=Outcome.CRASHED, detail=NO_END)
        cases = [replace(self._verdicts.get(index, unknown), output=name) for index, name in enumerate(self._tests)]
        return Verdict(cases=skip_after_first_failure(cases) if self.stop_early else tuple(cases))

    async def _within(self, allowed_s: float) -> bool:
        """Follow the next test; when its time is over, kill first the program and then the tests."""
        test = asyncio.create_task(self._until_test_ends())
        try:
            await asyncio.wait([test], timeout=allowed_s)
            if not test.done():
                await self.program.stop(Outcome.TIMEOUT)
                await asyncio.wait([test], timeout=allowed_s)
            if not test.done():
                await self.conversation.end()
                await test
                if self._running is not None:
                    self._verdicts[self._running] = CaseVerdict(outcome=Outcome.TIMEOUT, detail=NO_END)
            return await test
        finally:
            test.cancel()

    async def _until_test_ends(self) -> bool:
        """Relay requests until a test has ended; return whether there are more tests."""
        while (line := await self.conversation.line(MAX_REQUEST_BYTES)) is not None:
            if line.startswith(REQUEST):
                self._has_asked = True
                await self.conversation.send(await self.program.ask(line))
                continue
            match message_of(line):
                case {"tests": tests}:
                    self._tests = tests
                    return True
                case {"start": index}:
                    self._running, self._ends_before = index, self.program.num_ends
                    self.program.new_test()
                case {"end": index, "is_passed": is_passed, "detail": detail}:
                    if index == self._running and self.program.num_ends > self._ends_before:
                        verdict = replace(self.program.failure, detail=detail or self.program.failure.detail)
                    elif is_passed:
                        verdict = CaseVerdict(outcome=Outcome.PASSED, score=1.0)
                    else:
                        verdict = CaseVerdict(outcome=Outcome.WRONG, detail=detail)
                    self._verdicts[index] = verdict
                    if index != self._running:
                        continue  # an earlier test, which fails by the tear-down of its class or module
                    self._running = None
                    return is_passed or not self.stop_early
                case {"broken": why, "is_ours": False}:
                    self._tests = ["loading the tests"]
                    self._verdicts[0] = CaseVerdict(outcome=Outcome.CRASHED, detail=why)
                    return False
                case {"broken": why}:
                    raise ValueError(f"the tests cannot be judged: {why}")
                case _:
                    return False
        return False

    async def _explain_no_tests(self) -> None:
        """Explain why the process ended before it had loaded the tests: our fault unless the program was involved."""
        result, stderr = await self.conversation.end()
        why = f"the tests' process ended ({result.status.value}) before a test began: {ending_of(stderr)!r}"
        if not self._has_asked:
            raise SandboxError(why)
        self._tests = ["loading the tests"]
        self._verdicts[0] = CaseVerdict(outcome=Outcome.CRASHED, detail=why)
