"""Which Dockerfiles are built: those that cannot ask for anything but files and a way to run. It builds nothing.

They may come from task data. What is not on the list is refused, whatever it would do: other files than the folder's,
volumes, triggers, flags that ask for mounts, networks or privileges, and directives that choose another reader.
"""

import re

from areal_agent.errors import SandboxError

ALLOWED = ("FROM", "RUN", "COPY", "ENV", "ARG", "WORKDIR", "USER", "LABEL", "SHELL", "CMD", "ENTRYPOINT")
ALLOWED_FLAGS = {"COPY": ("--from=", "--chown=", "--chmod="), "FROM": ()}
IMAGE = re.compile(r"[a-z0-9][a-z0-9._/-]*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)
OWN_LABELS = "areal-agent."


def images_of(text: str) -> list[str]:
    """The images that it builds upon; SandboxError, with the line, for what is not allowed."""
    images: list[str] = []
    stages: set[str] = set()  # by their names and numbers
    num_stages = 0
    for instruction, rest in instructions_of(text):
        if instruction not in ALLOWED:
            raise refusal(f"{instruction} {rest}", f"only {', '.join(ALLOWED)} are built")
        words = rest.split()
        flags = [word for word in words if word.startswith("--")] if instruction != "RUN" else leading_flags(words)
        for flag in flags:
            if not flag.startswith(ALLOWED_FLAGS.get(instruction, ()) or ("\0",)):
                raise refusal(f"{instruction} {rest}", f"the flag {flag!r} is not allowed")
            if flag.startswith("--from=") and flag.removeprefix("--from=") not in stages:
                images.append(image_of(flag.removeprefix("--from="), rest))
        if instruction == "LABEL" and OWN_LABELS in rest:
            raise refusal(f"{instruction} {rest}", f"labels of {OWN_LABELS!r} are the host's")
        if instruction == "FROM":
            if words[0] not in stages:
                images.append(image_of(words[0], rest))
            if len(words) == 3 and words[1].upper() == "AS":
                stages.add(words[2])
            stages.add(str(num_stages))
            num_stages += 1
    if not images:
        raise SandboxError("the Dockerfile has no FROM; begin it with the image that it builds upon")
    return images


def instructions_of(text: str) -> list[tuple[str, str]]:
    """Name and rest of every instruction. Lines that end in a backslash go on; comments between them are left out."""
    found: list[tuple[str, str]] = []
    going_on = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            if not found and not going_on and re.match(r"\s*#\s*\w+\s*=", line):
                raise refusal(line, "directives choose another reader")
            continue
        going_on += line.rstrip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            continue
        if going_on.strip():
            name, _, rest = going_on.strip().partition(" ")
            if rest.rstrip().endswith("\\"):
                raise refusal(going_on, "it ends in a backslash, and whether it goes on depends on the reader")
            found.append((name.upper(), rest.strip()))
        going_on = ""
    if going_on.strip():
        raise refusal(going_on, "its last line goes on, and nothing comes")
    return found


def as_read(text: str) -> str:
    """The same Dockerfile with an instruction a line: what was checked is what is built, however an engine reads lines.

    >>> as_read("FROM a\\nRUN true \\\\\\n  # and then\\n  && false")
    'FROM a\\nRUN true   && false\\n'
    """
    return "".join(f"{name} {rest}\n" for name, rest in instructions_of(text))


def leading_flags(words: list[str]) -> list[str]:
    """Of RUN: its own come first, the rest are its command's."""
    flags: list[str] = []
    for word in words:
        if not word.startswith("--"):
            break
        flags.append(word)
    return flags


def image_of(name: str, rest: str) -> str:
    if not IMAGE.fullmatch(name):
        raise refusal(rest, f"{name!r} is no name of an image")
    return name


def refusal(line: str, reason: str) -> SandboxError:
    return SandboxError(f"the Dockerfile asks for {line.strip()[:200]!r}: {reason}")
