"""The command line `python -m sandboxes`: `doctor`, `check`, `reap` and `image`.

An unknown word is answered with the nearest valid one.
"""

import argparse
import asyncio
import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import NoReturn, cast

from areal_agent.errors import SandboxError
from sandboxes.cgroups import reap_groups
from sandboxes.conformance import ROWS, Verdict, check
from sandboxes.containers.engine import Engine
from sandboxes.containers.images import DEFAULT_IMAGE, make_default_image
from sandboxes.doctor import examine, strongest_backend
from sandboxes.pool import ISOLATION_OF, OLD_NAMES, Backend, open_pool
from sandboxes.subprocess import reap_folders


def main() -> int:
    parser = Parser(prog="python -m sandboxes", description="Sandboxes on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    examining = commands.add_parser("doctor", help="what works here, and why the rest does not")
    examining.add_argument("--json", action="store_true", help="for programs: subject, works, detail of each")
    checking = commands.add_parser("check", help="run the hostile suite; exit 1 when a row fails")
    checking.add_argument("--backend", choices=(*ISOLATION_OF, *OLD_NAMES), required=True)
    commands.add_parser("reap", help="remove what dead processes left")
    commands.add_parser("image", help="make the default image of containers, from this machine's package mirror")
    options = parser.read(sys.argv[1:])
    if options.command == "doctor":
        return asyncio.run(print_json() if options.json else print_findings())
    if options.command == "check":
        return asyncio.run(print_table(options.backend))
    return asyncio.run(print_image() if options.command == "image" else print_reaped())


async def print_findings() -> int:
    findings = await examine()
    for finding in findings:
        print(f"{'yes' if finding.works else 'no':4}{finding.subject:24}{finding.detail}")
    print(f"backend auto takes: {strongest_backend(findings)}")
    return 0


async def print_json() -> int:
    print(json.dumps([asdict(finding) for finding in await examine()]))
    return 0


async def print_reaped() -> int:
    print(f"removed {reap_groups()} trees of control groups and {reap_folders()} folders of dead processes")
    try:
        async with open_pool(backend="docker") as pool:
            print(f"removed {await pool.reap()} containers of dead processes")
    except SandboxError as error:
        print(f"no containers: {error}")
    return 0


async def print_image() -> int:
    """Make the default image unless it exists; return 1 when it cannot be made."""
    try:
        engine = await Engine.connect()
        try:
            is_new = await make_default_image(engine)
        finally:
            await engine.aclose()
    except SandboxError as error:
        print(f"no image: {error}", file=sys.stderr)
        return 1
    print(f"{DEFAULT_IMAGE} {'is made' if is_new else 'was there'}")
    return 0


async def print_table(backend: Backend) -> int:
    """Print the hostile suite, a line per row; return 1 when a row failed, 2 when the backend does not work here."""
    num_failed = 0
    try:
        async with open_pool(backend=backend, wall_s=20.0) as pool:
            print("isolation:", pool.capabilities().isolation.value)
            for row in ROWS:
                verdict, seen = await check(row, pool)
                num_failed += verdict is Verdict.FAILED
                print(f"{row.number:3} {verdict.value:7}{row.harm} -> {row.required} {seen}".rstrip(), flush=True)
            for act in pool.capabilities().cannot_stop:
                print("cannot stop:", act)
    except SandboxError as error:
        print(f"the {backend} backend does not work here: {error}", file=sys.stderr)
        return 2
    return 1 if num_failed else 0


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose errors are one line and a hint. Subcommands go to `command`."""

    def __init__(self, *, prog: str, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line; a wrong one ends the process with exit code 2."""
        self._refuse_unknown(words)  # before argparse complains about something missing
        return self.parse_args(words)

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        commands = self._commands()
        for index, word in enumerate(words):
            if word.startswith("-"):
                option = word.partition("=")[0]
                if option not in self._option_string_actions:
                    self.error(f"unknown option {option!r}; {nearest(option, self._option_string_actions)}")
            elif commands:
                if word not in commands:
                    self.error(f"unknown command {word!r}; {nearest(word, commands)}")
                commands[word]._refuse_unknown(words[index + 1 :])
                return

    def _commands(self) -> Mapping[str, "Parser"]:
        """Return the subcommands by name; empty for a parser that is itself a subcommand."""
        choices = next((action.choices for action in self._actions if action.dest == "command"), None)
        return cast("Mapping[str, Parser]", choices or {})

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\ntry: {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def nearest(word: str, valid: Iterable[str]) -> str:
    """
    >>> nearest("docter", ["doctor", "reap"]), nearest("x", ["b", "a"])
    ("did you mean 'doctor'?", 'valid: a, b')
    """
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
