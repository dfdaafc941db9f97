"""The command-line parser of `python -m sandboxes`, which answers an unknown word with the nearest valid one."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, cast


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
