"""A stateful shell: bash commands that share variables, functions, aliases, options, umask and the folder they are in.

Each run is a process of its own, with limits of its own, and its status is the kernel's: nothing that a command prints,
and nothing that it writes to a descriptor, can stand for one. What the next run is to find is saved by bash when a run
ends, in a file of the sandbox. A run that is killed, becomes another program (`exec`) or has an EXIT trap of its own
has saved nothing: the next finds what the last whole one left, and files as they are. Background jobs end with their
run; what is to live on is started with `Sandbox.spawn`.
"""

import asyncio
import secrets
from typing import Protocol, Self

from sandboxes.limits import Limits
from sandboxes.result import ExecResult

MAX_COMMAND_BYTES = 100_000
"""A little less than Linux takes as one argument."""
RUN = r"""
__state=${TMPDIR:-/tmp}/.shell-KEY
trap '
    {
        compgen -v | while IFS= read -r __name; do
            case $__name in
                BASH*|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|PWD) ;;
                RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_|__name|__state) ;;
                *) declare -p "$__name" || : ;;
            esac
        done || :
        declare -f
        alias -p
        umask -p
        printf "builtin cd -- %q || :\n" "$PWD"
        shopt -p || :
        set +o
        command mv -f "$__state.new" "$__state"
    } >| "$__state.new" 2> /dev/null
' EXIT
eval "shift; if [ -r \"\$__state\" ]; then . \"\$__state\" 2> /dev/null; fi
$1"
"""


class Exec(Protocol):
    """`Sandbox.exec`."""

    async def __call__(self, argv: list[str], *, stdin: bytes, limits: Limits | None) -> ExecResult: ...


class ShellSession:
    """One after another; a run that is asked for meanwhile waits. Nothing needs to be closed.

    As in `async with box.shell() as shell: await shell.run("cd src"); await shell.run("pwd")`.
    """

    def __init__(self, execute: Exec) -> None:
        self._execute = execute
        self._script = RUN.replace("KEY", secrets.token_hex(8))
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def run(self, command: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        """Run bash commands. A sandbox without bash answers with exit code 127."""
        if len(command.encode(errors="surrogateescape")) > MAX_COMMAND_BYTES:
            raise ValueError(f"the command is longer than {MAX_COMMAND_BYTES} bytes; write it to a file, and run that")
        async with self._turn:
            return await self._execute(["bash", "-c", self._script, "bash", command], stdin=stdin, limits=limits)
