"""What the agent is asked to do, packed: a program, or something with files."""

import os
from collections.abc import Mapping

from sandboxes.base import Program
from sandboxes.containers.agent.wire import REQUEST, Operation, pack
from sandboxes.containers.confinement import User
from sandboxes.limits import Limits
from sandboxes.paths import folder_parts

UNBOUNDED = 2**63 - 1


def program_request(program: Program, env: Mapping[str, str], user: User, limits: Limits, *, is_timed: bool) -> bytes:
    """`env` is all of its environment."""
    operation = Operation.EXECUTABLE if program.source is None else Operation.SOURCE
    if program.source is None:
        arguments = [encoded(argument) for argument in program.argv]
    else:  # as it is: what is no Python in it, half a character too, its own interpreter says
        arguments = [program.source.encode(errors="surrogatepass")]
    cpu_s = limits.max_cpu_s if is_timed else 0
    numbers = (operation, user.uid, user.gid, cpu_s, -1, limits.file_bytes, limits.open_files)
    return _packed(numbers, folder_of(program.cwd), env, arguments)


def file_request(operation: Operation, user: User, *arguments: bytes, open_files: int = 128) -> bytes:
    numbers = (operation, user.uid, user.gid, 0, -1, UNBOUNDED, open_files)
    return _packed(numbers, b".", {}, arguments)


def folder_of(path: str) -> bytes:
    """PermissionError for one outside of the working directory."""
    return encoded("/".join(folder_parts(path)) or ".")


def encoded(text: str) -> bytes:
    """As it reaches the kernel; ValueError for what cannot."""
    data = os.fsencode(text)
    if b"\0" in data:
        raise ValueError(f"{text[:200]!r} holds a NUL byte, which no argument, path or variable can")
    return data


def _packed(
    numbers: tuple[int, ...], cwd: bytes, env: Mapping[str, str], arguments: "list[bytes] | tuple[bytes, ...]"
) -> bytes:
    variables = [encoded(f"{name}={value}") for name, value in env.items()]
    return REQUEST.pack(*numbers) + pack(cwd, pack(*variables), *arguments)
